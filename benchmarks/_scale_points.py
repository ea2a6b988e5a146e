"""The points of the scale curves, which of them are kept out of what the estimate is fitted to, and the table they stand in.

Both are fixed here, before anything is measured. A part is what one card measures in ten minutes, the points of most worth
first; parts run beside each other on several cards.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from _arms import ARMS, Builder, settings

from engine.config.facts import Facts, StepTime
from engine.config.tree import FieldSpec
from engine.config.tree import fields as fields_of
from engine.data.gather_facts import gather_facts
from engine.facts import counts, step_times
from engine.hardware import Gpu, Machine
from engine.planning import memory_model

ARM = {
    "lora": "ours by default", "full": "ours by default", "plain": "plain layers by default", "full plain":
    "plain layers by default", "nf4": "nf4 by default", "fp8": "fp8 by default",
}  # fmt: skip
"""How weights are trained, held and computed, in a word, and the arm of `_arms.py`: layers are compiled where `auto` does
so in a long run, `plain` as it leaves them in a short one."""


@dataclass(frozen=True)
class Point:
    """So many rows of so many tokens through a Qwen3 shape. `kept_out`: what the estimate says of it is compared, not fitted."""

    shape: str
    way: str
    rows: int
    tokens: int
    kept_out: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape} {self.way} {self.rows}x{self.tokens}"

    @property
    def arm(self) -> str:
        return ARM[self.way]

    def options(self) -> argparse.Namespace:
        """What `_arms.Builder` is asked for."""
        return argparse.Namespace(
            shape=self.shape, full=self.way.startswith("full"), rows=self.rows, tokens=self.tokens, ragged=False, answer=64,
            arms=[self.arm], window=1,
        )  # fmt: skip


def of(text: str) -> list[Point]:
    """Points as they are written below: `4b lora: 4x2048 1x2048*`, those with a star kept out."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        kind, _, sizes = line.partition(":")
        shape, _, way = kind.partition(" ")
        for size in sizes.split():
            rows, tokens = size.removesuffix("*").split("x")
            found.append(Point(shape, way, int(rows), int(tokens), size.endswith("*")))
    return found


PARTS = {
    "lengths": of("""
        8b lora: 1x2048 1x8192 1x32768 1x512 1x16384* 1x1024* 1x4096 1x131072 1x65536*
    """),
    "batches": of("""
        8b lora: 4x2048 16x2048*
        0.6b lora: 4x2048
        4b lora: 4x2048
        14b lora: 4x2048*
        1.7b lora: 4x2048*
        8b lora: 2x2048 8x2048*
        0.6b lora: 1x2048 16x2048*
        1.7b lora: 1x2048
        4b lora: 1x2048* 2x8192
        14b lora: 1x2048
        0.6b lora: 1x8192 1x32768*
        32b lora: 1x2048 4x2048
    """),
    "quantized": of("""
        8b nf4: 4x2048 1x2048
        14b nf4: 4x2048*
        32b nf4: 4x2048
        4b nf4: 4x2048
        8b fp8: 4x2048 1x2048
        14b fp8: 4x2048*
        4b fp8: 4x2048
        32b fp8: 4x2048
        8b nf4: 1x16384 1x8192*
        8b fp8: 1x16384 1x8192*
        32b nf4: 1x2048*
        0.6b nf4: 4x2048
        1.7b fp8: 4x2048*
    """),
    "full": of("""
        0.6b full: 4x2048 1x2048
        1.7b full: 4x2048*
        4b full: 4x2048 1x2048*
        8b plain: 4x2048 1x2048
        0.6b plain: 4x2048
        1.7b plain: 4x2048*
        1.7b full: 1x2048 1x8192
        8b plain: 1x8192* 1x16384
        14b plain: 4x2048
        0.6b full: 16x2048* 1x16384
        0.6b plain: 1x2048*
        0.6b full plain: 4x2048 1x2048
        8b full: 1x2048*
        1.7b full plain: 4x2048* 1x2048
        4b full plain: 4x2048
    """),
    "tiny": of("""
        tiny lora: 1x32 1x64* 1x128 1x256 2x64 4x64* 8x64
        tiny full: 1x32 1x64* 1x128 1x256 4x64
    """),
}  # fmt: skip
"""All points. `tiny` shows on a CPU that everything runs, and no time of interest."""
POINTS = {point.name: point for part in PARTS.values() for point in part}


@dataclass(frozen=True)
class Measured:
    """A point as it was measured; `step.peak_mib` is what the process held of the card, its context too."""

    point: Point
    step: StepTime
    allocated_mib: float
    """The most that tensors took of it."""
    gpu: Gpu | None
    date: str = ""
    commit: str = ""
    torch: str = ""
    transformers: str = ""
    slow: str = ""
    """The fastest and the slowest step in seconds."""

    def columns(self) -> dict[str, Any]:
        """A line of the table: what stands in that of the package, and beside it where and when."""
        gpu = self.gpu
        where = {
            "card_bytes": gpu.memory_bytes if gpu else "",
            "capability": ".".join(map(str, gpu.capability)) if gpu else "",
        }
        beside = {name: getattr(self, name) for name in ("date", "commit", "torch", "transformers", "slow")}
        own = {each.name: getattr(self.step, each.name) for each in fields(StepTime)}
        first = {"point": self.point.name, "kept_out": self.point.kept_out}
        return {**first, **own, "allocated_mib": round(self.allocated_mib), **where, **beside}


def measured_of(line: Mapping[str, str]) -> Measured | None:
    """A line of the table; None for a point that the curves do not have (any more) or that nobody can have measured."""
    step, point = step_times.row_of(line), POINTS.get(line.get("point", ""))
    if step is None or point is None:
        return None
    gpu = None
    if line.get("card_bytes") and (capability := re.fullmatch(r"(\d+)\.(\d+)", line.get("capability", ""))):
        gpu = Gpu(step.card, int(line["card_bytes"]), (int(capability[1]), int(capability[2])))
    beside = {name: line.get(name, "") for name in ("date", "commit", "torch", "transformers", "slow")}
    return Measured(point, step, float(line.get("allocated_mib") or 0), gpu, **beside)


def read(files: Iterable[Path]) -> list[Measured]:
    """All points of these tables, the last measurement of a point on a card in the place of those before it."""
    found: dict[tuple[str, str], Measured] = {}
    for file in files:
        if file.exists():
            with file.open(encoding="utf-8", newline="") as lines:
                for line in csv.DictReader(lines):
                    if (each := measured_of(line)) is not None:
                        found[each.step.card, each.point.name] = each
    return list(found.values())


def add(file: Path, measured: Measured) -> None:
    """One more line of the table, at once: what is cut off later has lost nothing."""
    columns = measured.columns()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as out:
        lines = csv.DictWriter(out, list(columns), lineterminator="\n")
        if new:
            lines.writeheader()
        lines.writerow(columns)


def described(point: Point, folder: Path, machine: Machine | None = None) -> tuple[Any, Facts, StepTime]:
    """The config that the point runs with on this machine, or on another, its facts, and its step without what is measured.

    `folder` holds the model's config.json.
    """
    config = settings(point.options(), "sft", ARMS[point.arm], folder, machine)
    facts = gather_facts(config, machine=machine, sources=False)
    found = counts.parameters(config, facts)
    tokens = point.rows * point.tokens
    asked = step_times.step_of(config, facts, tokens, point.tokens, found.base if found is not None else 0)
    if asked is None:
        raise SystemExit(f"{point.name}: the shape is not known")
    return config, facts, asked


def estimated_mib(config: Any, facts: Facts) -> float:
    """What the closed-form estimate says that the point takes of the card."""
    classes = memory_model.memory(config, facts, config.memory.gradient_checkpointing) or {}
    return sum(classes.values()) / 2**20


def estimated_again(measured: Measured) -> tuple[StepTime, float, str]:
    """The step with what is counted counted anew, MiB by today's formula for what was measured on that card, and what `auto`
    takes there today where that differs."""
    machine = Machine(gpus=(measured.gpu,)) if measured.gpu else Machine()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        Builder(measured.point.options(), "sft", folder, None)
        config, facts, step = described(measured.point, folder, machine)
    now = f"checkpointing {step.again}, compiled {step.compiled}"
    then = f"checkpointing {measured.step.again}, compiled {measured.step.compiled}"
    was = measured.step
    taken = {name: getattr(was, name) for name in ("card", "compiled", "again", "seconds", "peak_mib")}
    config = config.with_values(as_measured(was))
    return replace(step, **taken), estimated_mib(config, facts), "" if now == then else f"today {now}"


def as_measured(step: StepTime) -> dict[FieldSpec, Any]:
    """The settings of memory and compiler that a step was measured with."""
    tier, _, layers = step.again.partition(" of ")
    return {
        fields_of.memory.gradient_checkpointing: {"True": True, "False": False}.get(tier, tier),
        fields_of.memory.recompute_num_layers: int(layers) if layers else None,
        fields_of.kernels.torch_compile: step.compiled,
    }


def fitted_to(measured: Iterable[Measured]) -> list[StepTime]:
    """The steps that the estimate may read: those of points that are not kept out."""
    return [each.step for each in measured if not each.point.kept_out]
