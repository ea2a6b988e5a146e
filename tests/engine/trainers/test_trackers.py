"""Trackers beside the events: they get the run's own curves, write below the run, and training does not change by them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.config.facts import Facts
from engine.config.files import absolute, overrides
from engine.config.recipes import recipe_mapping
from engine.rules import read
from engine.run import launch
from engine.run.from_config import launch_config, secrets_of
from engine.run.index import open_view
from engine.run.spawn import WANDB_KEY
from engine.run.store import RunFolder
from engine.run.view import RunView

KEY = "0123456789abcdef" * 2 + "01234567"


def started(runs: Path, *pairs: str) -> RunFolder:
    settings = ["optim.max_steps=4", "optim.per_device_train_batch_size=4", "run.save_steps=4", "run.prompts=[]"]
    mapping = overrides(absolute(recipe_mapping("demo"), runs.parent), [*settings, *pairs])
    for name in ("prompts", "prompts_steps", "max_new_tokens"):
        mapping["run"].pop(name)
    mapping["data"].pop("eval")
    mapping["data"]["train"][0]["rows"] = 64
    mapping["optim"].pop("per_device_eval_batch_size")
    reading = read(mapping, Facts())
    assert reading.ok, reading.findings
    return launch_config(reading.config, Facts(), runs_dir=runs)


def ended(run: RunFolder) -> RunView:
    give_up = time.monotonic() + 240
    with open_view(run) as watch:
        while not watch.view.over and time.monotonic() < give_up:
            watch.poll()
            time.sleep(0.05)
        launch.settle(run)
        return watch.view.copy()


def test_trackers_get_the_curves_of_the_run_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(WANDB_KEY, raising=False)
    (tmp_path / "home").mkdir()
    alone = ended(started(tmp_path / "runs", "run.name=alone"))
    run = started(tmp_path / "runs", "run.name=tracked", "run.report_to=[tensorboard, wandb]")
    view = ended(run)
    assert view.state == "finished", view.cause
    assert view.series["loss"] == alone.series["loss"]
    found = EventAccumulator(str(run.path / "trackers" / "tensorboard")).Reload()
    curve = [(point.step, point.value) for point in found.Scalars("train/loss")]
    steps, low, _ = view.series["loss"].points()
    assert curve == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in zip(steps, low, strict=True)]
    (offline,) = (run.path / "trackers" / "wandb").glob("offline-run-*")
    (journal,) = offline.glob("run-*.wandb")
    assert b"train/loss" in journal.read_bytes()
    told = {entry["requested"]: entry["detail"] for entry in view.receipt if "tracker" in entry["feature"]}
    assert "trackers/tensorboard" in told["tensorboard"]
    assert told["wandb"].startswith("offline, in ")
    assert not (Path.cwd() / "wandb").exists()
    assert not list((tmp_path / "home").rglob("*wandb*.log"))
    assert [entry for entry in alone.receipt if "tracker" in entry["feature"]] == []
    assert not (run.path.parent / "alone-0001" / "trackers").exists()


def test_a_trackers_key_reaches_the_run_that_asks_for_it_alone() -> None:
    mapping = recipe_mapping("demo")
    assert WANDB_KEY not in secrets_of(read(mapping, Facts()).config, Facts())
    mapping["run"]["report_to"] = ["wandb"]
    assert secrets_of(read(mapping, Facts()).config, Facts()) == [WANDB_KEY]
