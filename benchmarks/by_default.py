"""What a person gets without asking, beside the best settings and beside other libraries: one table for the card it runs on.

    python benchmarks/by_default.py [WORK ...] [--seconds 240] [--rounds 20] [--no-start] [--results FILE --commit HASH]
    python benchmarks/by_default.py --list
    python benchmarks/by_default.py --shape tiny --tokens 64 --rounds 3 --no-start

Each work is a method, a Qwen3 shape with random weights and rows of one kind. All arms of a work stand around one base
and take turns, a window of steps each (`gpu_methods.py`), so what slows the card slows all of them: TRL as it comes, TRL
with our settings, TRL with Liger's kernels, those with layers compiled by torch, ours with the settings that were measured
to be the best, and ours by default, with every `auto` left. Told are tokens a second and GiB of each, the ratio of
default to best with its 95 % interval (at most 1.05 is aimed at), and that to the fastest library. A library that is not
installed is left out by name.

Then the start, in processes of their own: seconds from launch to training, of the first step and from launch to its end, by
`first_step.py` with the compiler's caches empty and filled, and TRL's trainer in a fresh process on the same rows. Rows of
`by_default` in the results are of `ours` (the fastest of our settings, which the shape names; older rows have the
settings in place of `ours`), `ours by default`, our other settings and each library by name. `--shape tiny` shows on a
CPU that all of it runs, and no time of interest. The exit code is 1 where an arm fell or began apart from the first.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from _arms import PEERS, SHAPES
from _figures import SETTINGS, Results, ratio, result_options
from _turns import CARD, ENDED
from gpu_methods import DEFAULT, compare, say, tokens_a_step

AT_MOST = 1.05
COLUMNS = {
    "default": "TRL by default",
    "plain": "TRL, our settings",
    "liger": "TRL, Liger",
    "compiled by torch, liger": "TRL, Liger, layers compiled",
    "best": "ours",
    DEFAULT: DEFAULT,
}
"""The arms that have a column, and what it is called."""
RATIOS = ("ours by default / ours", "ours by default / fastest library")


@dataclass(frozen=True)
class Work:
    """A method on a shape: rows a step and their tokens, and the arms of ours among which the best is looked for."""

    method: str
    shape: str
    rows: int = 4
    best: tuple[str, ...] = ("cut, compiled", "cut, compiled, none")
    full: bool = False
    ragged: bool = False
    accumulation: int = 1
    lengths_of: str = ""
    """The real set whose lengths its rows have (`_method_rows.LENGTHS`)."""


PLAIN_TOO = "cut, compiled", "cut, compiled, none", "cut, none"
SAMPLED = "cut", "cut, none", "cut, fused, lora", "cut, dynamic cache", "ours by default, dynamic cache"
WORKS = {
    "8b-lora": Work("sft", "8b"),
    "8b-lora-ragged": Work("sft", "8b", ragged=True),
    "8b-lora-alpaca": Work("sft", "8b", best=PLAIN_TOO, ragged=True, lengths_of="alpaca"),
    "8b-lora-gsm8k": Work("sft", "8b", best=PLAIN_TOO, ragged=True, lengths_of="gsm8k"),
    "8b-lora-one-row": Work("sft", "8b", rows=1),
    "8b-lora-accumulated": Work("sft", "8b", rows=2, accumulation=2),
    "0.6b-full": Work("sft", "0.6b", full=True),
    "0.6b-lora-ragged": Work("sft", "0.6b", ragged=True),
    "0.6b-dpo": Work("dpo", "0.6b", ragged=True),
    "8b-dpo": Work("dpo", "8b", ragged=True),
    "0.6b-grpo": Work("grpo", "0.6b", best=SAMPLED),
    "8b-grpo": Work("grpo", "8b", best=SAMPLED),
}


class Kept(Results):
    """The figures of one work: the times of each arm for the table, and its rows once all arms have theirs."""

    def __init__(self, given: argparse.Namespace, device: str, name: str) -> None:
        super().__init__(given, device, "torch", "triton")
        self.name, self.arms = name, dict[str, tuple[list[float], float]]()
        self._rows: list[tuple[str, str, str]] = []

    def add(
        self,
        work: str,
        shape: str,
        impl: str = "ours",
        *,
        ms: Sequence[float] = (),
        peak_mib: float | None = None,
        floor_ms: float | None = None,
    ) -> None:
        """The figures of an arm, which `write` makes a row of."""
        name = impl.split(" ", 1)[1] if impl.split(" ", 1)[-1] in PEERS else impl
        self.arms[name] = list(ms), peak_mib or 0.0
        self._rows.append((name, f"{self.name}: {work}, {shape}", impl))

    def fastest(self, names: Sequence[str]) -> str | None:
        """The arm of these with the shortest median; None where none was measured."""
        medians = {name: statistics.median(self.arms[name][0]) for name in names if self.arms.get(name, ([], 0))[0]}
        return min(medians, key=medians.__getitem__, default=None)

    def write(self, best: Sequence[str]) -> None:
        """The rows under `by_default`: the fastest of `best` is `ours`, its settings named in the shape. Libraries, ours by default
        and other settings of ours have their own names."""
        ours = self.fastest(best)
        for name, shape, impl in self._rows:
            if name == ours:
                shape, impl = f"{shape}{SETTINGS}{ours}", "ours"
            times, peak = self.arms[name]
            super().add("by_default", shape, impl, ms=times, peak_mib=peak)


def measure(name: str, given: argparse.Namespace, device: str) -> tuple[Kept, int, bool]:
    """All arms of a work in turn; their figures, the tokens of a step, and whether all that is installed ran and began alike."""
    work = WORKS[name]
    shape = given.shape or work.shape
    # What the table is for comes first, since an arm that the time does not reach is left out; the first one says what is right.
    names = [*PEERS[:1], DEFAULT, *work.best, *PEERS[1:]]
    if given.arms is not None:
        # In the order that was asked for: what the time does not reach is left out.
        names = [each for each in given.arms if each in names]
    own = {
        "shape": shape,
        "rows": work.rows,
        "full": work.full,
        "ragged": work.ragged,
        "accumulation": work.accumulation,
        "lengths_of": work.lengths_of,
    }
    options = argparse.Namespace(**{**vars(given), **own, "profile": None, "arms": names})
    kept = Kept(given, device, f"{name}, {given.shape}" if given.shape else name)
    try:
        sound = compare(options, work.method, names, time.perf_counter() + given.seconds, kept)
    except RuntimeError as problem:  # an arm that fell among the others' turns, as where a later step finds no room
        say(f"{name}: FAILED {str(problem).splitlines()[0][:300]}")
        sound = False
    kept.write(work.best)
    return kept, tokens_a_step(options, work.method), sound


def row(kept: Kept, tokens: int, best: tuple[str, ...]) -> list[str]:
    """A line of the table: each column's tokens a second and GiB, then the two ratios."""
    medians = {name: statistics.median(ms) for name, (ms, _) in kept.arms.items() if ms}
    ours, theirs = kept.fastest(best), kept.fastest(PEERS)
    cells = [kept.name]
    for column in COLUMNS:
        name = ours if column == "best" else column
        if name is None or name not in medians:
            cells.append("-")
            continue
        words = f" ({name})" if column == "best" else ""
        cells.append(f"{tokens / medians[name] * 1e3:,.0f} in {kept.arms[name][1] / 1024:.1f}{words}")
    for other in (ours, theirs):
        if other is None or DEFAULT not in medians:
            cells.append("-")
            continue
        pairs = list(zip(kept.arms[DEFAULT][0], kept.arms[other][0], strict=True))
        middle, low, high = ratio(pairs)
        judged = ("" if middle <= AT_MOST else " MISSED") if other == ours else f" ({other})"
        cells.append(f"{middle:.3f} [{low:.3f}, {high:.3f}]{judged}")
    return cells


def table(lines: list[list[str]]) -> str:
    """Columns in line, as markdown has them."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    shown.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(shown)


# -- the start ---------------------------------------------------------------------------------------------------------
def start(given: argparse.Namespace, device: str, shape: str, rows: str) -> list[list[str]]:
    """Seconds from launch to training, of the first step, and to its end: ours by `first_step.py`, TRL's in a process."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "start.csv"
        steps = ["--steps", str(given.start_steps)]
        script = [sys.executable, str(Path(__file__).with_name("first_step.py")), "--shape", shape, "--rows", rows]
        done = subprocess.run([*script, *steps, "--with-trl", "--results", str(file)], check=False)
        if done.returncode != 0 or not file.exists():
            return [[f"start {shape} {rows}", "failed", "", ""]]
        results = Results(given, device, "torch", "triton")
        found: dict[str, dict[str, float]] = {}
        for each in csv.DictReader(file.open()):
            found.setdefault(each["impl"], {})[each["work"]] = float(each["ms"]) / 1e3
            peak = float(each["peak_mib"]) if each["peak_mib"] else None
            results.add(each["work"], each["shape"], each["impl"], ms=[float(each["ms"])], peak_mib=peak)
    works = ("launch_to_training", "first_step", "launch_to_first_step")
    return [
        [f"start {shape} {rows}: {impl}", *(f"{took[work]:.1f} s" if work in took else "-" for work in works)]
        for impl, took in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)}; all where none is named")
    parser.add_argument("--list", action="store_true", help="say which works there are")
    parser.add_argument("--arms", nargs="*", help="only these, in this order")
    parser.add_argument("--shape", choices=list(SHAPES), help="another shape than the work's own")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, where a method generates")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each arm at most")
    parser.add_argument("--window", type=int, default=3, help="steps of an arm before the next has its turn")
    parser.add_argument("--seconds", type=float, default=240, help="of each work; no round is begun later than this")
    parser.add_argument("--no-start", action="store_true", help="leave out the launches")
    parser.add_argument("--start-steps", type=int, default=24, help="steps of each launched run")
    result_options(parser)
    given: Any = parser.parse_args()
    if unknown := set(given.works) - set(WORKS):
        parser.error(f"no work is named {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")
    if given.list:
        print("\n".join(f"{name:20} {work}" for name, work in WORKS.items()))
        return 0
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": device, "torch": torch.__version__, "transformers": transformers.__version__}))
    lines, whole = [["work; tokens/s in GiB", *COLUMNS.values(), *RATIOS]], True
    for name in given.works or WORKS:
        kept, tokens, sound = measure(name, given, device)
        whole = whole and sound
        lines.append(row(kept, tokens, WORKS[name].best))
        say(table([lines[0], lines[-1]]))
        if ENDED.is_set():
            break
    starts = [["", "launch to training", "first step", "launch to its end"]]
    if not given.no_start and not ENDED.is_set():
        for shape in dict.fromkeys(given.shape or WORKS[name].shape for name in given.works or WORKS):
            for rows in ("packed", "ragged"):
                starts += start(given, device, shape, rows)
    say(f"\n{device}, torch {torch.__version__}, transformers {transformers.__version__}\n\n{table(lines)}")
    if len(starts) > 1:
        say(f"\n{table(starts)}")
    if not whole:
        say("\nNot every arm ran, or began alike: the lines with FAILED and APART above say which.")
    return int(not whole)


if __name__ == "__main__":
    sys.exit(main())
