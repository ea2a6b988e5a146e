"""What a push to a hub that hangs costs a step: runs with `run.push_to_hub` and without, in turn.

    python benchmarks/pushing.py [--pairs 20] [--steps 300] [--results FILE --commit HASH]

The hub is a server on the loopback that takes the question whether it may be written to and then answers no upload. A checkpoint is
saved every 20 steps, so a step is always being tried to be sent. Told are the median step of each run (its `step_seconds`, without the
first 50), the ratio of each pair, and what the training waited for a save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _device import processor
from _figures import Results, ratio, result_options

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.config.facts import Facts
from engine.config.files import absolute, overrides
from engine.config.recipes import recipe_mapping
from engine.rules import read
from engine.run import launch
from engine.run.from_config import launch_config
from engine.run.store import ENDED
from tests.hub_server import HANG, WHO, serving

FIRST = 50


def run_once(root: Path, steps: int, *, pushed: bool) -> tuple[float, float]:
    """Seconds of a step and of a save, the medians of one run."""
    settings = [f"optim.max_steps={steps}", "run.save_steps=20", "run.prompts=[]", "data.eval=[]"]
    settings += ["run.push_to_hub=true", f"run.hub_model_id={WHO}", "run.hub_wait_seconds=0"] if pushed else []
    mapping = overrides(absolute(recipe_mapping("demo"), root), settings)
    for name in ("prompts", "prompts_steps", "max_new_tokens"):
        mapping["run"].pop(name, None)
    mapping["optim"].pop("per_device_eval_batch_size", None)
    reading = read(mapping, Facts())
    assert reading.ok, reading.findings
    run = launch_config(reading.config, Facts(), runs_dir=root / "runs", name="pushed" if pushed else "alone")
    while run.state not in ENDED:
        time.sleep(0.1)
    launch.settle(run)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert events[-1]["kind"] == "finished", events[-1]
    took = [
        each["step_seconds"]
        for each in events
        if each["kind"] == "metrics" and each["step"] > FIRST and "step_seconds" in each
    ]
    saves = [each["seconds"] for each in events if each["kind"] == "checkpoint" and each["state"] == "committed"]
    assert any(each["kind"] == "upload" for each in events) == pushed
    return statistics.median(took), statistics.median(saves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    result_options(parser)
    given = parser.parse_args()
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    results = Results(given, device, "torch")
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with serving() as hub, tempfile.TemporaryDirectory() as folder:
        os.environ.update(hub.environment(folder, patience=60))
        hub.fails = [("/store/", HANG, 1 << 30), ("/commit/", HANG, 1 << 30)]
        for turn in range(given.pairs):
            for pushed in (False, True) if turn % 2 else (True, False):
                found[pushed].append(run_once(Path(folder), given.steps, pushed=pushed))
            (with_, save), (without, plain) = found[True][-1], found[False][-1]
            print(
                f"{turn + 1:3}  step {1e3 * with_:.3f} ms beside an upload that hangs, {1e3 * without:.3f} alone: {with_ / without:.3f}; save {1e3 * save:.1f} and {1e3 * plain:.1f} ms",
                flush=True,
            )
    for what, place in (("step", 0), ("save", 1)):
        pushed, alone = ([each[place] for each in found[way]] for way in (True, False))
        middle, low, high = ratio(list(zip(pushed, alone, strict=True)))
        print(f"{device}: {what} beside a hanging upload / alone {middle:.3f} [{low:.3f}, {high:.3f}]", flush=True)
        results.add("push_to_hub", what, "hanging", ms=[1e3 * each for each in pushed])
        results.add("push_to_hub", what, "alone", ms=[1e3 * each for each in alone])


if __name__ == "__main__":
    main()
