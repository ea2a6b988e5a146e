"""Tokens a second and memory over length, batch and model size on this card: one table, one picture, and what the estimate reads.

    python benchmarks/scale_curves.py [--curves length batch size full] [--seconds 540] [--rounds 7]
                                      [--table FILE] [--picture FILE.svg] [--results FILE --commit HASH]
    python benchmarks/scale_curves.py --shape tiny --tokens 32 64 128 256 --rounds 3

Supervised fine-tuning of Qwen3 shapes with random weights, ours by default, every `auto` left: 8B with LoRA over lengths of
512 to 131,072 tokens in one row and over batches of 1 to 16 rows of 2,048, all sizes from 0.6B to 32B with LoRA at 4 rows of
2,048 (14B and 32B in NF4 too), and all weights of the sizes that fit. A point that has no memory is told and left out. A
point's time is the median of its steps after the first three, its memory what it takes alone at its peak.

Rows go into `--table` (`engine.facts.step_times`, by default the one in the user's cache, from which the estimate then
tells time on this card; those that come with the package stand in engine/facts/step_times.csv). Every third point is
kept out of the fit, and told is by how much it is missed, time by the fit and memory by the closed-form estimate: within
10 % is aimed at. A point that is in the table is not measured again, so a card that is lent for minutes goes on where
it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from _arms import ARMS, SHAPES, Builder, settings
from _figures import Results, result_options
from _turns import CARD
from gpu_methods import say

from engine.builtin import tiny
from engine.config.facts import StepTime
from engine.data.gather_facts import look_at
from engine.errors import WorkbenchError
from engine.facts import counts, step_times
from engine.planning import memory_model

AIM = 0.10
LENGTHS = tuple(2**power for power in range(9, 18))
BATCHES = 1, 2, 4, 8, 16
SIZES = "0.6b", "1.7b", "4b", "8b", "14b", "32b"


@dataclass(frozen=True)
class Point:
    """So many rows of so many tokens through a shape, by an arm of `_arms.py`."""

    curve: str
    shape: str
    rows: int
    tokens: int
    arm: str = "ours by default"
    full: bool = False

    def words(self) -> str:
        weights = "full" if self.full else self.arm.removesuffix(" by default").replace("ours", "lora")
        return f"{self.shape} {weights} {self.rows}x{self.tokens}"


def points(curves: list[str], shape: str, lengths: list[int]) -> Iterator[Point]:
    """The points of these curves, the cheap ones of each first."""
    if "length" in curves:
        yield from (Point("length", shape, 1, tokens) for tokens in lengths)
    if "batch" in curves:
        tokens = 2048 if 2048 in lengths else lengths[0]
        yield from (Point("batch", shape, rows, tokens) for rows in BATCHES)
    if shape == "tiny":
        return
    if "size" in curves:
        yield from (Point("size", name, 4, 2048) for name in SIZES if name != "32b")
        yield from (Point("size", name, 4, 2048, "nf4 by default") for name in SIZES[3:])
    if "full" in curves:
        yield from (Point("full", name, rows, 2048, full=True) for name in SIZES[:3] for rows in (1, 4))


def described(point: Point, card: str, folder: Path) -> tuple[Any, Any, StepTime]:
    """The config that the point runs with, its facts, and the row of the table without what is measured."""
    options = argparse.Namespace(
        shape=point.shape,
        full=point.full,
        rows=point.rows,
        tokens=point.tokens,
        ragged=False,
        answer=64,
        arms=[point.arm],
    )
    config = settings(options, "sft", ARMS[point.arm], folder)
    facts = look_at(config, sources=False)
    found = counts.parameters(config, facts)
    asked = step_times.asked_of(
        config, facts, point.rows * point.tokens, point.tokens, found.base if found is not None else 0
    )
    if asked is None:
        raise SystemExit(f"{point.words()}: the shape is not known")
    return config, facts, replace(asked, card=card)


def measure(point: Point, rounds: int, card: str) -> tuple[StepTime, float] | str:
    """The row of the table and the MiB that the estimate says; a sentence where there is no memory for it."""
    options = argparse.Namespace(
        shape=point.shape, full=point.full, rows=point.rows, tokens=point.tokens, ragged=False, answer=64,
        arms=[point.arm], window=1,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.folder())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        arm = None
        try:
            builder = Builder(options, "sft", folder, tokenizer)
            config, facts, row = described(point, card, folder)
            arm = builder.arm(point.arm)
            arm.warm()
            times = [arm.step() for _ in range(rounds)]
            estimate = memory_model.memory(config, facts, config.memory.gradient_checkpointing) or {}
            peak = arm.alone()
        except (WorkbenchError, RuntimeError) as problem:
            return str(problem).splitlines()[0][:200]
        finally:
            if arm is not None:
                arm.end()
            arm = builder = None
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    return replace(row, seconds=statistics.median(times) / 1e3, peak_mib=round(peak)), sum(estimate.values()) / 2**20


def missed(rows: list[StepTime]) -> list[tuple[StepTime, float]]:
    """Of every third row of a kind, by which share a fit of the others misses its time."""
    found = []
    for kind in dict.fromkeys(map(step_times.kind, rows)):
        own = [row for row in rows if step_times.kind(row) == kind]
        others = [row for at, row in enumerate(own) if at % 3 != 1]
        for row in own[1::3]:
            if (told := step_times.seconds(row, others)) is not None:
                found.append((row, told / row.seconds - 1))
    return found


def picture(rows: list[StepTime], card: str) -> str:
    """Tokens a second over tokens of a batch, and over the model's size, on axes of powers: an SVG that needs no library."""
    width, height, edge = 460, 320, 56
    panes = [
        ("tokens of a row, one row a batch", [row for row in rows if row.tokens == row.length], lambda row: row.length),
        ("parameters, 8,192 tokens a batch", [row for row in rows if row.tokens == 8192], lambda row: row.parameters),
    ]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width}" height="{height + 24}" font-family="sans-serif" '
           f'font-size="12"><text x="8" y="16">{card}: tokens a second, ours by default</text>']  # fmt: skip
    for at, (title, shown, across) in enumerate(panes):
        if not shown:
            continue
        xs = [torch.tensor(float(across(row))).log2().item() for row in shown]
        ys = [torch.tensor(row.tokens / row.seconds).log2().item() for row in shown]
        left, right, low, high = min(xs), max(xs), min(ys), max(ys)

        def place(
            x: float, y: float, at: int = at, box: tuple[float, ...] = (left, right, low, high)
        ) -> tuple[float, float]:
            wide, tall = box[1] - box[0] or 1, box[3] - box[2] or 1
            return (
                at * width + edge + (x - box[0]) / wide * (width - 2 * edge),
                24 + height - edge - (y - box[2]) / tall * (height - 2 * edge),
            )

        out.append(f'<text x="{at * width + edge}" y="{height + 8}">{title}</text>')
        for number, kind in enumerate(dict.fromkeys(map(step_times.kind, shown))):
            line = sorted(
                (place(x, y), row) for x, y, row in zip(xs, ys, shown, strict=True) if step_times.kind(row) == kind
            )
            colour = ("#2563eb", "#b45309", "#047857", "#7c3aed")[number % 4]
            path = " ".join(f"{x:.0f},{y:.0f}" for (x, y), _ in line)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            out += [
                f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>'
                f'<text x="{x + 5:.0f}" y="{y - 5:.0f}" fill="{colour}">{row.tokens / row.seconds:,.0f}</text>'
                for (x, y), row in line
            ]
            words = f"{kind[0]} {kind[1]}{', compiled' if kind[2] else ''}"
            out.append(f'<text x="{at * width + edge}" y="{40 + 14 * number}" fill="{colour}">{words}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--curves", nargs="*", default=["length", "batch", "size", "full"], choices=["length", "batch", "size", "full"]
    )
    parser.add_argument("--shape", default="8b", choices=list(SHAPES), help="of the curves over length and batch")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(LENGTHS), help="the lengths")
    parser.add_argument("--rounds", type=int, default=7, help="steps of a point that count")
    parser.add_argument("--seconds", type=float, default=540, help="no point is begun later than this")
    parser.add_argument("--table", type=Path, default=step_times.own())
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    result_options(parser)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    card = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": card, "torch": torch.__version__, "transformers": transformers.__version__}))
    results, until = Results(given, card, "torch", "triton"), time.monotonic() + given.seconds
    off: list[float] = []
    for point in points(given.curves, given.shape, given.tokens):
        if time.monotonic() > until:
            say(f"{point.words()}: not reached")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            Builder(
                argparse.Namespace(shape=point.shape, ragged=False, tokens=8, full=False, arms=[]), "sft", folder, None
            )
            known = step_times.point(described(point, card, folder)[2])
        if known in map(step_times.point, step_times.read(given.table)):
            say(f"{point.words()}: is in {given.table}")
            continue
        found = measure(point, given.rounds, card)
        if isinstance(found, str):
            say(f"{point.words()}: left out, {found}")
            continue
        row, estimate = found
        step_times.write(given.table, [row])
        off.append(estimate / row.peak_mib - 1 if CARD and row.peak_mib else 0.0)
        tiers = f"checkpointing {row.again}, compiled {row.compiled}"
        say(
            f"{point.curve:7} {point.words():28} {row.tokens / row.seconds:9,.0f} tokens/s {row.peak_mib / 1024:7.2f} GiB "
            f"(estimate {estimate / 1024:.2f}, {off[-1]:+.1%})  {tiers}"
        )
        results.add("scale", point.words(), f"ours, {tiers}", ms=[1e3 * row.seconds], peak_mib=row.peak_mib)
    rows = [row for row in step_times.read(given.table) if row.card == card]
    for row, share in missed(rows):
        words = f"{row.weights} {row.held}, {row.parameters / 1e9:.1f}B, {row.tokens} tokens in rows of {row.length}"
        say(f"kept out: {words}: time {share:+.1%}{'' if abs(share) <= AIM else ' MISSED'}")
    if off and CARD:
        say(f"memory: {sum(abs(each) <= AIM for each in off)} of {len(off)} points within {AIM:.0%}")
    if given.picture:
        given.picture.write_text(picture(rows, card), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
