"""What becomes of a small reward beside a large one: under the sum of GRPO, and under GDPO, which compares each by itself.

    python benchmarks/gdpo_small_reward.py [--seeds 1 2 3] [--steps 60] [--runs FOLDER] [--results FILE --commit HASH]
                                           [--check] [KEY=VALUE ...]

The model learns dates by the recipe `demo` from answers of which every second ends with a full stop, and stops early. Then
two rewards judge its samples. The large one is the share of the date that is right, and 0.3 for a full stop; the small one
is 0.1 for an answer that is a date and nothing more. Both methods begin from the same model and see the same rewards with
the same weights, through the product's own worker. `--check` exits 1 unless for every seed the small reward ends above
its start under GDPO and below half of its start under GRPO, and the dates are no worse at the end under either.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _device import processor
from _figures import Results, result_options
from rl_dates import DEMO, sft, trained

from engine.builtin import dates
from engine.config.files import absolute, load, overrides
from engine.run.store import RunFolder

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
SFT_STEPS = 120
SMALL, LARGE = "rewards/small/mean", "rewards/large/mean"
BARE, STOP = 0.1, 0.3
REWARDS = """
import sys

sys.path.append({folder!r})
from dates_rewards import parts


def bare(completions):
    return [[{{"content": messages[-1]["content"].strip().rstrip(".")}}] for messages in completions]


def stop(completions):
    return [messages[-1]["content"].strip().endswith(".") for messages in completions]


def large(completions, answer):
    right = parts(bare(completions), [wanted.rstrip(".") for wanted in answer])
    return [share + {stop} * ends for share, ends in zip(right, stop(completions), strict=True)]


def small(completions):
    return [0.0 if ends else {bare} for ends in stop(completions)]
"""


@dataclass
class Outcome:
    method: str
    seed: int
    small: tuple[float, float]
    dates: tuple[float, float]
    seconds: float
    steps: int

    @property
    def good(self) -> bool:
        start, end = self.small
        return self.dates[1] >= self.dates[0] and (end > start if self.method == "gdpo" else end < start / 2)

    def sentence(self) -> str:
        (small, left), (share, later) = self.small, self.dates
        what = f"{self.method}, seed {self.seed}: small reward {small:.3f} -> {left:.3f}"
        return f"{what}, share of dates {share:.2f} -> {later:.2f} in {self.steps} steps and {self.seconds:.0f} s"


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given.add_argument("--steps", type=int, default=60)
    given.add_argument("--runs", type=Path)
    result_options(given)
    given.add_argument("--check", action="store_true")
    given.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = given.parse_intermixed_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gdpo-") as scratch:
        place = Path(scratch)
        (place / "rewards.py").write_text(REWARDS.format(folder=str(DEMO.parent), stop=STOP, bare=BARE))
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in half_with_a_stop()))
        for seed in options.seeds:
            data = {"train": [{"path": str(place / "rows.jsonl")}], "max_length": 128}
            start, _, _, _ = trained({**sft(SFT_STEPS, seed), "data": data}, options.runs or place, f"sft-{seed}")
            for method in ("grpo", "gdpo"):
                outcome = one(method, seed, start, place, options)
                print(outcome.sentence(), flush=True)
                outcomes.append(outcome)
    good = sum(outcome.good for outcome in outcomes)
    print(f"{good} of {len(outcomes)} runs are as the paper says: the small reward lives under GDPO alone")
    record(options, outcomes)
    return int(options.check and good < len(outcomes))


def half_with_a_stop() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [dict(row) for row in dates.rows("train", count=12_000)]
    for row in rows[::2]:
        question, answer = row["messages"]
        row["messages"] = [question, {**answer, "content": answer["content"] + "."}]
    return rows


def one(method: str, seed: int, start: Path, place: Path, options: Any) -> Outcome:
    """A run of the method from the model in `start`."""
    rewards = [f"{place}/rewards.py:large", f"{place}/rewards.py:small"]
    settings = [f"method.kind={method}", f"method.reward_funcs={rewards}", f"model.name={start}", f"run.seed={seed}"]
    settings += ["method.max_completion_length=9", f"optim.max_steps={options.steps}", *options.settings]
    mapping = overrides(absolute(load(DEMO).mapping, DEMO.parent), settings)
    mapping["data"] = {"train": [{"path": str(place / "rows.jsonl")}], "max_length": 128}
    end, seconds, _, _ = trained(mapping, options.runs or place, f"{method}-{seed}")
    events = [json.loads(line) for line in RunFolder(end.parents[1]).events.read_text().splitlines()]
    small, large = ([event[name] for event in events if name in event] for name in (SMALL, LARGE))
    # without what the full stops brought
    share = [both - STOP * (1 - bare / BARE) for both, bare in zip(large, small, strict=True)]
    few = max(1, len(small) // 12)
    ends = [(sum(of[:few]) / few, sum(of[-few:]) / few) for of in (small, share)]
    return Outcome(method, seed, ends[0], ends[1], seconds, len(small))


def record(given: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """One row a run: milliseconds a step, and in the shape what became of both rewards."""
    results = Results(given, processor(), "torch")
    for each in outcomes:
        moved = [f"{name}={a:.3f}..{b:.3f}" for name, (a, b) in (("small", each.small), ("dates", each.dates))]
        shape = f"seed={each.seed} steps={each.steps} {' '.join(moved)}"
        results.add(f"{each.method} with a small reward", shape, ms=[1000 * each.seconds / max(each.steps, 1)])


if __name__ == "__main__":
    sys.exit(main())
