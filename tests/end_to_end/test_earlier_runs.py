"""A run of version 0.1.0, as its folder was left: this version shows it, compares it and goes on from its checkpoint.

The folder `earlier/dates-0001` was written by that version: eight steps of the built-in demo with LoRA, a checkpoint every four.
The base model is made on the machine that runs it, so going on gives the losses that were written then only while model, rows,
order, adapter, optimizer and random numbers are all taken up as they were.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Desk

pytestmark = [pytest.mark.timeout(300)]
EARLIER = Path(__file__).parent / "earlier"
NAME, AGAIN = "dates-0001", "dates-0002"


@pytest.fixture
def kept(desk: Desk) -> Desk:
    """A desk with the earlier run."""
    restored(desk, NAME)
    return desk


def restored(desk: Desk, name: str) -> Path:
    """The run's folder under this name, without the empty folders that it had, as a copy leaves it."""
    run = desk.root / "runs" / name
    shutil.copytree(EARLIER / NAME, run)
    return run


def stopped_at_4(desk: Desk) -> Path:
    """The same run under another name, as it stood after its first checkpoint."""
    run = restored(desk, AGAIN)
    shutil.rmtree(run / "checkpoints" / "checkpoint-8")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    end = next(place for place, event in enumerate(events) if event.get("step", 0) > 4)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:end]))
    state = json.loads((run / "run.json").read_text("utf-8"))
    (run / "run.json").write_text(json.dumps({**state, "id": AGAIN, "state": "stopped"}))
    return run


def said(desk: Desk, *words: str) -> Any:
    done = desk.workbench(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    return {event["step"]: event["loss"] for event in events if event["kind"] == "metrics" and "loss" in event}


def test_its_config_has_no_finding_and_its_folder_is_shown_as_it_ended(kept: Desk) -> None:
    assert not [
        each for each in said(kept, "check", f"runs/{NAME}/config.yaml")["findings"] if each["severity"] != "hint"
    ]
    (listed,) = said(kept, "runs")
    assert (listed["id"], listed["state"]) == (NAME, "finished")
    seen = said(kept, "watch", NAME)
    assert (seen["state"], seen["step"], seen["max_steps"]) == ("finished", 8, 8)


def test_it_goes_on_from_its_checkpoint_as_it_went_on_then_and_compares_with_what_came_of_it(kept: Desk) -> None:
    run = stopped_at_4(kept)
    done = kept.workbench("resume", AGAIN)
    assert done.returncode == 0, done.stderr
    started = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    assert [event["resumed_from_step"] for event in started if event["kind"] == "started"] == [None, 4]
    then, now = losses(kept.root / "runs" / NAME), losses(run)
    assert sorted(now) == list(range(1, 9))
    assert now == pytest.approx(then, rel=1e-5)
    beside = said(kept, "compare", NAME, AGAIN)
    assert beside["settings"] == []
