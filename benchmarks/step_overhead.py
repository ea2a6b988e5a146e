"""What the engine adds to a training step: ours (events, receipt, telemetry, batch ids) against the plain TRL trainer.

    python benchmarks/step_overhead.py [--shape tiny|0.6b] [--pairs 40] [--steps 120] [--seconds 330]
                                       [--results FILE --commit HASH]

Both train the same prepared rows with the same settings and no saving, in one process, in turn (A B B A A B ...), until
the pairs are made or the seconds are over. A run's time is from the end of its third step to the end of its last.
Printed: the median ratio ours / plain with the 95% interval of the median (bootstrap over pairs), the same by CPU time
(all threads; what a busy machine still measures), and our own Python a step, timed around our hooks, by the clock and
by the CPU time of the training's thread. What the writer's thread does beside the step counts in the CPU ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _device import processor
from _figures import Results, ratio, result_options
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed
from transformers.utils import logging
from trl import SFTTrainer

from engine.config.files import as_yaml
from engine.data.collate import LanguageCollator
from engine.models.adapters import add_adapter
from engine.planning.auto import resolved
from engine.rules import read
from engine.run.async_writer import AsyncWriter
from engine.run.control import Controls
from engine.run.store import create
from engine.trainers import sft, token_counts
from engine.trainers.job import Job
from engine.trainers.receipt import receipt
from engine.trainers.watching import Watching

WARM_STEPS = 3
Pace = tuple[float, float]


class Clock(TrainerCallback):
    """Notes when each step ended, after the device has done it."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append((time.perf_counter(), time.process_time()))


class Timed:
    """Adds up the time spent inside the wrapped methods."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            inner = getattr(owner, name)

            def outer(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
                begun, computed = time.perf_counter(), time.thread_time()
                try:
                    return inner(*args, **kwargs)
                finally:
                    self.seconds += time.perf_counter() - begun
                    self.cpu_seconds += time.thread_time() - computed

            setattr(owner, name, outer)


def shapes(name: str) -> tuple[dict[str, Any], int, int, str]:
    """Model settings, rows a batch, tokens a row, number format."""
    if name == "tiny":
        small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        return {**small, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512}, 64, 48, "float32"
    size = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    return {**size, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}, 4, 2048, "bfloat16"


def make_config(options: argparse.Namespace, dtype: str, batch: int, length: int) -> Any:
    lora = options.shape != "tiny"
    mapping = {
        "version": 1,
        "model": {"name": "builtin/tiny", "dtype": dtype},
        "adapter": {"kind": "lora", "r": 16} if lora else {"kind": "none"},
        "data": {"train": [{"path": "builtin/dates"}], "max_length": length},
        "optim": {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": 1,
            "max_steps": options.steps,
            "learning_rate": 1e-4,
        },
        "memory": {"gradient_checkpointing": lora},
        "run": {"save_steps": 1_000_000},
    }
    reading = read(mapping)
    assert not [f for f in reading.findings if f.severity == "error"], reading.findings
    return resolved(reading.config)


def make_rows(count: int, length: int, vocabulary: int) -> Any:
    from datasets import Dataset

    draw = random.Random(0)
    rows = []
    for row in range(count):
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        rows.append({"input_ids": ids, "labels": ids, "row": row})
    return Dataset.from_list(rows)


def build(options: argparse.Namespace, ours: bool, rows: Any, tokenizer: Any, folder: Path, timed: Timed) -> Pace:
    """Trains once; seconds and CPU seconds a step after the warm-up."""
    settings, batch, length, dtype = shapes(options.shape)
    config = make_config(options, dtype, batch, length)
    set_seed(1)
    # What earlier runs left is collected now and not while this one is timed.
    gc.collect()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = add_adapter(Qwen3ForCausalLM(Qwen3Config(**settings)).to(getattr(torch, dtype)), config)
    clock, collator = Clock(), LanguageCollator(pad_token_id=0)
    if not ours:
        arguments = sft.arguments(config, folder)
        arguments.save_strategy = "no"
        trainer = SFTTrainer(
            model=model, args=arguments, data_collator=collator, train_dataset=rows, processing_class=tokenizer,
            callbacks=[clock],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return pace(clock)
    run = create(folder, as_yaml({"version": 1}), {})
    with AsyncWriter(run) as writer:
        controls = Controls(run, writer)
        controls.listen(writer)
        watching = Watching(run, writer, controls, {"method": "sft", "model": "bench", "devices": []}, 1, [], 1, list)
        trainer = sft.build(Job(config, run.path, model, tokenizer, collator, rows, callbacks=[watching, clock]))
        trainer.args.save_strategy = "no"
        watching.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        trainer.attach(run, writer, 2, {})
        prepared = argparse.Namespace(
            counts={"kept": len(rows), "packs": 0}, warnings=(), fingerprint="", dataset=rows, stream=None
        )
        writer.write("receipt", entries=receipt(config, trainer, prepared))
        timed.wrap(watching, "on_step_begin", "on_step_end", "on_log")
        timed.wrap(trainer.counts, "add", "read")
        plain, before = token_counts.counted, (timed.seconds, timed.cpu_seconds)
        timed.wrap(token_counts, "counted")
        trainer.train()
        token_counts.counted = plain
        spent = timed.seconds - before[0], timed.cpu_seconds - before[1]
        options.own.append((spent[0] / options.steps, spent[1] / options.steps))
    assert run.events.read_text().count('"metrics"') == options.steps
    return pace(clock)


def pace(clock: Clock) -> Pace:
    begun, ended, steps = clock.ends[WARM_STEPS - 1], clock.ends[-1], len(clock.ends) - WARM_STEPS
    return (ended[0] - begun[0]) / steps, (ended[1] - begun[1]) / steps


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def rounded(*bounds: float) -> list[float]:
    return [round(bound, 4) for bound in bounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "0.6b"], default="tiny")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=330, help="no pair is begun later than this")
    result_options(parser)
    options = parser.parse_args()
    options.own = []
    logging.set_verbosity_error()
    from transformers import AutoTokenizer

    from engine.builtin import tiny

    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    settings, batch, length, _ = shapes(options.shape)
    rows = make_rows(batch * 8, length, settings["vocab_size"])
    times: dict[bool, list[Pace]] = {True: [], False: []}
    timed, begun = Timed(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for ours in (True, False):
            build(options, ours, rows, tokenizer, Path(folder), timed)
        options.own.clear()
        for pair in range(options.pairs):
            if time.perf_counter() - begun > options.seconds:
                break
            # Each goes first as often as the other, so that a machine that slows down slows both.
            for ours in (True, False) if pair % 2 == 0 else (False, True):
                times[ours].append(build(options, ours, rows, tokenizer, Path(folder), timed))
    clocks = {ours: [clock for clock, _ in found] for ours, found in times.items()}
    pairs, cpu_pairs = (
        [(ours[which], plain[which]) for ours, plain in zip(times[True], times[False], strict=True)] for which in (0, 1)
    )
    share, low, high = ratio(pairs)
    cpu_share, *cpu_interval = ratio(cpu_pairs)
    own = milliseconds([clock for clock, _ in options.own])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0
    print(
        json.dumps(
            {
                "device": device, "threads": torch.get_num_threads(), "shape": options.shape,
                "pairs": len(pairs), "steps": options.steps,
                "ours_ms": milliseconds(clocks[True]), "plain_ms": milliseconds(clocks[False]),
                "ratio": round(share, 4), "interval": rounded(low, high),
                "cpu_ratio": round(cpu_share, 4), "cpu_interval": rounded(*cpu_interval),
                "own_python_ms": own,
                "own_python_cpu_ms": milliseconds([cpu for _, cpu in options.own]),
                "tokens_per_second": round(batch * length / statistics.median(clocks[True])),
            },
            indent=1,
        )
    )  # fmt: skip
    shape = f"{options.shape}; {len(pairs)} pairs of {options.steps} steps"
    told = f"ratio {share:.3f} [{low:.3f}, {high:.3f}]"
    results = Results(options, device, "torch")
    for ours, name, words in ((True, "ours", f"; {told}; own Python {own} ms"), (False, "trl", "")):
        results.add("step_overhead", shape + words, name, ms=[1e3 * value for value in clocks[ours]], peak_mib=peak)


if __name__ == "__main__":
    main()
