"""All that only a card can prove, in order of importance: the GPU tests, then every figure of this folder that needs one.

    python benchmarks/on_card.py [NAME ...] [--seconds 560] [--cards 1] [--logs FOLDER] [--results FILE --commit HASH]
    python benchmarks/on_card.py --list

For a card that is lent for minutes: a part starts only where its whole time is left, is ended when that is over, and is
told in a line as soon as it ended; what each part printed lies in `FOLDER/NAME.log`. A part whose log says that it ended
well is not run again, so that the next call with the same folder goes on with the rest. On a machine of several cards
each card takes the next part as soon as it is free: a part sees one card and its share of the processors. Exits 1 where a
part failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from _figures import result_options

HERE = Path(__file__).parent
ENDED_WELL = "# ended well"


@dataclass(frozen=True)
class Part:
    """A command and the seconds it may take; `keeps` says that it writes rows of figures."""

    name: str
    seconds: int
    command: tuple[str, ...]
    keeps: bool = True

    def argv(self, given: argparse.Namespace) -> list[str]:
        kept = (
            ["--results", str(given.results.absolute()), "--commit", given.commit]
            if self.keeps and given.results
            else []
        )
        return [sys.executable, *self.command, *kept]


def bench(name: str, seconds: int, script: str, *options: str) -> Part:
    return Part(name, seconds, (str(HERE / f"{script}.py"), *options))


def method(kind: str, shape: str, seconds: int, *arms: str) -> Part:
    """A part of `gpu_methods.py`: one method, since what it measured stands when the next one takes too long."""
    taken = arms or ("plain", "ours", "cut, compiled")
    options = ("--shape", shape, "--methods", kind, "--arms", *taken, "--rounds", "20", "--seconds", str(seconds - 30))
    return bench(f"{kind}-{shape}", seconds, "gpu_methods", *options)


def methods(name: str, seconds: int, rounds: int, shape: str, kinds: tuple[str, ...], *arms: str) -> Part:
    """A part of `gpu_methods.py`: several methods in one process, since loading the libraries takes as long as their
    steps. Answers are short, so that a step is not sampling alone."""
    options = ("--shape", shape, "--methods", *kinds, "--arms", *arms, "--rounds", str(rounds), "--answer", "8")
    return bench(name, seconds, "gpu_methods", *options, "--seconds", str(seconds - 30))


def sft(name: str, seconds: int, rounds: int, *arms: str) -> Part:
    """A part of `gpu_methods.py`: these arms of supervised fine-tuning at 8B."""
    options = ("--shape", "8b", "--rounds", str(rounds), "--seconds", str(seconds - 30), "--arms", *arms)
    return bench(name, seconds, "gpu_methods", *options)


MARKED = tuple(
    str(test)
    for test in sorted((HERE.parent / "tests").rglob("test_*.py"), key=lambda test: ("kernels" not in test.parts, test))
    if "mark.gpu" in test.read_text("utf-8")
)
"""The files that carry the mark, the longest first: the others may need packages that a card's machine lacks."""
# Eight processes, as many as the goal of 240 s is for.
TESTS = ("-m", "pytest", "-v", "-n", "8", "--durations=15", "-p", "no:cacheprovider", "-m", "gpu", *MARKED)
KINDS = (
    "sft", "dpo", "kto", "grpo", "ppo", "reward", "embedding", "ipo", "simpo", "orpo", "gdpo", "prm", "pretrain", "distill",
)  # fmt: skip
WHOLE = "default", "cut, compiled", "cut, compiled, none", "cut, compiled, streamed"
SAMPLED = "grpo", "gdpo", "ppo"
"""Compiling changes nothing about how answers are sampled, which is most of their step."""
LEARNS = tuple(kind for kind in KINDS if kind not in SAMPLED)
PARTS = (
    Part("tests", 390, TESTS, keeps=False),
    methods("restless-0.6b", 180, 60, "0.6b", ("simpo", "prm", "pretrain"), "plain", "ours"),
    methods("samples-0.6b", 150, 30, "0.6b", SAMPLED, "plain", "ours"),
    methods("samples-8b", 180, 25, "8b", SAMPLED, "plain", "ours"),
    bench("recorded", 90, "gpu_stack_graph"),
    bench("packed", 60, "packed_attention"),
    bench("layers", 215, "layer_offload", "--seconds", "200"),
    bench("whole-0.6b", 105, "whole_step", "step_06b_full", "--seconds", "75"),
    bench("prompt-sharing", 260, "prompt_sharing"),
    bench("run", 150, "gpu_sft_06b", "--steps", "140", "--limit", "120"),
    bench("step", 140, "step_overhead", "--shape", "0.6b", "--steps", "25", "--pairs", "6", "--seconds", "75"),
    bench("kernels", 180, "dense_kernels", "ce", "logp", "rope"),
    bench("rotation", 75, "dense_kernels", "turn"),
    methods("learns-0.6b", 400, 20, "0.6b", LEARNS, "plain", "ours", "cut, fused, lora"),
    sft("offloaded-8b", 130, 25, "ours", "offloaded"),
    bench("whole-8b", 115, "whole_step", "step_8b_lora", "--seconds", "85", "--arms", *WHOLE),
    bench("whole-short", 105, "whole_step", "step_8b_lora_short", "--seconds", "75", "--profile", "cut, compiled"),
    sft("fp8-base-8b", 115, 20, "cut, compiled", "fp8 base", "fp8 base, none"),
    sft("lora-8b", 90, 8, "ours", "lora", "cut", "cut, lora", "cut, compiled"),
    *(method(kind, "8b", 130) for kind in LEARNS),
    *(method(kind, "0.6b", 130, "ours", "cut, compiled") for kind in LEARNS),
    bench("lora", 100, "lora_projections", "--seconds", "60", "--rounds", "15"),
    bench("tiled", 110, "tiled_mlp", "--seconds", "95"),
    bench("fp8-layers", 165, "gpu_fp8", "layers", "--seconds", "150"),
    bench("fp8-learn", 150, "gpu_fp8", "learn"),
    bench("fp8-base", 110, "gpu_fp8", "base"),
    bench("fp8-sizes", 70, "gpu_fp8", "sizes"),
    bench("optimizers", 90, "gpu_optimizers"),
    bench("features", 125, "gpu_features", "--seconds", "110"),
    *(
        bench(f"default-{work}", 300, "by_default", work, "--no-start", "--seconds", "240")
        for work in (
            "8b-lora",
            "8b-lora-ragged",
            "8b-lora-alpaca",
            "8b-lora-gsm8k",
            "8b-lora-one-row",
            "8b-lora-accumulated",
            "0.6b-full",
            "0.6b-lora-ragged",
            "0.6b-dpo",
            "8b-dpo",
            "0.6b-grpo",
            "8b-grpo",
        )
    ),
    *(
        bench(f"start-{shape}-{rows}", 560, "first_step", "--shape", shape, "--rows", rows, "--with-trl")
        for shape in ("0.6b", "8b")
        for rows in ("packed", "ragged")
    ),
    *(
        bench(f"scale-{part}", 590, "scale_curves", "--part", part, "--seconds", "540")
        for part in ("lengths", "batches", "quantized", "full")
    ),
    bench("estimate", 200, "estimate_error", "--shape", "0.6b"),
)


def run(part: Part, card: int, given: argparse.Namespace) -> bool:
    """Whether it ended well on that card; says so, and how long it took."""
    log = given.logs / f"{part.name}.log"
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": str(card),
        }
        process = subprocess.Popen(
            part.argv(given), cwd=HERE.parent, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(part.seconds)
            how = "ended well" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, how = process.wait(), f"was ended after {part.seconds} seconds"
        out.write(f"\n{ENDED_WELL if code == 0 else '# ' + how}\n")
    print(f"{part.name}: {how}, {time.monotonic() - begun:.0f} s; {log}", flush=True)
    if code != 0:  # the log may stay behind on a lent machine, what failed must not
        print("\n".join(f"    {line}" for line in what_failed(log)), flush=True)
    return code == 0


def what_failed(log: Path) -> list[str]:
    """The tests that fell, or the last words of a script."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return [line for line in lines if line.startswith(("FAILED ", "ERROR "))][:20] or lines[-6:]


def has_ended_well(log: Path) -> bool:
    return log.is_file() and log.read_text("utf-8", "replace").rstrip().endswith(ENDED_WELL)


class Queue:
    """The parts that are left, taken in order by as many threads as there are cards."""

    def __init__(self, parts: list[Part], given: argparse.Namespace) -> None:
        self.given, self.end = given, time.monotonic() + given.seconds
        self.parts = [part for part in parts if not has_ended_well(given.logs / f"{part.name}.log")]
        self.lock, self.failed = threading.Lock(), False

    def serve(self, card: int) -> None:
        """Runs parts on this card until none is left that fits."""
        own = sorted(os.sched_getaffinity(0))[card :: self.given.cards]
        os.sched_setaffinity(0, own)  # of this thread, and so of the processes that it starts
        while (part := self._next()) is not None:
            if not run(part, card, self.given):
                self.failed = True

    def _next(self) -> Part | None:
        with self.lock:
            fits = next((part for part in self.parts if part.seconds <= self.end - time.monotonic()), None)
            if fits is not None:
                self.parts.remove(fits)
            return fits


def main() -> int:
    """Run what is left and fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these parts, in this order")
    parser.add_argument("--seconds", type=float, default=560, help="seconds that the card is there")
    parser.add_argument("--cards", type=int, default=1, help="parts side by side, each on a card of its own")
    parser.add_argument("--logs", type=Path, default=Path("on_card"), metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="say what there is and how long it may take")
    result_options(parser)
    given = parser.parse_args()
    if unknown := set(given.names) - {part.name for part in PARTS}:
        parser.error(
            f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}"
        )
    parts = {part.name: part for part in PARTS}
    wanted = [parts[name] for name in given.names or parts]
    if given.list:
        for part in wanted:
            print(f"{part.name:14} {part.seconds:4} s  {' '.join(Path(word).name for word in part.command)}")
        return 0
    given.logs.mkdir(parents=True, exist_ok=True)
    queue = Queue(wanted, given)
    cards = [threading.Thread(target=queue.serve, args=(card,)) for card in range(given.cards)]
    for card in cards:
        card.start()
    for card in cards:
        card.join()
    left = ", ".join(part.name for part in queue.parts)
    print(f"no time for: {left}" if left else "nothing is left", flush=True)
    return int(queue.failed)


if __name__ == "__main__":
    sys.exit(main())
