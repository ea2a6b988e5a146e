"""A step of each method, ours against the plain library trainer with the same settings and against its own defaults.

    python benchmarks/gpu_methods.py --shape 8b --arms plain ours "cut, compiled" [--methods sft dpo] [--seconds 200]
                                     [--profile ARM] [--results FILE --commit HASH]
    python benchmarks/gpu_methods.py --shape tiny --methods all --arms plain ours cut --rounds 1 --check

LoRA r=16 on all linear layers of a Qwen3 shape (with --full every weight of it), random weights made on the card in bf16,
4 sequences of 2,048 tokens a step (16 answers of `--answer` tokens where a method generates). The plain trainer of each
method is that of `_peers.py`; where no library has one (PPO, stored probabilities of a teacher), or it is not installed,
features are measured against ours without them. All arms of a method (`_arms.py`) share the frozen base and train at the
same time (`_turns.py`): a step of one, then a step of the next, in an order that turns. Each runs its trainer's own loop,
ours with events, receipt and telemetry. Times are from the release of a trainer to the end of its step on the device, or
of its `--window` of steps; the ratio is that of the medians, its 95 % interval from drawing the rounds again. The peak is
what an arm alone would take: its weights, its optimizer and its step. Loss and gradient norm of the first step, from one
seed, are compared with the first arm's and told; with --check the exit code is 1 where they lie apart or an arm fell.
The shape `tiny` is float32 and runs without a card, which shows that the arms run and agree, and no time of interest.
`--profile` prints where the device's time in one step of an arm goes. Rows are written as soon as they are known.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from _arms import ARMS, PEERS, SHAPES, Builder, in_fp8, in_nf4, precision
from _figures import Results, ratio, result_options
from _method_rows import GENERATES, LENGTHS, rows_a_step
from _peak import peak
from _peers import NoPeer
from _profile import profile
from _turns import CARD, ENDED, Arm, end_in_order, wait
from accelerate import Accelerator

from engine.config.method import METHODS
from engine.errors import WorkbenchError

NEAR = {"float32": 1e-4, "bfloat16": 5e-2, "fp8": 2e-1, "nf4": 3e-1}
"""How far loss and gradient norm of a first step may lie from the first arm's, relative to it: two orders of rounding, and
of FP8 and NF4 a few of their roundings."""
DEFAULT = "ours by default"
TOLD = 4
"""Rounds after which the figures so far are said."""


def compare(
    options: argparse.Namespace,
    method: str,
    names: list[str],
    until: float,
    results: Results,
    kind: type[Builder] = Builder,
) -> bool:
    """Builds, warms and steps the arms in turn until the time is over; whether all ran and began alike.

    At SIGTERM what whole rounds say is reported, and it is False.
    """
    from engine.builtin import tiny

    end_in_order()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.folder())
    with tempfile.TemporaryDirectory() as folder:
        model_folder = Path(folder) / "model"
        model_folder.mkdir()
        arms, sound = begin(options, names, until, kind(options, method, model_folder, tokenizer))
        # Several trainers are several times the objects of one: to look among them for garbage stops whichever step it meets.
        gc.collect()
        gc.freeze()
        take_turns(options, method, arms, until)
        if ENDED.is_set():
            say(f"{method}: asked to end after {len(arms[0].times) if arms else 0} rounds")
        report(options, method, [arm for arm in arms if arm.times], results)
        for arm in arms:
            if arm.name == options.profile and not ENDED.is_set():
                profile(arm.name, arm.step)
            arm.end()
        arms.clear()
    gc.unfreeze()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return sound and not ENDED.is_set()


def take_turns(options: argparse.Namespace, method: str, arms: list[Arm], until: float) -> None:
    """Rounds of all arms until the time is over or the process is asked to end, whose last round does not count then."""
    rounds = 0
    while arms and rounds < options.rounds and (time.perf_counter() < until or rounds < 3):
        turn = rounds % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            if not ENDED.is_set():
                arm.times.append(arm.step())
        if ENDED.is_set():
            break
        rounds += 1
        if rounds % TOLD == 0:  # what is cut off has said this much
            so_far(method, arms)
    for arm in arms:
        del arm.times[rounds:]


def so_far(method: str, arms: list[Arm]) -> None:
    """Says each arm's median, and the first's ratio to each of the others."""
    first, *others = arms
    medians = ", ".join(f"{arm.name} {statistics.median(arm.times):.1f} ms" for arm in arms)
    ratios = [(other.name, *ratio(list(zip(first.times, other.times, strict=True)))) for other in others]
    against = "".join(f"; / {name} {middle:.3f} [{low:.3f}, {high:.3f}]" for name, middle, low, high in ratios)
    say(f"{method} after {len(first.times)} rounds: {medians}; {first.name}{against}")


def begin(options: argparse.Namespace, names: list[str], until: float, builder: Builder) -> tuple[list[Arm], bool]:
    """The arms that could be built and took their first steps, and whether none of them fell or began apart."""
    arms: list[Arm] = []
    sound, method = True, builder.method
    for name in names:
        begun = time.perf_counter()
        if begun > until or ENDED.is_set():
            say(f"{method} {name}: not reached")
            continue
        arm: Arm | None = None
        try:
            arm = builder.arm(name)
            if method in GENERATES:
                sampling_timed(arm)
            with peak(name) if CARD and name == getattr(options, "peak", None) else contextlib.nullcontext():
                took = arm.warm()
        except NoPeer as reason:
            say(f"{method} {name}: left out, {reason}")
            Accelerator()
            continue
        except (WorkbenchError, RuntimeError, ValueError, TypeError, AttributeError) as problem:
            say(f"{method} {name}: FAILED {type(problem).__name__}: {str(problem).splitlines()[0][:300]}")
            traceback.print_exc()
            sound = False
            if arm is not None:
                arm.end()
            # Arguments of a trainer empty the state that accelerators share, and a trainer's own fills it again.
            Accelerator()
            continue
        arms.append(arm)
        apart = arm.apart(arms[0])
        # `default` computes in another precision and Liger's kernels round elsewhere: a peer is told and not judged. In 16
        # bits the answers that are sampled part at some token where a cache or a kernel rounds otherwise.
        sampled = method in GENERATES and precision(options) != "float32"
        arm.sound = name in PEERS or sampled or apart <= NEAR[_rounded_to(name) or precision(options)]
        sound = sound and arm.sound
        say(
            f"{method} {name}: {arm.told} first steps {', '.join(f'{each:.0f}' for each in took)} ms, first loss "
            f"{arm.first[0]:.6g} and gradient norm {arm.first[1]:.6g}, {apart:.1e} from {arms[0].name}, "
            f"losses {' '.join(f'{each:.6g}' for each in arm.baton.losses)}"
            f"{'' if arm.sound else ' (APART, not reported)'}, {time.perf_counter() - begun:.1f} s in all"
        )
        if (why := getattr(arm.trainer, "not_recorded", None)) is not None:
            say(
                f"{method} {name}: answers sampled {f'as keys and values grow: {why}' if why else 'with a static cache'}"
            )
    return arms, sound


def _rounded_to(name: str) -> str:
    """What an arm's frozen layers are rounded to; empty where they are as they are."""
    return "fp8" if in_fp8(name) else "nf4" if in_nf4(name) else ""


def report(options: argparse.Namespace, method: str, arms: list[Arm], results: Results) -> None:
    """Says and writes each sound arm's median beside its ratio to the library's arms, or to `ours` where there are none."""
    peers = {arm.name: arm for arm in arms if arm.name in PEERS}
    libraries = set(peers)
    peers = peers or {arm.name: arm for arm in arms if arm.name == "ours"}
    tokens = tokens_a_step(options, method)
    for arm in filter(lambda arm: arm.sound, arms):
        middle = statistics.median(arm.times)
        # What nobody asked for is held against every other arm, ours too.
        beside = {other.name: other for other in arms if other.sound} if arm.name == DEFAULT else peers
        found = {
            name: ratio(list(zip(arm.times, other.times, strict=True)))
            for name, other in beside.items()
            if other is not arm
        }
        words = "".join(f"  /{peer} {mid:.4f} [{low:.4f}, {high:.4f}]" for peer, (mid, low, high) in found.items())
        say(
            f"{method:7} {arm.name:26} {middle:8.1f} ms {tokens / middle * 1e3:8.0f} tokens/s "
            f"{arm.alone() / 1024:6.2f} GiB n={len(arm.times)}{words}"
        )
        if arm.sampling:
            taken = arm.sampling[-len(arm.times) :]
            say(f"{method:7} {arm.name:26} {statistics.median(taken):8.1f} ms of it for the answers")
        against = "".join(f"; / {peer} {mid:.3f} [{low:.3f}, {high:.3f}]" for peer, (mid, low, high) in found.items())
        same = [other.name for other in beside.values() if other is not arm and other.config == arm.config is not None]
        if arm.name == DEFAULT and same:  # what its ratio to these tells is how much the clock varies
            say(f"{method:7} {arm.name:26} has the very settings of {', '.join(same)}")
            against += f"; the settings of {', '.join(same)}"
        results.add(
            f"step_{options.shape.replace('.', '')}_{'full' if options.full else 'lora'}_{method}",
            f"{work_of(options, method)}; {len(arm.times)} rounds{against}",
            f"{library(method)} {arm.name}" if arm.name in libraries else arm.name, ms=arm.times, peak_mib=arm.alone(),
        )  # fmt: skip


def sampling_timed(arm: Arm) -> None:
    """Has the arm note the milliseconds that its answers took, step by step, in `arm.sampling`."""
    plain = arm.trainer._generate_single_turn

    def timed(*given: object, **more: object) -> object:
        wait()
        begun = time.perf_counter()
        made = plain(*given, **more)
        wait()
        arm.sampling.append((time.perf_counter() - begun) * 1e3)
        return made

    arm.trainer._generate_single_turn = timed


def tokens_a_step(options: argparse.Namespace, method: str) -> int:
    """Tokens of the batches of a step; those of its answers where a method generates, of its rows in the middle where they have
    the lengths of a real set."""
    if method in GENERATES:
        return rows_a_step(method, options.rows) * options.answer
    if of := getattr(options, "lengths_of", ""):
        return round(options.rows * sum(LENGTHS[of]) / len(LENGTHS[of]))
    tokens: int = options.rows * options.tokens * getattr(options, "accumulation", 1)
    return tokens


def work_of(options: argparse.Namespace, method: str) -> str:
    """The work of a step, for the rows."""
    if method in GENERATES:
        return f"{rows_a_step(method, options.rows)} answers of {options.answer}"
    if of := getattr(options, "lengths_of", ""):
        return f"{options.rows} rows of the lengths of {of}'s"
    batches = getattr(options, "accumulation", 1)
    words = " ragged" if options.ragged else ""
    return f"{options.rows}x{options.tokens}{words}{f', {batches} batches a step' if batches > 1 else ''}"


def library(method: str) -> str:
    """The name in the rows: whose trainer the plain one is."""
    return {"embedding": "sentence-transformers", "prm": "transformers"}.get(method, "trl")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument(
        "--methods", nargs="*", default=["sft"], choices=[*METHODS, "all"], help="all: one after the other"
    )
    parser.add_argument("--arms", nargs="*", default=["plain", "ours", "cut, compiled"], choices=list(ARMS))
    parser.add_argument("--full", action="store_true", help="all weights are trained, and no adapter")
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, where a method generates")
    parser.add_argument(
        "--ragged", action="store_true", help="rows of many lengths, padded; tokens/s then count padding"
    )
    parser.add_argument("--rounds", type=int, default=25, help="steps of each arm at most")
    parser.add_argument("--window", type=int, default=1, help="steps of an arm before the next has its turn")
    parser.add_argument("--seconds", type=float, default=200, help="no round is begun later than this")
    parser.add_argument("--profile", choices=list(ARMS), help="the kernels of one step of this arm")
    parser.add_argument("--peak", choices=list(ARMS), help="what is on the card at the peak of this arm's first steps")
    parser.add_argument("--check", action="store_true", help="exit 1 where an arm fell or began apart from the first")
    result_options(parser)
    options = parser.parse_args()
    methods = list(METHODS) if "all" in options.methods else options.methods
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    begun = time.perf_counter()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": device, "torch": torch.__version__, "shape": options.shape}))
    results = Results(options, device, "torch", "triton")
    sound = True
    for place, method in enumerate(methods):
        left = options.seconds - (time.perf_counter() - begun)
        until = time.perf_counter() + left / (len(methods) - place)
        sound = compare(options, method, options.arms, until, results) and sound
        if ENDED.is_set():
            break
    return int(ENDED.is_set() or (options.check and not sound))


if __name__ == "__main__":
    sys.exit(main())
