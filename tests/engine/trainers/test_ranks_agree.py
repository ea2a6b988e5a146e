"""Two processes whose disks and clocks differ do the same: they end together, save together, and go on from the same place."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.run import checkpoint, control
from engine.run.store import RunFolder
from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.two_ranks import TwoRanks, run_folder


def slow_disk() -> None:
    """The first process takes a while until a checkpoint has its name."""
    commit = checkpoint.commit

    def late(*given: Any) -> Path:
        time.sleep(1)
        return commit(*given)

    checkpoint.commit = late


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with TwoRanks(own_cache(tmp_path_factory.mktemp("agree") / "cache"), f"{__name__}:slow_disk") as ranks:
        yield ranks


def run_of(folder: Path, **settings: Any) -> RunFolder:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CONVERSATIONS))
    plain = {"data.train": [{"path": str(source)}], "run.devices": 2, "optim.per_device_train_batch_size": 2}
    return run_folder(folder / "runs", {**plain, **settings})


def asked(run: RunFolder, do: str) -> threading.Thread:
    """Asks the run for this once it has begun."""

    def ask() -> None:
        while not run.events.exists() or not lines(run, "started"):
            time.sleep(0.05)
        control.request(run, do)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def test_all_processes_hear_that_a_person_stops_the_run(tmp_path: Path, two: TwoRanks) -> None:
    """One that did not would make the last checkpoint of a finished run, and wait for the others in it."""
    run = run_of(tmp_path, **{"optim.max_steps": 5000, "run.save_steps": 5000})
    asking = asked(run, "stop")
    two.train(run)
    asking.join()
    assert lines(run, "stopped")
    assert list(run.checkpoints.iterdir()) == []


def test_a_step_that_is_saved_already_is_saved_by_nobody(tmp_path: Path, two: TwoRanks) -> None:
    """The epoch ends at a step that has its checkpoint anyway: the first process says whether there is one, to which it may be
    giving its name at this moment."""
    run = run_of(tmp_path, **{"optim.max_steps": None, "optim.num_train_epochs": 400, "run.save_steps": 6})
    asking = asked(run, "end_of_epoch")
    two.train(run)
    asking.join()
    (end,) = lines(run, "stopped")
    assert end["step"] % 6 == 0, "an epoch is six steps, and each has a checkpoint at its end"
    assert checkpoint.is_valid(run.checkpoints / f"checkpoint-{end['step']}")
