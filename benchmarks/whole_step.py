"""The whole training step against its goals: TRL's defaults, plain TRL, and ours with what the step planner may choose.

    python benchmarks/whole_step.py [CASE ...] [--arms ...] [--seconds 60]
                                    [--rounds 20] [--window 5] [--profile ARM] [--results FILE --commit HASH]
    python benchmarks/whole_step.py --shape tiny --rounds 1 --check
    python benchmarks/whole_step.py step_moe_8_layers step_30b_a3b_lora --shape "tiny mixture" --window 1 --rounds 1

The arms are those of `_arms.py`, timed as in `gpu_methods.py`: SFT on a Qwen3 shape with random weights in bf16, all arms
of a case in turn around one base, first loss and gradient norm from one seed compared. `--seconds` are for each case,
building and compiling included; three rounds are taken in any case. Without `--arms` a case has its own. Arms whose bases have
no room beside each other take the card for themselves one after the other (their losses are told and not compared), the
process capped at the GiB that the case or `--cap` says, if any: what does not fit falls. A goal is tokens a second within so
many GiB, and stands beside each arm that meets it or says by what it misses. An arm takes `--window` steps in its turn, queued as a run
queues them: waiting for the card after each one adds what the host needs to begin the next. `--shape tiny` runs every case
on the CPU in float32, which shows that the arms run and agree, and no figure of interest.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from _arms import ARMS, SHAPES
from _figures import Results, result_options
from _turns import CARD, ENDED
from gpu_methods import compare, say

from engine.kernels.tuner import TUNER

PLANNED = "cut, compiled", "cut, compiled, medium", "cut, compiled, none", "cut, all auto"
"""What is computed again: all, products wider than their input and what is cheap, nothing; and what the planner takes."""
OF_EXPERTS = "cut, compiled, experts", "cut, fused, lora, experts", "cut, compiled, experts, medium", "cut, all auto"


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
    """One row of the table: a shape, sequences of `tokens` a step, an adapter or all weights, and what is aimed at.

    `times`: how many times as fast as `plain`. `arms`: what is compared where nobody says. `alone`: one arm after the other.
    `cap`: GiB that the process may take of the card. `work`: the name of its rows, where it is another.
    """

    shape: str
    rows: int
    full: bool
    goals: tuple[Goal, ...]
    times: float | None = None
    arms: tuple[str, ...] = ("default", "plain", *PLANNED)
    alone: bool = False
    cap: float | None = None
    work: str = ""
    tokens: int = 2048


CASES = {
    "step_8b_lora": Case("8b", 4, False, (Goal(12_800, 20), Goal(16_500, 55))),
    # 28 of 36 layers: what the estimate has room for in 20 GiB
    "step_8b_lora_fp8": Case(
        "8b", 4, False, (Goal(18_000, 20), Goal(22_000)), arms=("fp8 base", "fp8 base, 28 again", "fp8 base, none")
    ),
    "step_8b_lora_short": Case("8b", 1, False, (Goal(9_500),)),
    # the shape of the highest figure that others published for one H100
    "step_8b_lora_4096": Case(
        "8b",
        2,
        False,
        (Goal(12_473),),
        arms=("cut, compiled, none", "cut, compiled, 35 again", "cut, compiled"),
        tokens=4096,
    ),
    "step_06b_full": Case("0.6b", 4, True, (Goal(80_000, 16), Goal(95_000, 16))),
    "step_moe_8_layers": Case("30b-a3b of 8 layers", 4, False, (), 2.0, ("plain", *OF_EXPERTS)),
    "step_30b_a3b_lora": Case("30b-a3b", 4, False, (Goal(12_000, 70),), arms=OF_EXPERTS[:2], alone=True),
    "step_30b_a3b_lora_nf4": Case(
        "30b-a3b",
        4,
        False,
        (Goal(10_000, 24), Goal(10_000, 22)),
        arms=("nf4, compiled, experts", "nf4, fused, lora, experts", "nf4, compiled, experts, offloaded"),
        alone=True,
        cap=24,
        work="step_30b_a3b_lora",
    ),
    "step_30b_a3b_lora_streamed": Case(
        "30b-a3b",
        8,
        False,
        (),
        arms=("cut, fused, lora, experts, streamed", "nf4, fused, lora, experts, streamed"),
        alone=True,
        cap=22,
        work="step_30b_a3b_lora",
    ),
    "step_gptoss_20b_lora": Case(
        "gptoss-20b",
        4,
        False,
        (Goal(10_000, 24),),
        arms=("cut, experts, sinks", "cut, compiled, experts, sinks", "cut, experts, flex", "cut, experts"),
        alone=True,
    ),
}


class Figures(Results):
    """The rows of one case under its own name, each said with the goal beside it."""

    def __init__(self, given: argparse.Namespace, device: str, name: str, case: Case) -> None:
        super().__init__(given, device, "torch", "triton")
        self.judged = given.shape is None
        self.name = case.work or name if self.judged else f"{name}, {given.shape}"
        self.case, self.tokens = case, case.rows * (given.tokens or case.tokens)
        self.plain: float | None = None

    def under(self, work: str, shape: str, impl: str, ms: Sequence[float], peak_mib: float | None) -> tuple[str, str]:
        """Under our name of the work, whatever the arms' script has."""
        speed, gib = self.tokens / statistics.median(ms) * 1e3, (peak_mib or 0) / 1024
        self.plain = speed if impl.endswith(" plain") else self.plain
        goals = [goal.words(speed, gib) for goal in self.case.goals]
        if self.case.times is not None and self.plain is not None:
            times = speed / self.plain
            goals.append(
                f"{times:.2f} x plain, {self.case.times:g} aimed at{'' if times < self.case.times else ': MET'}"
            )
        beside = "; ".join(goals) if self.judged else "no goal at this shape"
        say(f"{self.name:20} {impl:26} {speed:8,.0f} tokens/s {gib:6.2f} GiB  {beside}")
        return self.name, shape


def run(name: str, given: argparse.Namespace, device: str) -> bool:
    """One case; whether all its arms ran and began alike."""
    case = CASES[name]
    own = {
        "rows": case.rows,
        "full": case.full,
        "shape": given.shape or case.shape,
        "tokens": given.tokens or case.tokens,
    }
    options: dict[str, Any] = vars(given) | own
    figures = Figures(given, device, name, case)
    arms, begun = given.arms or case.arms, time.perf_counter()
    cap = case.cap if given.cap is None else given.cap
    sound = True
    with capped(cap if given.shape is None else None):
        for number, some in enumerate([[arm] for arm in arms] if case.alone else [list(arms)], 1):
            until = begun + given.seconds * (number / len(arms) if case.alone else 1)
            here = argparse.Namespace(**options | {"arms": some}, ragged=False)
            sound = compare(here, "sft", some, until, figures) and sound
            gc.collect()
            if CARD:
                say(
                    f"{name}: {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB reserved, {used_on_host():.0f} GiB on the host"
                )
                torch.cuda.empty_cache()
    return sound


@contextlib.contextmanager
def capped(gib: float | None) -> Iterator[None]:
    """Lets the process take no more than this of the card."""
    if gib is None or not CARD:
        yield
        return
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / whole))
    say(f"capped at {gib:g} GiB")
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def used_on_host() -> float:
    """GiB that the process has had at most in the host's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--arms", nargs="*", default=[], metavar="ARM", help="by default those of the case")
    parser.add_argument("--shape", choices=list(SHAPES), help="another shape than the case's own")
    parser.add_argument("--tokens", type=int, help="of each sequence, in place of the case's own")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each arm at most")
    parser.add_argument("--window", type=int, default=5, help="steps of an arm before the next has its turn")
    parser.add_argument("--seconds", type=float, default=60, help="of each case; no round is begun later than this")
    parser.add_argument("--profile", choices=list(ARMS), help="the kernels of one step of this arm")
    parser.add_argument("--peak", choices=list(ARMS), help="what is on the card at the peak of this arm's first steps")
    parser.add_argument("--cap", type=float, metavar="GIB", help="of the card's memory, in place of the case's own")
    parser.add_argument(
        "--timed-tiles", action="store_true", help="kernels of ours run with the fastest of their tiles"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where an arm fell or began apart from the first")
    result_options(parser)
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if unknown := set(given.arms) - set(ARMS):
        parser.error(f"no arm is named {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": device, "torch": torch.__version__}))
    if given.timed_tiles:
        TUNER.start()
    sound = [run(name, given, device) for name in given.cases or CASES if not ENDED.is_set()]
    for picked in TUNER.picked:
        say(picked.words())
    return int(ENDED.is_set() or (given.check and not all(sound)))


if __name__ == "__main__":
    sys.exit(main())
