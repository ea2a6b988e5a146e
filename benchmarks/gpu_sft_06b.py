"""SFT with LoRA of a randomly initialised Qwen3-0.6B shape in bf16, launched and watched through its run folder.

    python benchmarks/gpu_sft_06b.py [--steps 60] [--commit HASH] [--results FILE]

Packs of generated rows of 2,048 tokens, 4 a step, gradient checkpointing on. Printed: the steady step time, tokens/s, MFU
and peak memory as the run's own events tell them, and how the run ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _figures import Results, result_options
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from engine.builtin import tiny
from engine.config.files import dump
from engine.rules import read
from engine.run.index import open_view
from engine.run.launch import launch


def make_model(folder: Path) -> None:
    shape = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):
        Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.folder()).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit", type=float, default=300, help="seconds to wait for the run")
    result_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place) / "model")
        mapping = {
            "version": 1,
            "model": {"name": str(Path(place) / "model")},
            "adapter": {"kind": "lora", "r": 16},
            "data": {"train": [{"path": "builtin/dates"}], "max_length": 2048, "packing": True},
            "optim": {"max_steps": options.steps, "num_train_epochs": 100, "gradient_accumulation_steps": 1},
            "memory": {"gradient_checkpointing": True},
            "run": {"save_steps": 40, "prompts": ["What is 3 March 2021 in ISO form?"]},
        }
        mapping["optim"].pop("num_train_epochs")
        config = read(mapping).config
        run = launch(dump(config), runs_dir=Path(place) / "runs", name="qwen3-0.6b-shape", devices="auto", info={})
        watch = open_view(run)
        began, shown = time.monotonic(), ""
        while not watch.view.over and time.monotonic() - began < options.limit:
            time.sleep(0.5)
            watch.poll()
            if watch.view.phase != shown:
                shown = watch.view.phase
                print(f"{time.monotonic() - began:6.1f} s  {shown}", flush=True)
        watch.poll()
        events = [json.loads(line) for line in run.events.read_text().splitlines()]
        if watch.view.state != "finished":
            print(run.log.read_text()[-3000:])
        report(options, watch.view.state, events)


def report(options: argparse.Namespace, state: str, events: list[dict]) -> None:
    steps = [e for e in events if e["kind"] == "metrics" and e["step"] > 10 and "step_seconds" in e]
    if not steps:
        raise SystemExit(f"the run is {state} without a step; {events[-1]}")
    times = sorted(e["step_seconds"] * 1e3 for e in steps)
    rate = statistics.median(e["tokens_per_second"] for e in steps)
    summary = {
        "device": torch.cuda.get_device_name(),
        "state": state,
        "step_ms": round(statistics.median(times), 2),
        "tokens_per_second": round(rate),
        "mfu": steps[-1].get("mfu"),
        "peak_mib": round(max(e["memory_peak"] for e in steps) / 2**20),
        "loss": [round(e["loss"], 3) for e in (steps[0], steps[-1])],
        "gpu_events": sum(e["kind"] == "gpu" for e in events),
        "checkpoints": [e["step"] for e in events if e["kind"] == "checkpoint" and e["state"] == "committed"],
        "receipt": next(e["entries"] for e in events if e["kind"] == "receipt"),
    }
    print(json.dumps(summary, indent=1))
    results = Results(options, summary["device"], "torch")
    shape = "4x2048 packed, checkpointing"
    results.add("sft_06b_lora", shape, ms=times, peak_mib=summary["peak_mib"])


if __name__ == "__main__":
    main()
