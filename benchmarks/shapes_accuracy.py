"""What the demo of images learns and how long it takes: 600 held-out pictures, and the same blank or asked something else.

    python benchmarks/shapes_accuracy.py [--seeds 1 2 3] [--runs FOLDER] [--results FILE --commit HASH] [--check]
                                         [KEY=VALUE ...]

Each seed is one run of the recipe `demo-images`, started as the commands start it, and one line. An answer is right where
every token of it, its end too, is what the trained model would write. The same rows with their pictures blanked leave one
colour of six to guess; with the questions of other rows, one of the two that are seen. Training seconds go from the event
`started` to `finished`; CPU seconds are the worker's over the same time, so on a machine that does other work too half of
them is what two quiet cores would need at best. `--check` exits 1 unless every seed is right about more than 95 % within 180
seconds, and below 30 % (blank) and 60 % (asked something else) without what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _device import processor
from _figures import Results, result_options
from demo_accuracy import wait

from engine.builtin import shapes
from engine.config.facts import Facts
from engine.config.files import overrides
from engine.config.recipes import recipe_mapping
from engine.hardware import this_machine
from engine.rules import read
from engine.run import checkpoint
from engine.run.from_config import launch_config

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
WANTED, SECONDS = 0.95, 180
BLANK, MIXED = 0.3, 0.6
ROWS = 600


@dataclass
class Outcome:
    seed: int
    seconds: float
    cpu_seconds: float
    step_seconds: list[float]
    right: float
    blank: float
    mixed: float

    @property
    def good(self) -> bool:
        return self.right > WANTED and self.seconds <= SECONDS and self.blank < BLANK and self.mixed < MIXED

    def sentence(self) -> str:
        return (
            f"seed {self.seed}: {self.right:.1%} of {ROWS} held-out pictures right after {self.seconds:.1f} s of training "
            f"({self.cpu_seconds:.0f} CPU seconds, {len(self.step_seconds)} steps); {self.blank:.1%} with the picture "
            f"blanked, {self.mixed:.1%} with another question"
        )


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given.add_argument("--runs", type=Path)
    result_options(given)
    given.add_argument("--check", action="store_true")
    given.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = given.parse_intermixed_args()
    results = Results(options, processor(), "torch")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="shapes-") as scratch:
        for seed in options.seeds:
            outcome = one(seed, options.runs or Path(scratch), options.settings)
            outcomes.append(outcome)
            print(outcome.sentence(), flush=True)
            shape = (
                f"seed={seed} steps={len(outcome.step_seconds)} seconds={outcome.seconds:.1f} "
                f"cpu_seconds={outcome.cpu_seconds:.0f} right={outcome.right:.3f} blank={outcome.blank:.3f} "
                f"mixed={outcome.mixed:.3f}"
            )
            results.add("demo images", shape, ms=[1000 * seconds for seconds in outcome.step_seconds])
    return int(options.check and not all(outcome.good for outcome in outcomes))


def one(seed: int, runs: Path, settings: list[str]) -> Outcome:
    """Train the demo with this seed and ask its last checkpoint about pictures that no training row shows."""
    facts = Facts(machine=this_machine())
    mapping = overrides(recipe_mapping("demo-images"), [*settings, f"run.seed={seed}"])
    run = launch_config(read(mapping, facts).config, facts, runs_dir=runs, name=f"shapes-{seed}")
    cpu_seconds = wait(run)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    if events[-1]["kind"] != "finished":
        raise SystemExit(f"{run.path}: ended as {events[-1]['kind']}\n{run.log.read_text()[-2000:]}")
    started = next(event for event in events if event["kind"] == "started")
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    rows = shapes.rows("eval", seed=seed + 1000, count=ROWS)
    white = shapes.encoded(shapes.blank())
    asked = [row["messages"][0] for row in rows]
    random.Random(0).shuffle(asked)
    variants = (
        rows,
        [{**row, "images": [white]} for row in rows],
        [{**row, "messages": [question, row["messages"][1]]} for row, question in zip(rows, asked, strict=True)],
    )
    right, blank, mixed = (share_right(newest, each, runs / f"rows-{seed}.jsonl") for each in variants)
    steps = sorted(event["step_seconds"] for event in events if "step_seconds" in event)
    return Outcome(seed, events[-1]["t"] - started["t"], cpu_seconds, steps, right, blank, mixed)


def share_right(folder: Path, rows: list[dict[str, Any]], place: Path) -> float:
    """The share of rows whose answer is what the model would write, token by token to its end."""
    import torch
    from transformers import AutoModelForImageTextToText

    from engine.data.collate import collator_for
    from engine.data.prepare import prepare
    from engine.data.pretokenized import IGNORED
    from engine.models.load import load_processing_class

    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = recipe_mapping("demo-images")
    mapping["data"] = {**mapping["data"], "train": [{"path": str(place)}], "eval": []}
    config = read(mapping).config
    reader = load_processing_class(config)
    batch = dict(collator_for(config, reader)(list(prepare(config, reader).dataset)))
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        written = AutoModelForImageTextToText.from_pretrained(folder)(**batch).logits.argmax(-1)[:, :-1]
    return float(((written == labels) | (labels == IGNORED)).all(1).float().mean())


if __name__ == "__main__":
    sys.exit(main())
