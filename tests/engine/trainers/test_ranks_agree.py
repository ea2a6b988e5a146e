"""Two processes whose disks and clocks differ do the same: they end together, save together, and go on from the same place."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.data import prepare
from engine.run import checkpoint, control
from engine.run.process import host
from engine.run.store import RunFolder
from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from
from tests.engine.trainers.two_ranks import TwoRanks, run_folder

OTHER = "rows-elsewhere.jsonl"
"""The file that the second process reads in the place of `rows.jsonl`, where there is one beside it."""
UNSEEN = "tells-late"
"""The second process sees this run's newest checkpoint a second later than the first."""


def two_machines() -> None:
    """The first process takes a while until a checkpoint has its name; the second one has another disk, and a view of the run's
    folder that is late."""
    commit, prepare_rows, newest_first, problem_with = (
        checkpoint.commit,
        prepare.prepare,
        checkpoint.newest_first,
        checkpoint.problem_with,
    )

    def late(*given: Any) -> Path:
        time.sleep(1)
        return commit(*given)

    def elsewhere(config: Any, *given: Any) -> Any:
        source = config.data.train[0]
        if (other := Path(source.path).with_name(OTHER)).exists():
            source = source.model_copy(update={"path": str(other)})
            config = config.model_copy(update={"data": config.data.model_copy(update={"train": [source]})})
        return prepare_rows(config, *given)

    looked: dict[Path, float] = {}

    def is_late(path: Path) -> bool:
        if path.parent.parent.name != UNSEEN or path.name != "checkpoint-4":
            return False
        return time.monotonic() < looked.setdefault(path, time.monotonic()) + 1

    checkpoint.commit = late
    if os.environ.get("RANK") == "1":
        prepare.prepare = elsewhere
        checkpoint.newest_first = lambda run: [path for path in newest_first(run) if not is_late(path)]
        checkpoint.problem_with = lambda path, **more: "is not there" if is_late(path) else problem_with(path, **more)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with TwoRanks(own_cache(tmp_path_factory.mktemp("agree") / "cache"), f"{__name__}:two_machines") as ranks:
        yield ranks


def run_of(folder: Path, **settings: Any) -> RunFolder:
    source = folder / "rows.jsonl"
    if not source.exists():
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


def test_each_process_drops_out_other_numbers(tmp_path: Path, two: TwoRanks) -> None:
    """Of one row that both have they would take one process's step if they dropped out the same."""
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": CONVERSATIONS[0]}) + "\n") * 8)
    settings = {
        "adapter.kind": "lora",
        "adapter.lora_dropout": 0.5,
        "optim.max_steps": 1,
        "optim.gradient_accumulation_steps": 1,
    }
    norms = [
        lines(run, "metrics")[0]["grad_norm"]
        for run in (two.train(run_of(tmp_path, **settings)), two.train_alone(run_of(tmp_path, **settings)))
    ]
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)
    settings["adapter.lora_dropout"] = 0.0
    norms = [
        lines(run, "metrics")[0]["grad_norm"]
        for run in (two.train(run_of(tmp_path, **settings)), two.train_alone(run_of(tmp_path, **settings)))
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), "and without dropout it is one step"


def test_a_folder_that_tells_late_makes_no_process_go_on_from_another_step(tmp_path: Path, two: TwoRanks) -> None:
    """Over NFS a machine may see for a minute what a folder held before: the first process's word counts."""
    whole = two.train(run_of(tmp_path, **{"optim.max_steps": 6, "run.save_steps": 2}))
    late = tmp_path / "runs" / UNSEEN
    again = resumed_from(whole, 4, late)
    shutil.copytree(whole.checkpoints / "checkpoint-2", again.checkpoints / "checkpoint-2")
    two.train(again)
    assert lines(again, "started")[-1]["resumed_from_step"] == 4
    losses = [
        {event["step"]: event["loss"] for event in lines(run, "metrics") if "loss" in event} for run in (whole, again)
    ]
    assert losses[0] == losses[1]


def test_a_stream_goes_on_with_more_processes_and_with_fewer(tmp_path: Path, two: TwoRanks) -> None:
    """Its place is one in the rows of all, which each process knows."""
    settings = {
        "data.streaming": True,
        "optim.max_steps": 6,
        "run.save_steps": 3,
        "optim.gradient_accumulation_steps": 1,
    }
    alone = two.train_alone(run_of(tmp_path, **settings, **{"optim.per_device_train_batch_size": 4}))
    shared = two.train(run_of(tmp_path, **settings))

    def again(run: RunFolder, batch: int) -> RunFolder:
        copy = resumed_from(run, 3, tmp_path / "runs" / f"with-{batch}-each")
        before = 6 - batch
        told = copy.config.read_text().replace(f"train_batch_size: {before}", f"train_batch_size: {batch}")
        copy.config.write_text(told)
        return copy

    more = two.train(again(alone, 2))
    fewer = two.train_alone(again(shared, 4))
    losses = [
        [event["loss"] for event in lines(run, "metrics") if "loss" in event and event["step"] > 3]
        for run in (alone, shared, more, fewer)
    ]
    assert [len(each) for each in losses] == [3, 3, 3, 3]
    for each in losses[1:]:
        assert each == pytest.approx(losses[0], rel=1e-4)


def test_a_process_that_reads_other_rows_is_named_before_the_first_step(tmp_path: Path, two: TwoRanks) -> None:
    run = run_of(tmp_path, **{"optim.max_steps": 2})
    (tmp_path / OTHER).write_text("".join((tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)[:40]))
    with pytest.raises(AssertionError):
        two.train(run)
    (end,) = lines(run, "failed")
    assert f"data.train: rank 1 on {host()} has other rows than rank 0 on {host()}: 40 and 48." in end["message"]
    assert lines(run, "started") == []
