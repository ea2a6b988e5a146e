"""GRPO whose rewards, or answers too, are made while it trains: what a step waits for, and whether answers are the same.

    python benchmarks/async_rollouts.py [--shape 0.6b] [--steps 16] [--reward-seconds 0 2] [--arms none rewards answers]
                                        [--tokens 64] [--answers 16] [--depth 1] [--results FILE --commit HASH]
    python benchmarks/async_rollouts.py --shape tiny --steps 10

Runs as `workbench train` starts them, LoRA on random weights, one sampling a step; the reward sleeps `--reward-seconds`, as one does
that asks a judge over the network, and takes nothing of the processors. Told are, over the last half of the steps: seconds of a
step and of them those that it waited for what is made ahead, processor seconds of all processes for the whole run, and the age of
answers. `answers` and `rewards` follow the same weights: how many of their answers are equal is told too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _figures import Results, result_options
from first_step import CARD, make_model

from engine.config.files import as_yaml
from engine.run import spawn
from engine.run.devices import choose
from engine.run.rollouts import read_group
from engine.run.store import RunFolder, create

REWARD = """
import time


def sleeping(completions):
    time.sleep({seconds})
    return [float(sum(map(ord, messages[-1]["content"])) % 5) for messages in completions]
"""


def config(place: Path, given: argparse.Namespace, arm: str, seconds: float) -> dict[str, Any]:
    reward = place / f"reward-{seconds:g}.py"
    reward.write_text(REWARD.format(seconds=seconds))
    method = {
        "kind": "grpo", "reward_funcs": [f"{reward}:sleeping"], "max_completion_length": given.tokens,
        "num_generations": 8, "rollout_groups": given.answers // 8, "async_prefetch": arm,
    }  # fmt: skip
    if arm != "none" and given.depth > 1:
        method["prefetch_depth"] = given.depth
    return {
        "version": 1,
        "model": {"name": str(place / "model"), "dtype": "bfloat16" if CARD else "float32"},
        "adapter": {"kind": "lora", "r": 16},
        "method": method,
        "data": {"train": [{"path": str(place / "rows.jsonl")}], "max_length": 128},
        "optim": {
            "max_steps": given.steps, "per_device_train_batch_size": given.answers, "gradient_accumulation_steps": 1,
            "learning_rate": 1e-5,
        },
        "run": {"save_steps": 1_000_000},
    }  # fmt: skip


def take(place: Path, given: argparse.Namespace, arm: str, seconds: float) -> dict[str, Any]:
    """One run to its end and what it told."""
    run = create(place / "runs", as_yaml(config(place, given, arm, seconds)), {"method": "grpo", "model": "random"})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    choice = choose("auto")
    environment = spawn.environment(os.environ, choice, "")
    with open(run.log, "wb") as log:
        code = subprocess.call(spawn.worker_argv(run, choice), env=environment, stdout=log, stderr=log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        print(run.log.read_text()[-3000:])
        raise SystemExit(f"{arm}: the run ended with {code}")
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "metrics" and "step_seconds" in event]
    late = steps[len(steps) // 2 :]
    waits = [event.get("prefetch/wait_seconds", 0.0) for event in late]
    return {
        "step": [event["step_seconds"] for event in late],
        "wait": statistics.median(waits),
        "first_wait": steps[0].get("prefetch/wait_seconds", 0.0),
        "age": statistics.fmean(event.get("prefetch/age", 0.0) for event in late),
        "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak": max((event.get("memory_peak", 0) for event in steps), default=0) / 2**20,
        "ratio": statistics.fmean(event.get("sampling/importance_sampling_ratio/mean", 1.0) for event in late),
        "texts": texts(run, events),
    }


def texts(run: RunFolder, events: list[dict[str, Any]]) -> dict[tuple[int, int], list[str]]:
    """The answers by step and group."""
    found = {}
    for event in events:
        if event["kind"] == "rollout" and (group := read_group(run, event)) is not None:
            found[event["step"], event["group"]] = [each["text"] for each in group["completions"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--reward-seconds", type=float, nargs="+", default=[0.0])
    parser.add_argument("--arms", nargs="+", default=["none", "rewards", "answers"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--depth", type=int, default=1)
    result_options(parser)
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    results = Results(given, device, "torch")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_model(place / "model", given.shape)
        if CARD:
            torch.cuda.empty_cache()
        rows = (json.dumps({"prompt": f"Say something of {number}."}) + "\n" for number in range(512))
        (place / "rows.jsonl").write_text("".join(rows))
        for seconds in given.reward_seconds:
            known: dict[str, dict[tuple[int, int], list[str]]] = {}
            for arm in given.arms:
                begun = time.monotonic()
                found = take(place, given, arm, seconds)
                known[arm] = found["texts"]
                shape = (
                    f"{given.shape} {given.answers} x {given.tokens} tokens, reward {seconds:g} s, depth {given.depth}"
                )
                results.add(
                    "async rollouts", shape, arm, ms=[1000 * step for step in found["step"]], peak_mib=found["peak"]
                )
                print(
                    f"{device}: {shape}: {arm:8} step {statistics.median(found['step']):.3f} s, waits {found['wait']:.3f} s "
                    f"(the first {found['first_wait']:.1f} s), age {found['age']:.1f}, weight {found['ratio']:.3f}, processors "
                    f"{found['processor']:.0f} s, run {time.monotonic() - begun:.0f} s, peak {found['peak']:.0f} MiB",
                    flush=True,
                )
            if {"rewards", "answers"} <= known.keys():
                own, others = known["rewards"], known["answers"]
                pairs = [(a, b) for key in own for a, b in zip(own[key], others.get(key, []), strict=False)]
                same = sum(a == b for a, b in pairs)
                print(f"answers of the process equal to the training's own: {same} of {len(pairs)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
