"""What the demo learns and how long it takes: exact match on 1,000 held-out days, through the product's own worker.

    python benchmarks/demo_accuracy.py [--seeds 1 2 3] [--runs FOLDER] [--results FILE --commit HASH] [--check]
                                       [KEY=VALUE ...]

Each seed is one run of the recipe `demo`, started as the commands start it. Training seconds go from the event `started`
to `finished`: steps, held-out losses, sample answers and checkpoints. CPU seconds are the worker's over the same time;
on a machine that does other work too, half of them is what two quiet cores would need at best. `--check` exits 1 unless
every seed reaches 95 % within 90 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from _device import processor
from _figures import Results, result_options

from engine.config.facts import Facts
from engine.config.files import overrides
from engine.config.recipes import recipe_mapping
from engine.hardware import this_machine
from engine.rules import read
from engine.run import checkpoint
from engine.run.from_config import launch_config
from engine.run.store import RunFolder

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
WANTED, SECONDS = 0.95, 90
ENDED = ("finished", "stopped")


@dataclass
class Outcome:
    seed: int
    accuracy: float
    seconds: float
    cpu_seconds: float
    before_seconds: float
    step_seconds: list[float]
    answers: list[tuple[int, str]]
    wrong: list[tuple[str, str, str]]

    @property
    def right_from(self) -> int | None:
        """The step from which the first pinned prompt stays answered right."""
        step = None
        for at, answer in self.answers:
            step = (at if step is None else step) if answer == "2021-03-03" else None
        return step

    def sentence(self) -> str:
        return (
            f"seed {self.seed}: {self.accuracy:.1%} of 1,000 held-out days exact after {self.seconds:.1f} s of training "
            f"({self.cpu_seconds:.0f} CPU seconds; {self.before_seconds:.1f} s before the first step); the first pinned "
            f"prompt is right from step {self.right_from} on"
        )


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given.add_argument("--runs", type=Path)
    result_options(given)
    given.add_argument("--check", action="store_true")
    given.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = given.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="demo-") as scratch:
        outcomes = [told(one(seed, options.runs or Path(scratch), options.settings)) for seed in options.seeds]
    good = [outcome for outcome in outcomes if outcome.accuracy >= WANTED and outcome.seconds <= SECONDS]
    print(f"{len(good)} of {len(outcomes)} seeds reach {WANTED:.0%} within {SECONDS} s")
    record(options, outcomes)
    return int(options.check and len(good) < len(outcomes))


def told(outcome: Outcome) -> Outcome:
    print(outcome.sentence(), flush=True)
    for question, answer, right in outcome.wrong[:5]:
        print(f"    {question!r} -> {answer!r}, not {right!r}", flush=True)
    return outcome


def one(seed: int, runs: Path, settings: list[str]) -> Outcome:
    """Train the demo with this seed and ask its last checkpoint all held-out days."""
    facts = Facts(machine=this_machine())
    mapping = overrides(recipe_mapping("demo"), [*settings, f"run.seed={seed}"])
    run = launch_config(read(mapping, facts).config, facts, runs_dir=runs, name=f"demo-{seed}")
    cpu_seconds = wait(run)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    end = events[-1]
    if end["kind"] != "finished":
        raise SystemExit(f"{run.path}: ended as {end['kind']}: {end.get('message', '')}\n{run.log.read_text()[-2000:]}")
    started = next(event for event in events if event["kind"] == "started")
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    asked = ask(newest, seed)
    return Outcome(
        seed=seed,
        accuracy=sum(given == right for _, given, right in asked) / len(asked),
        seconds=end["t"] - started["t"],
        cpu_seconds=cpu_seconds,
        before_seconds=started["t"] - events[0]["t"],
        step_seconds=sorted(event["step_seconds"] for event in events if "step_seconds" in event),
        answers=[
            (event["step"], event["completion"]) for event in events if event["kind"] == "sample" and not event["index"]
        ],
        wrong=[row for row in asked if row[1] != row[2]],
    )


def wait(run: RunFolder) -> float:
    """Wait until the run has ended; the CPU seconds of its worker and the worker's processes since training began."""
    begun: float | None = None
    spent = 0.0
    while (state := run.state) not in ENDED:
        if state in ("failed", "lost"):
            raise SystemExit(f"{run.path}: {run.read_json().get('cause')}\n{run.log.read_text()[-2000:]}")
        time.sleep(0.25)
        worker = run.worker()
        try:
            if worker is not None:
                spent = max(spent, _cpu_seconds(psutil.Process(worker.pid)))
        except psutil.NoSuchProcess:
            pass
        if begun is None and state == "running":
            begun = spent
    return spent - (begun or 0.0)


def _cpu_seconds(process: psutil.Process) -> float:
    """Of a process and all that it started and that live."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def ask(folder: Path, seed: int) -> list[tuple[str, str, str]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from engine.builtin import dates
    from engine.generate import answers_to

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    # Other spellings than those of the run's own held-out loss.
    return answers_to(model, tokenizer, dates.rows("eval", seed=seed + 1000), batch_size=250)


def record(given: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """One row a seed: milliseconds a step with their 10th and 90th percentile."""
    results = Results(given, processor(), "torch")
    for outcome in outcomes:
        steps = outcome.step_seconds
        shape = f"seed={outcome.seed} steps={len(steps)} seconds={outcome.seconds:.1f} exact={outcome.accuracy:.3f}"
        results.add("demo", shape, ms=[1000 * seconds for seconds in steps])


if __name__ == "__main__":
    sys.exit(main())
