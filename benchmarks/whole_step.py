"""The whole training step against its goals: TRL's defaults, plain TRL, and ours with what the step planner may choose.

    python benchmarks/whole_step.py [CASE ...] [--arms ...] [--seconds 60]
                                    [--rounds 20] [--window 5] [--profile ARM] [--results FILE --commit HASH]
    python benchmarks/whole_step.py --shape tiny --rounds 1 --check

The arms are those of `_arms.py`, timed as in `gpu_methods.py`: SFT on a Qwen3 shape with random weights in bf16, all arms
of a case in turn around one base, first loss and gradient norm from one seed compared. `--seconds` are for each case,
building and compiling included; three rounds are taken in any case. A goal is tokens a second within so many GiB, and
stands beside each arm that meets it or says by what it misses. An arm takes `--window` steps in its turn, queued as a run
queues them: waiting for the card after each one adds what the host needs to begin the next. `--shape tiny` runs every case
on the CPU in float32, which shows that the arms run and agree, and no figure of interest.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from _arms import ARMS, SHAPES
from _figures import Results, result_options
from _turns import CARD
from gpu_methods import compare, say

PLANNED = "cut, compiled", "cut, compiled, medium", "cut, compiled, none", "cut, all auto"
"""What is computed again: all, products wider than their input and what is cheap, nothing; and what the planner takes."""


@dataclass(frozen=True)
class Goal:
    """Tokens a second, within so many GiB where there is a bound."""

    tokens: float
    gib: float | None = None

    def words(self, tokens: float, gib: float) -> str:
        """How near a measured arm comes to it."""
        bound = "" if self.gib is None else f" within {self.gib:g} GiB"
        missed = [f"{tokens / self.tokens:.3f} of the speed"] if tokens < self.tokens else []
        missed += [f"{gib:.2f} GiB"] if self.gib is not None and gib > self.gib else []
        return f"{self.tokens:,.0f}{bound}: {'missed, ' + ' and '.join(missed) if missed else 'MET'}"


@dataclass(frozen=True)
class Case:
    """One row of the table: a shape, sequences of 2,048 tokens a step, an adapter or all weights, and what is aimed at."""

    shape: str
    rows: int
    full: bool
    goals: tuple[Goal, ...]


CASES = {
    "step_8b_lora": Case("8b", 4, False, (Goal(11_500, 20), Goal(14_000, 75))),
    "step_8b_lora_short": Case("8b", 1, False, (Goal(9_500),)),
    "step_06b_full": Case("0.6b", 4, True, (Goal(80_000, 16),)),
    "step_moe_8_layers": Case("30b-a3b of 8 layers", 4, False, ()),
    "step_30b_a3b_lora": Case("30b-a3b", 4, False, (Goal(12_000, 70), Goal(10_000, 24))),
}


class Figures(Results):
    """The rows of one case under its own name, each said with the goal beside it."""

    def __init__(self, given: argparse.Namespace, device: str, name: str, case: Case) -> None:
        super().__init__(given, device, "torch", "triton")
        self.judged = given.shape is None
        self.name = name if self.judged else f"{name}, {given.shape}"
        self.case, self.tokens = case, case.rows * given.tokens

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
        """As `Results.add`, whatever name the arms' script has for the work."""
        speed, gib = self.tokens / statistics.median(ms) * 1e3, (peak_mib or 0) / 1024
        beside = (
            "; ".join(goal.words(speed, gib) for goal in self.case.goals) if self.judged else "no goal at this shape"
        )
        say(f"{self.name:20} {impl:26} {speed:8,.0f} tokens/s {gib:6.2f} GiB  {beside}")
        super().add(self.name, shape, impl, ms=ms, peak_mib=peak_mib, floor_ms=floor_ms)


def run(name: str, given: argparse.Namespace, device: str) -> bool:
    """One case; whether all its arms ran and began alike."""
    case = CASES[name]
    options: dict[str, Any] = {**vars(given), "rows": case.rows, "full": case.full, "shape": given.shape or case.shape}
    figures = Figures(given, device, name, case)
    return compare(
        argparse.Namespace(**options, ragged=False),
        "sft",
        given.arms,
        time.perf_counter() + given.seconds,
        figures,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--arms", nargs="*", default=["default", "plain", *PLANNED], choices=list(ARMS))
    parser.add_argument("--shape", choices=list(SHAPES), help="another shape than the case's own")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each arm at most")
    parser.add_argument("--window", type=int, default=5, help="steps of an arm before the next has its turn")
    parser.add_argument("--seconds", type=float, default=60, help="of each case; no round is begun later than this")
    parser.add_argument("--profile", choices=list(ARMS), help="the kernels of one step of this arm")
    parser.add_argument("--check", action="store_true", help="exit 1 where an arm fell or began apart from the first")
    result_options(parser)
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": device, "torch": torch.__version__}))
    sound = [run(name, given, device) for name in given.cases or CASES]
    return int(given.check and not all(sound))


if __name__ == "__main__":
    sys.exit(main())
