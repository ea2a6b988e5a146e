"""What the estimate says of every whole step in `results.csv` that it can be asked about, beside what was measured.

    python benchmarks/step_estimates.py [--results FILE] [--device "NVIDIA H200"] [--worse 1.5] [--all]

Methods, mixtures, quantized bases, tiers of checkpointing and streamed layers: rows that `whole_step.py`, `gpu_methods.py` and
`by_default.py` wrote, newest of each step, arms of ours. A card's numbers are fitted to the scale curves alone (`engine.facts.step_times`),
but what mixtures, held scores and plain layers' tiers take was set with rows of this file in sight (LAB.md says which). Told is estimate / measured, row by row, the middle of each work, and how many lie within 10, 25 and
50 %. The exit code is 1 where one is off by more than `--worse` times. Needs no card.
"""

from __future__ import annotations

import argparse
import csv
import logging
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from _arms import ARMS, AS_BEFORE, PEERS, Builder, settings
from _figures import SETTINGS
from _method_rows import GENERATES

from engine.config.facts import DataFacts
from engine.config.method import METHODS
from engine.data.gather_facts import gather_facts
from engine.errors import WorkbenchError
from engine.facts import counts
from engine.hardware import Gpu, Machine
from engine.planning.speed import card_batch_seconds

CARDS = {
    "NVIDIA H200": Gpu("NVIDIA H200", 150_754_820_096, (9, 0)),
    "NVIDIA H100 80GB HBM3": Gpu("NVIDIA H100 80GB HBM3", 85_029_158_912, (9, 0)),
}
SHAPE_OF = {"06b": "0.6b", "8b": "8b", "moe": "30b-a3b of 8 layers", "30b": "30b-a3b", "gptoss": "gptoss-20b"}
RAGGED = 0.625
"""Share of the longest row that rows of a quarter up to all of it have in the middle."""


@dataclass(frozen=True)
class Step:
    """A whole step as it was measured."""

    device: str
    shape: str
    method: str
    full: bool
    rows: int
    tokens: int
    ragged: bool
    accumulation: int
    arm: str
    seconds: float

    @property
    def name(self) -> str:
        words = f"{self.rows}x{self.tokens}{' ragged' * self.ragged}"
        return f"{self.shape} {'full' if self.full else 'lora'} {self.method} {words}: {self.arm}"


def step_of(row: Mapping[str, str]) -> Step | None:
    """The step of a row; None for other work, other libraries' arms, and arms that are no more."""
    work, shape = row["work"], row["shape"]
    if work == "by_default" and ": " in shape:
        work, shape = shape.partition(": ")[2].split(", ", 1)
    found = re.fullmatch(r"step_(06b|8b|moe|30b|gptoss)(?:_8_layers|_a3b|_20b)?(?:_(full|lora))?(?:_(\w+))?", work)
    size = re.match(r"(\d+)x(\d+)( ragged)?(?:, (\d+) batches)?", shape)
    arm = shape.rpartition(SETTINGS)[2] if row["impl"] == "ours" and SETTINGS in shape else row["impl"]
    if not found or not size or arm not in ARMS or arm in PEERS or AS_BEFORE in arm or not row["ms"]:
        return None
    method = found[3] if found[3] in METHODS else "sft"
    if method in GENERATES or row["device"] not in CARDS:
        return None
    return Step(
        row["device"], SHAPE_OF[found[1]], method, found[2] == "full", int(size[1]), int(size[2]), bool(size[3]),
        int(size[4] or 1), arm, float(row["ms"]) / 1e3,
    )  # fmt: skip


class Described(Builder):
    """A base that is only described."""

    def prepared_rows(self) -> Any:
        return None


@lru_cache(maxsize=64)
def folder_of(shape: str, method: str) -> tempfile.TemporaryDirectory[str]:
    place = tempfile.TemporaryDirectory()
    options = argparse.Namespace(shape=shape, arms=[], full=False, rows=4, tokens=2048, ragged=False, answer=64)
    Described(options, method, Path(place.name), None)
    return place


def told(step: Step) -> float:
    """Seconds that the estimate says of it."""
    options = argparse.Namespace(**{name: getattr(step, name) for name in Step.__dataclass_fields__}, answer=64)
    options.arms = [step.arm]
    machine = Machine(gpus=(CARDS[step.device],), cpu_count=16, memory_bytes=128 * 2**30)
    folder = Path(folder_of(step.shape, step.method).name)
    config = settings(options, step.method, ARMS[step.arm], folder, machine)
    facts = gather_facts(config, machine=machine, sources=False)
    if step.ragged:
        facts = replace(facts, data=DataFacts(lengths=tuple(range(step.tokens // 4, step.tokens, 2))))
    parameters = counts.parameters(config, facts)
    tokens = step.rows * step.tokens * (RAGGED if step.ragged else 1)
    one = card_batch_seconds(config, facts, parameters, tokens) if parameters else None
    if one is None:
        raise SystemExit(f"{step.name}: nothing is told")
    return one * step.accumulation


def newest(rows: Iterator[Mapping[str, str]], device: str | None) -> list[Step]:
    """The last measurement of each step on each card."""
    steps = {}
    for row in rows:
        step = step_of(row)
        if step is not None and device in (None, step.device):
            steps[step.device, step.name] = step
    return list(steps.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.csv"))
    parser.add_argument("--device", choices=list(CARDS))
    parser.add_argument("--worse", type=float, default=1.5)
    parser.add_argument("--all", action="store_true", help="every row, and not those alone that are off by a quarter")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with given.results.open(encoding="utf-8", newline="") as lines:
        steps = newest(csv.DictReader(lines), given.device)
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for step in steps:
        try:
            ratio = told(step) / step.seconds
        except (WorkbenchError, SystemExit) as problem:
            print(f"{step.device} {step.name}: left out, {str(problem)[:120]}")
            continue
        ratios.setdefault((step.device, step.shape, f"{'full' if step.full else 'lora'} {step.method}"), []).append(
            ratio
        )
        if given.all or not 0.8 <= ratio <= 1.25:
            print(f"{ratio:5.2f}  {step.seconds:7.3f} s  {step.device.split()[1]} {step.name}")
    for (card, shape, what), each in sorted(ratios.items()):
        middle = statistics.median(each)
        print(
            f"{card} {shape} {what}: {middle:.2f} in the middle, {min(each):.2f} to {max(each):.2f}, {len(each)} steps"
        )
    every = [ratio for each in ratios.values() for ratio in each]
    within = ", ".join(f"{sum(1 / most <= each <= most for each in every)} within {most}" for most in (1.1, 1.25, 1.5))
    print(f"{len(every)} steps, {within}")
    return int(any(not 1 / given.worse <= each <= given.worse for each in every))


if __name__ == "__main__":
    sys.exit(main())
