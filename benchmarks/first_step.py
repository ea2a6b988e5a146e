"""From the launch to the first step and to full speed: real runs of one shape, with the compiler's caches cold and warm.

    python benchmarks/first_step.py [--shape 8b] [--rows ragged] [--steps 24] [--arms default cold warm plain]
                                    [--with-trl] [--results FILE --commit HASH]
    python benchmarks/first_step.py --shape tiny --steps 6

LoRA, 4 rows a step, cut cross-entropy and checkpointing as `auto` takes them. `ragged` rows have 200 to 2,048 tokens and
are padded, `packed` ones fill packs of 2,048. Each arm is a process as `workbench train` starts it: `default` leaves every
choice to `auto`, `plain` compiles nothing, `cold` compiles with empty caches, `warm` once more with the caches of `cold`.
`--with-trl` adds TRL's own trainer on the same model and rows, in a fresh process. Told are the seconds from launch to
"Training" and to the first step's end, its own seconds, a step's afterwards, from how many steps the compiler's wait is
earned, and what the run's `step_seconds` add up to beside a clock of this process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from _arms import SHAPES, UNTIED
from _figures import Results, result_options
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from engine.builtin import tiny
from engine.config.files import dump
from engine.rules import read
from engine.run.index import open_view
from engine.run.launch import launch
from engine.run.store import RunFolder

POLLED = 0.005
"""Seconds between two looks at a run's events by a clock of our own."""
CARD = torch.cuda.is_available()
ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"torch_compile": False},
    "cold": {"torch_compile": True},
    "warm": {"torch_compile": True},
}
SETTLED = 0.5
"""The last share of a run's steps, whose median is a step at full speed."""


def make_model(folder: Path, name: str) -> None:
    """A Qwen3 shape with random weights, drawn on the device, and the tokenizer of the built-in model."""
    large = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    small = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    shape = Qwen3Config(
        **{**(small if name == "tiny" else large), **SHAPES[name]},
        tie_word_embeddings=name not in UNTIED,
        pad_token_id=0,
    )
    with torch.device("cuda" if CARD else "cpu"):
        model = Qwen3ForCausalLM._from_config(shape, dtype=torch.bfloat16 if CARD else torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.folder()).save_pretrained(folder)


def make_rows(file: Path, tokens: int, count: int) -> None:
    """Questions and answers of random digits and letters, which the built-in tokenizer reads about one token each."""
    draw = random.Random(0)
    with file.open("w") as out:
        for _ in range(count):
            text = "".join(
                draw.choices("0123456789abcdefghijklmnopqrstuvwxyz", k=draw.randint(tokens // 10, tokens - 60))
            )
            out.write(json.dumps({"prompt": "Say it.", "completion": text}) + "\n")


def config(place: Path, given: argparse.Namespace, arm: str) -> dict[str, Any]:
    return {
        "version": 1,
        "model": {"name": str(place / "model"), "dtype": "bfloat16" if CARD else "float32"},
        "adapter": {"kind": "lora", "r": 16},
        "data": {
            "train": [{"path": str(place / "rows.jsonl")}],
            "max_length": given.tokens,
            "packing": given.rows == "packed",
        },
        "optim": {"max_steps": given.steps, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        "kernels": ARMS[arm],
        "run": {"save_steps": 1_000_000},
    }


def take(place: Path, given: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run to its end; its seconds by name."""
    found = read(config(place, given, arm)).config
    begun = time.time()
    run = launch(dump(found), runs_dir=place / "runs", name=arm, devices="auto", info={})
    watch, outside = open_view(run), Outside(run)
    until = time.monotonic() + given.limit
    while not watch.view.over and time.monotonic() < until:
        time.sleep(0.2)
        watch.poll()
    watch.poll()
    outside.end()
    if watch.view.state != "finished":
        print(run.log.read_text()[-3000:])
        raise SystemExit(f"{arm}: the run is {watch.view.state}")
    return {"arm": arm, **seconds(run, begun), "clock": outside.beside_its_own()}


class Outside:
    """A clock of this process beside that of a run: when each step's line was there."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.over = run, threading.Event()
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.run.events.exists() and not self.over.wait(POLLED):
            pass
        with self.run.events.open() as lines:
            while not self.over.wait(POLLED):
                while (line := lines.readline()).endswith("\n"):
                    event = json.loads(line)
                    if event["kind"] == "metrics" and "step_seconds" in event:
                        self.seen.append((time.monotonic(), event))
                lines.seek(lines.tell() - len(line.encode()))

    def end(self) -> None:
        self.over.set()
        self.thread.join()

    def beside_its_own(self) -> dict[str, float]:
        """Seconds of the steps between the second and the last but one by the run's own clock and by this; their ratio. A line is
        written within the step that follows, so the last one, which none follows, comes sooner."""
        steps = self.seen[1:-1]
        own = sum(event["step_seconds"] for _, event in steps[1:])
        outside = steps[-1][0] - steps[0][0] if len(steps) > 1 else 0.0
        return {"steps": len(steps) - 1, "own": own, "outside": outside, "ratio": own / max(outside, 1e-9)}


def seconds(run: RunFolder, begun: float) -> dict[str, Any]:
    """What the run's own events tell, beside the clock that launched it."""
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    phases = [(event["name"], event["t"]) for event in events if event["kind"] == "phase"]
    steps = [event for event in events if event["kind"] == "metrics" and "step_seconds" in event]
    training = next(at for name, at in phases if name == "Training")
    # Its line comes within the second step.
    first = training + steps[0]["step_seconds"]
    ends = [at for _, at in phases[1:]] + [max(first, phases[-1][1])]
    last = steps[int(len(steps) * (1 - SETTLED)) :]
    took: dict[str, float] = {}
    for (name, at), end in zip(phases, ends, strict=True):
        took[name] = round(took.get(name, 0.0) + end - at, 1)
    rate = sum(event["tokens"] - before["tokens"] for before, event in itertools.pairwise(last))
    compiled = [
        entry.get("detail", "")
        for event in events
        if event["kind"] == "receipt"
        for entry in event["entries"]
        if entry.get("feature") == "torch.compile"
    ]
    return {
        "phases": took,
        "launch_to_training": training - begun,
        "launch_to_first_step": first - begun,
        "first_step": steps[0]["step_seconds"],
        "first_steps": [round(event["step_seconds"], 2) for event in steps[:6]],
        "step": statistics.median(event["step_seconds"] for event in last),
        "tokens_per_second": round(rate / max(last[-1]["t"] - last[0]["t"], 1e-9)),
        "peak_mib": max(event.get("memory_peak", 0) for event in steps) / 2**20,
        "compiled": compiled[-1] if compiled else "",
    }


# TRL as its documentation has it, the same rows and settings; times are from the launch of this process.
TRL = """
import json, sys, time
begun, place, packed, steps, tokens = float(sys.argv[1]), sys.argv[2], sys.argv[3] == "packed", int(sys.argv[4]), int(sys.argv[5])
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

card = torch.cuda.is_available()
marks = []


class Clock(TrainerCallback):
    def note(self, *_, **__):
        if card:
            torch.cuda.synchronize()
        marks.append(time.time())

    on_train_begin = on_step_end = note


model = AutoModelForCausalLM.from_pretrained(place + "/model", dtype=torch.bfloat16 if card else torch.float32)
rows = load_dataset("json", data_files=place + "/rows.jsonl", split="train")
trainer = SFTTrainer(
    model=model, train_dataset=rows, callbacks=[Clock()],
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(
        output_dir=place + "/trl", max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=1,
        max_length=tokens, packing=packed, report_to="none", save_strategy="no", bf16=card, use_cpu=not card,
    ),
)
if card:
    torch.cuda.reset_peak_memory_stats()
trainer.train()
took = [later - earlier for earlier, later in zip(marks, marks[1:])]
last = sorted(took[len(took) // 2 :])
print(json.dumps({
    "launch_to_training": marks[0] - begun, "first_step": took[0], "launch_to_first_step": marks[1] - begun,
    "step": last[len(last) // 2], "peak_mib": torch.cuda.max_memory_reserved() / 2**20 if card else 0.0,
}))
"""


def take_trl(place: Path, given: argparse.Namespace) -> dict[str, Any]:
    """TRL's run to its end, in a process of its own; its seconds by name."""
    told = [str(time.time()), str(place), given.rows, str(given.steps), str(given.tokens)]
    done = subprocess.run([sys.executable, "-c", TRL, *told], capture_output=True, text=True, timeout=given.limit)
    if done.returncode != 0:
        raise SystemExit(f"TRL's trainer: {done.stderr[-2000:]}")
    return {"arm": "trl", **json.loads(done.stdout.strip().splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=[*(name for name in SHAPES if "a3b" not in name)])
    parser.add_argument("--rows", default="ragged", choices=["ragged", "packed"])
    parser.add_argument("--arms", nargs="*", default=["default", "plain", "cold", "warm"], choices=list(ARMS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--with-trl", action="store_true", help="also TRL's trainer as it comes, on the same rows")
    parser.add_argument("--limit", type=float, default=300, help="seconds to wait for a run")
    result_options(parser)
    given = parser.parse_args()
    if given.shape == "tiny":
        given.tokens = min(given.tokens, 256)
    results = Results(given, torch.cuda.get_device_name() if CARD else "cpu", "torch", "triton")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
            os.environ[name] = str(place / folder)  # empty at first; what a worker's environment keeps
        make_model(place / "model", given.shape)
        if CARD:
            torch.cuda.empty_cache()
        make_rows(place / "rows.jsonl", given.tokens, given.steps * 8 + 64)
        took: dict[str, dict[str, Any]] = {}
        shape = f"{given.shape} lora {given.rows} 4x{given.tokens}"
        for arm in [*given.arms, *(["trl"] if given.with_trl else [])]:
            took[arm] = one = take_trl(place, given) if arm == "trl" else take(place, given, arm)
            print(json.dumps(one, default=lambda x: round(x, 3)), flush=True)
            words = {
                "default": "ours by default",
                "plain": "ours, plain",
                "cold": "ours, compiled cold",
                "warm": "ours, compiled warm",
                "trl": "trl",
            }[arm]
            for work in ("launch_to_training", "first_step", "launch_to_first_step"):
                results.add(work, shape, words, ms=[1e3 * one[work]])
            if clock := one.get("clock"):
                told = f"{shape}; {clock['steps']} steps; step_seconds / a clock outside {clock['ratio']:.4f}"
                results.add("step_clock", told, words, ms=[1e3 * clock["own"] / max(clock["steps"], 1)])
            results.add(
                "by_default" if arm in ("default", "trl") else "full_speed",
                shape,
                words,
                ms=[1e3 * one["step"]],
                peak_mib=one["peak_mib"],
            )
        for arm in ("cold", "warm"):
            if arm in took and "plain" in took and took[arm]["step"] < took["plain"]["step"]:
                wait = took[arm]["first_step"] - took["plain"]["first_step"]
                gain = took["plain"]["step"] - took[arm]["step"]
                print(
                    f"{shape}, {arm}: {wait:.1f} s of waiting are earned after {wait / gain:.0f} steps of {gain:.3f} s less"
                )


if __name__ == "__main__":
    main()
