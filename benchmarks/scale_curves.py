"""Tokens a second and memory over length, batch and model size on this card, point by point, which the estimate then reads.

    python benchmarks/scale_curves.py --part lengths [--seconds 540] [--table FILE.csv] [--results FILE --commit HASH]
    python benchmarks/scale_curves.py --points "8b lora 4x2048" "8b nf4 1x8192"
    python benchmarks/scale_curves.py --list
    python benchmarks/scale_curves.py --part tiny --rounds 3
    python benchmarks/scale_curves.py --points "4b full 1x2048" --segments --room 34.5

Supervised fine-tuning of Qwen3 shapes with random weights made on the card, packed rows, ours by default with every `auto`
left: 8B with LoRA over lengths of 512 to 131,072 tokens in one row and over batches of 1 to 16 rows of 2,048, sizes of 0.6B
to 32B in 16 bits, NF4 and FP8, and all weights of the sizes that fit; some of them also with plain layers. The points and
those that are kept out of the fit stand in `_scale_points.py`. Parts run beside each other, one a card, and each point is
printed and written as soon as it is measured. One that has no memory is told and left out; one that is in `--table` for
this card is not measured again unless it is named.

A point's time is the median of its steps after those that warm up (three; one where a step takes over eight seconds), its
memory what the process holds of the card then, its context too, as the driver tells it. Points that are not kept out also go
into the table in the user's cache (`engine.facts.step_times`), from which the estimate tells time on this card from then on.
With `--segments` it is told what the allocator holds with nothing in it, and how often it gave that back; with `--room` that
it has no more of the card than so much.
`scale_report.py` compares the points that are kept out, draws the pictures and writes the package's table.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from _arms import Builder, precision
from _figures import Results, result_options
from _method_rows import method_rows
from _peak import segments
from _random_base import random_base
from _scale_points import PARTS, POINTS, Measured, Point, add, described, estimated_mib, fitted_to, read
from _turns import CARD, WARM, Arm
from gpu_methods import say

from engine.builtin import tiny
from engine.errors import WorkbenchError
from engine.facts import step_times
from engine.hardware import this_machine

LONG = 8e3
"""Milliseconds of a step from which one warms up and two are measured, of four times that one."""
ENOUGH = 3e3, 25
"""Milliseconds and steps: short steps are measured until one of the two is reached."""
EPOCH = 12
"""Steps before the rows come again."""


class RandomBuilder(Builder):
    """Arms around a base that is drawn where it lies, weight by weight, and rows that are drawn once and repeated."""

    def prepared_rows(self) -> Any:
        options = self.options
        rows = method_rows(self.method, options.tokens, self.shape.vocab_size, self.tokenizer, count=1)
        row = rows[0]
        return type(rows).from_list([{**row, "row": at} for at in range(EPOCH * options.rows)])

    def base(self, packed: str = "", *, on_host: bool = False) -> Any:
        dtype = getattr(torch, precision(self.options))
        model = random_base(self.loader(), self.shape, dtype, self.device, packed, on_host=on_host)
        if self.options.full:
            for weight in model.parameters():
                weight.requires_grad_(True)
        return model


def steps_of(arm: Arm, rounds: int) -> list[float]:
    """Milliseconds of steps after those that warm up."""
    torch.manual_seed(0)
    arm.step()
    took = arm.step()
    if took > LONG:
        return [took] if took > 4 * LONG else [took, arm.step()]
    for _ in range(WARM - 2):
        arm.step()
    times: list[float] = []
    while len(times) < rounds or (CARD and sum(times) < ENOUGH[0] and len(times) < ENOUGH[1]):
        times.append(arm.step())
    return times


def measure(point: Point, rounds: int, card: str, *, told: bool = False) -> tuple[Measured, float] | str:
    """The point as it was measured, and the MiB that the estimate says; a sentence where there is no memory for it. What is
    held of the card with nothing in it is `told` between two steps."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.folder())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        arm = builder = None
        try:
            builder = RandomBuilder(point.options(), "sft", folder, tokenizer)
            config, facts, step = described(point, folder)
            arm = builder.arm(point.arm)
            times = steps_of(arm, rounds)
            allocated, held = arm.alone(), held_mib()
            if told and CARD:
                say("\n".join(segments(torch.cuda.memory_snapshot())))
                again = torch.cuda.memory_stats()["num_alloc_retries"]
                say(f"  {again} times all that was empty was given back for want of room")
        except (WorkbenchError, RuntimeError, ValueError, TypeError, AttributeError) as problem:
            if not isinstance(problem, WorkbenchError) and "out of memory" not in str(problem):
                traceback.print_exc()
            return f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
        finally:
            if arm is not None:
                arm.end()
            arm = builder = None
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    machine = this_machine()
    found = Measured(
        point,
        replace(step, card=card, seconds=statistics.median(times) / 1e3, peak_mib=held),
        allocated if CARD else 0.0,
        machine.gpus[0] if machine.gpus else None,
        slow=f"{min(times) / 1e3:.4g} to {max(times) / 1e3:.4g}",
    )
    return found, estimated_mib(config, facts)


def held_mib() -> float:
    """What is taken of the card, as the driver tells it; 0 without one."""
    if not CARD:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(round((total - free) / 2**20))


def asked(given: argparse.Namespace, card: str) -> list[Point]:
    """The points to be measured, in order: those that are named, else those of the parts that are not in the table."""
    if given.points:
        return [POINTS[name] for name in given.points]
    known = {each.point.name for each in read([given.table]) if each.step.card == card}
    points = [point for part in given.part for point in PARTS[part]]
    for point in points:
        if point.name in known:
            say(f"{point.name}: is in {given.table}")
    return [point for point in points if point.name not in known]


def options() -> argparse.Namespace:
    """The command line. Exits with 2 where a point is not one of the curves'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=list(PARTS), default=[name for name in PARTS if name != "tiny"])
    parser.add_argument("--points", nargs="*", metavar="POINT", help="these, also where they are in the table")
    parser.add_argument("--list", action="store_true", help="say which points there are; * is kept out of the fit")
    parser.add_argument("--rounds", type=int, default=5, help="steps of a point that count, at least")
    parser.add_argument("--segments", action="store_true", help="say what is held of the card with nothing in it")
    parser.add_argument(
        "--room", type=float, metavar="GIB", help="hold no more of the card than this, context left out"
    )
    parser.add_argument("--seconds", type=float, default=540, help="no point is begun later than this")
    parser.add_argument("--table", type=Path, default=Path(__file__).with_name("scale_curves.csv"))
    result_options(parser)
    given = parser.parse_args()
    if unknown := [name for name in given.points or () if name not in POINTS]:
        parser.error(f"no point is named {', '.join(unknown)}; --list says which there are")
    return given


def main() -> int:
    begun, given = time.monotonic(), options()
    if given.list:
        for name, points in PARTS.items():
            say(f"{name}: {', '.join(point.name + '*' * point.kept_out for point in points)}")
        return 0
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    card = torch.cuda.get_device_name() if CARD else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    say(json.dumps({"device": card, **versions}))
    results = Results(given, card, "torch", "triton")
    if CARD and given.room is not None:
        torch.cuda.set_per_process_memory_fraction(given.room * 2**30 / torch.cuda.mem_get_info()[1])
    for point in asked(given, card):
        if time.monotonic() - begun > given.seconds:
            say(f"{point.name}: not reached")
            continue
        at = time.monotonic()
        found = measure(point, given.rounds, card, told=given.segments)
        if isinstance(found, str):
            say(f"{point.name}: left out, {found}")
            continue
        measured = replace(found[0], date=datetime.date.today().isoformat(), commit=given.commit, **versions)
        add(given.table, measured)
        if CARD:
            step_times.write(step_times.own(), fitted_to([measured]))
        say(line(measured, found[1], time.monotonic() - at))
        step = measured.step
        words = f"ours, checkpointing {step.again}, compiled {step.compiled}"
        results.add("scale", point.name, words, ms=[1e3 * step.seconds], peak_mib=step.peak_mib)
    return 0


def line(measured: Measured, estimate: float, took: float) -> str:
    """A point in words: tokens a second, memory, the estimate's, what was chosen, and how long all of it took."""
    step, star = measured.step, "*" if measured.point.kept_out else ""
    memory = f"{step.peak_mib / 1024:6.2f} GiB, {measured.allocated_mib / 1024:6.2f} allocated, estimate {estimate / 1024:6.2f}"
    off = f" ({estimate / step.peak_mib - 1:+.1%})" if step.peak_mib else ""
    return (
        f"{measured.point.name + star:24} {step.tokens / step.seconds:9,.0f} tokens/s, {step.seconds:8.4f} s a step "
        f"({measured.slow}) {memory}{off}, checkpointing {step.again}, compiled {step.compiled}, {took:.0f} s in all"
    )


if __name__ == "__main__":
    sys.exit(main())
