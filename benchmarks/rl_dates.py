"""How far rewards alone bring a model that is right about a third of the time: GRPO, GDPO and PPO on dates.

    python benchmarks/rl_dates.py [--methods grpo gdpo ppo] [--seeds 1 2 3] [--controls no|too|only] [--processes 2]
                                  [--runs FOLDER] [--results FILE --commit HASH] [--check] [KEY=VALUE ...]

A short SFT by the recipe `demo` gives the model that is right about a third of the time; each method then goes on from it
as `demos/grpo_dates.yaml` has it, through the product's own worker. Right answers are counted on 1,000 days that occur in
no training row, answered greedily. The control has the same rewards in another order within each sampling: it sees the
same numbers and can learn nothing from them. Two processes share the 256 answers of a step, each on a core. Training
seconds go from the event `started` to `finished`, those of the SFT are told apart; CPU seconds are the worker's and its
processes' over the same time: on a machine that does other work too, half of them is what two quiet cores would need at
best. `--check` exits 1 unless every run passes 80 % within 300 seconds and every control stays within 5 points.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from _device import processor
from _figures import Results, result_options
from demo_accuracy import ask, wait

from engine.config.facts import Facts
from engine.config.files import absolute, load, overrides
from engine.config.recipes import recipe_mapping
from engine.hardware import this_machine
from engine.rules import read
from engine.run import checkpoint
from engine.run.from_config import launch_config
from engine.run.store import RunFolder

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
WANTED, SECONDS, POINTS = 0.80, 300, 0.05
SFT_STEPS = 180
ANSWERS = 256
DEMO = Path(__file__).parents[1] / "demos" / "grpo_dates.yaml"
CONTROLS = {"no": (False,), "too": (False, True), "only": (True,)}
METHODS: dict[str, list[str]] = {
    "grpo": [],
    "gdpo": ["method.kind=gdpo", "optim.max_steps=1000"],
    "ppo": [
        "method.kind=ppo",
        "method.num_generations=8",
        "method.num_iterations=1",
        "method.beta=0.12",
        "method.lam=1",
        "method.value_learning_rate=0.01",
    ],
}
# The share of sampled answers that are right; dealing them out anew leaves it as it is.
EXACT = ("rewards/exact_match/mean", "rewards/shuffled_exact/mean")
SHUFFLED = """
import random
import sys

sys.path.append({folder!r})
from dates_rewards import parts

# Two draws from one seed: both rewards of an answer go to the same other answer.
order = {{"exact": random.Random(0), "parts": random.Random(0)}}


def dealt(name, rewards):
    order[name].shuffle(rewards)
    return rewards


def shuffled_exact(completions, answer):
    return dealt("exact", [float(share == 1.0) for share in parts(completions, answer)])


def shuffled_parts(completions, answer):
    return dealt("parts", parts(completions, answer))
"""


@dataclass
class Outcome:
    method: str
    seed: int
    control: bool
    before: float
    after: float
    seconds: float
    cpu_seconds: float
    rewards: list[float]

    @property
    def good(self) -> bool:
        if self.control:
            return abs(self.after - self.before) <= POINTS
        return self.after >= WANTED and self.seconds <= SECONDS

    def sentence(self) -> str:
        what = f"{self.method}, seed {self.seed}{', shuffled rewards' if self.control else ''}"
        tenth = max(1, len(self.rewards) // 10)
        sampled = [sum(part) / len(part) for part in (self.rewards[:tenth], self.rewards[-tenth:])]
        return (
            f"{what}: {self.before:.1%} -> {self.after:.1%} of 1,000 held-out days exact in {self.seconds:.1f} s "
            f"({self.cpu_seconds:.0f} CPU seconds, {len(self.rewards)} steps); sampled answers {sampled[0]:.2f} -> "
            f"{sampled[1]:.2f}"
        )


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    given.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given.add_argument("--controls", choices=CONTROLS, default="too")
    given.add_argument("--sft-steps", type=int, default=SFT_STEPS)
    given.add_argument("--processes", type=int, default=2)
    given.add_argument("--runs", type=Path)
    result_options(given)
    given.add_argument("--check", action="store_true")
    given.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = given.parse_intermixed_args()
    outcomes: list[Outcome] = []
    results = Results(options, processor(), "torch")
    with tempfile.TemporaryDirectory(prefix="rl-") as scratch:
        runs = options.runs or Path(scratch)
        for seed in options.seeds:
            start, before = begun(options.sft_steps, seed, runs)
            for method, control in product(options.methods, CONTROLS[options.controls]):
                outcome = one(method, seed, control, start, before, options.processes, options.settings, runs)
                outcomes.append(outcome)
                record(results, outcome, options.processes)
    good = sum(outcome.good for outcome in outcomes)
    print(
        f"{good} of {len(outcomes)} runs are as wanted: {WANTED:.0%} within {SECONDS} s, controls within {POINTS:.0%}"
    )
    return int(options.check and good < len(outcomes))


def begun(steps: int, seed: int, runs: Path) -> tuple[Path, float]:
    """The model after the short SFT, and the share of held-out days that it has right."""
    start, seconds, _, _ = trained(sft(steps, seed), runs, f"sft-{seed}")
    right = accuracy(start, seed)
    print(f"sft, seed {seed}: {right:.1%} after {steps} steps in {seconds:.1f} s", flush=True)
    return start, right


def one(
    method: str, seed: int, control: bool, start: Path, before: float, processes: int, given: list[str], runs: Path
) -> Outcome:
    """One method from that model on, or its control."""
    settings = [*METHODS[method], f"model.name={start}", f"run.seed={seed}", f"run.devices={processes}"]
    settings += [f"optim.per_device_train_batch_size={ANSWERS // processes}", *given]
    if control:
        runs.mkdir(parents=True, exist_ok=True)
        dealt_out = runs / "shuffled.py"
        dealt_out.write_text(SHUFFLED.format(folder=str(DEMO.parent)))
        settings.append(
            f"method.reward_funcs={[f'{dealt_out}:{name}' for name in ('shuffled_exact', 'shuffled_parts')]}"
        )
    mapping = overrides(absolute(load(DEMO).mapping, DEMO.parent), settings)
    end, seconds, cpu_seconds, rewards = trained(mapping, runs, f"{method}-{seed}{'-control' if control else ''}")
    outcome = Outcome(method, seed, control, before, accuracy(end, seed), seconds, cpu_seconds, rewards)
    print(outcome.sentence(), flush=True)
    return outcome


def sft(steps: int, seed: int) -> dict[str, Any]:
    """The demo, shorter, and without anything beside the steps."""
    mapping = overrides(recipe_mapping("demo"), [f"optim.max_steps={steps}"])
    del mapping["data"]["eval"], mapping["optim"]["per_device_eval_batch_size"]
    return {**mapping, "run": {"seed": seed, "save_steps": 100_000}}


def trained(mapping: dict[str, Any], runs: Path, name: str) -> tuple[Path, float, float, list[float]]:
    """A run through the launcher: its last checkpoint, its seconds and CPU seconds of training, and its rewards."""
    facts = Facts(machine=this_machine())
    reading = read(mapping, facts)
    for finding in reading.findings:
        if finding.severity == "error":
            raise SystemExit(finding.message)
    run: RunFolder = launch_config(reading.config, facts, runs_dir=runs, name=name)
    cpu_seconds = wait(run)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    if events[-1]["kind"] != "finished":
        raise SystemExit(f"{run.path}: ended as {events[-1]['kind']}: {events[-1].get('message', '')}")
    started = next(event for event in events if event["kind"] == "started")
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    return (
        newest,
        events[-1]["t"] - started["t"],
        cpu_seconds,
        [
            next((event[name] for name in EXACT if name in event), event["reward"])
            for event in events
            if "reward" in event and "loss" in event
        ],
    )


def accuracy(folder: Path, seed: int) -> float:
    asked = ask(folder, seed)
    return sum(given == right for _, given, right in asked) / len(asked)


def record(results: Results, outcome: Outcome, processes: int) -> None:
    """A row of a run: milliseconds a step, and in the shape what was reached in which time."""
    steps = len(outcome.rewards)
    shape = (
        f"seed={outcome.seed} processes={processes} steps={steps} seconds={outcome.seconds:.1f} "
        f"cpu={outcome.cpu_seconds:.0f} before={outcome.before:.3f} after={outcome.after:.3f}"
    )
    work = f"{outcome.method} on dates{', shuffled rewards' if outcome.control else ''}"
    results.add(work, shape, ms=[1000 * outcome.seconds / max(steps, 1)])


if __name__ == "__main__":
    sys.exit(main())
