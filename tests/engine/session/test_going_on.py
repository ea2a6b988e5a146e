"""Which run a file's command goes on with, and which it leaves as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import DataFacts, Facts
from engine.config.files import dump
from engine.planning.auto import choices, resolved
from engine.rules import read
from engine.run import store
from engine.run.events import EventWriter
from engine.run.store import RunFolder
from engine.session import going_on

CONFIG = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "builtin/dates"}]}}


def run_of(root: Path, file: Path, **values: Any) -> RunFolder:
    config = resolved(read(CONFIG).config, Facts())
    run = store.create(root, dump(config), {"name": "my", "source": str(file), "host": "another", **values})
    run.update_json(**values)
    return run


@pytest.mark.parametrize(
    ("state", "final", "why"),
    [
        ("finished", {"kind": "finished"}, "is finished"),
        ("stopped", {"kind": "stopped", "by": "SIGTERM"}, ""),
        ("stopped", {"kind": "stopped", "by": "anna"}, "was stopped by anna"),
        ("failed", {"kind": "failed", "cause": "signal SIGKILL", "message": "The worker was ended by SIGKILL."}, ""),
        ("failed", {"kind": "failed", "cause": "diverged", "message": "The loss is nan."}, "has failed, and would again as it stands: The loss is nan"),
        ("lost", None, ""),
        ("lost", {"kind": "stopped", "by": "anna"}, ""),  # of an earlier start
        ("failed", None, ""),  # it did not begin
    ],
)  # fmt: skip
def test_what_a_person_or_the_run_itself_ended_stays(
    tmp_path: Path, state: str, final: dict[str, str] | None, why: str
) -> None:
    run = run_of(tmp_path, tmp_path / "my.yaml", state=state)
    with EventWriter(run) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=20, epochs=1)
        if final is not None:
            pen.write(**final)
    assert going_on.stays(run) == why


def test_the_newest_run_of_a_file_is_its_own_and_a_jobs_is_not(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    assert going_on.begun_by(tmp_path / "runs", file) is None
    run_of(tmp_path / "runs", file, created=5.0)
    newest = run_of(tmp_path / "runs", file, created=9.0)
    run_of(tmp_path / "runs", file, created=11.0, cluster="slurm")
    run_of(tmp_path / "runs", tmp_path / "other.yaml", created=12.0)
    found = going_on.begun_by(tmp_path / "runs", file)
    assert found is not None
    assert found.id == newest.id


def test_what_was_left_to_the_machine_is_no_difference_and_what_was_not_is(tmp_path: Path) -> None:
    run = run_of(tmp_path, tmp_path / "my.yaml")
    assert going_on.differences(run, read(CONFIG).config) == []
    other = read({**CONFIG, "run": {"seed": 7}}).config
    assert going_on.differences(run, other) == ["run.seed: 42 -> 7"]


def test_what_follows_from_another_setting_is_no_difference_and_what_is_left_to_the_machine_since_is_one(
    tmp_path: Path,
) -> None:
    """Held-out rows alone make a launch write a batch size that the file leaves out."""
    file = {
        **CONFIG,
        "data": {**CONFIG["data"], "val_set_size": 5},
        "optim": {"learning_rate": 1e-3},
        "memory": {"gradient_checkpointing": "full", "tiled_mlp": True},
        "run": {"saves_per_epoch": 2},
    }
    facts = Facts(data=DataFacts(rows=4000, longest=60))
    config = read(file).config
    run = store.create(tmp_path, dump(resolved(config, facts)), {"name": "my", "auto": choices(config, facts)})
    assert going_on.differences(run, config) == []
    assert going_on.differences(run, read({**file, "optim": {}}).config) == ["optim.learning_rate: 0.001 -> 'auto'"]
    every = read({**file, "memory": {"gradient_checkpointing": "selective", "tiled_mlp": True}}).config
    assert going_on.differences(run, every) == ["memory.gradient_checkpointing: True -> 'selective'"]
