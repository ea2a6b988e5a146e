"""Trackers beside the events: they get the run's own curves, write below the run, and training does not change by them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import Facts
from engine.config.files import absolute, overrides
from engine.config.recipes import recipe_mapping
from engine.rules import read
from engine.run import launch
from engine.run.from_config import launch_config, secrets_of
from engine.run.index import open_view
from engine.run.spawn import COMET_KEY, MLFLOW_LOGIN, WANDB_KEY
from engine.run.store import RunFolder
from engine.run.view import RunView
from tests.prestarted.prestarted import COLD

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


MLFLOW = """
import json, os
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

__version__ = "3.0.0"
utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=250, MAX_PARAMS_TAGS_PER_BATCH=100))
run, uri = None, None


def note(**what):
    folder = Path(urlsplit(uri).path)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "calls.jsonl", "a") as file:
        file.write(json.dumps(what, default=str) + chr(10))


def is_tracking_uri_set():
    return uri is not None


def set_tracking_uri(value):
    global uri
    uri = value


def active_run():
    return run


def set_experiment(name):
    note(experiment=name)


def start_run(run_name, nested):
    global run
    run = SimpleNamespace(info=SimpleNamespace(run_id="1"))
    note(run=run_name)


def log_params(params, synchronous=True):
    note(params=params)


def log_metrics(metrics, step, synchronous=True):
    note(step=step, **metrics)


def end_run():
    global run
    run = None
    note(ended=True)
"""
TRACKIO = """
import json, os
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.43.0"
context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))


class Config(dict):
    def update(self, values, allow_val_change=False):
        super().update(values)


config = Config()


def note(**what):
    folder = Path(os.environ["TRACKIO_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "calls.jsonl", "a") as file:
        file.write(json.dumps(what, default=str) + chr(10))


def init(**how):
    note(space=os.environ.get("TRACKIO_SPACE_ID"), **how)


def log(metrics):
    note(**metrics)


def finish():
    note(ended=True)
"""
COMET = """
import json, os
from pathlib import Path
from types import SimpleNamespace

at_import = {name: value for name, value in os.environ.items() if name.startswith("COMET_")}
ExperimentConfig = SimpleNamespace


class Experiment:
    def note(self, **what):
        folder = Path(os.environ["COMET_OFFLINE_DIRECTORY"])
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "calls.jsonl", "a") as file:
            file.write(json.dumps(what, default=str) + chr(10))

    def __internal_api__set_model_graph__(self, model, framework):
        pass

    def __internal_api__log_parameters__(self, params, framework, source, flatten_nested):
        pass

    def __internal_api__log_metrics__(self, metrics, step, epoch, framework):
        self.note(step=step, **metrics)


def start(online, mode, experiment_config):
    experiment = Experiment()
    experiment.note(name=experiment_config.name, online=os.environ.get("COMET_START_ONLINE"), at_import=at_import)
    return experiment
"""
COMET_CONFIG = "def get_config(name): return None\n"


def test_trackers_get_the_curves_below_the_run_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules with the calls that transformers' callbacks make stand for the packages, which are not installed here."""
    packages = tmp_path / "packages"
    for name, text in (("mlflow", MLFLOW), ("trackio", TRACKIO), ("comet_ml", COMET)):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(text)
    (packages / "comet_ml" / "config.py").write_text(COMET_CONFIG)
    (packages / "comet_ml" / "__init__.py").write_text(COMET + "from comet_ml import config\n")
    (packages / "comet_ml-3.58.8.dist-info").mkdir()
    (packages / "comet_ml-3.58.8.dist-info" / "METADATA").write_text("Name: comet_ml\nVersion: 3.58.8\n")
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/else")
    monkeypatch.setenv(COLD, "1")  # transformers looks for Comet as it is imported
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_DIR", COMET_KEY):
        monkeypatch.delenv(name, raising=False)
    run = started(tmp_path / "runs", "run.name=tracked", "run.report_to=[mlflow, trackio, comet]")
    view = ended(run)
    assert view.state == "finished", view.cause

    def calls(tracker: str) -> list[dict[str, Any]]:
        text = (run.path / "trackers" / tracker / "calls.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    steps, low, _ = view.series["loss"].points()
    curve = [(step, pytest.approx(loss, rel=1e-6)) for step, loss in zip(steps, low, strict=True)]
    told = calls("mlflow")
    assert [(call["step"], call["loss"]) for call in told if "loss" in call] == curve
    assert told[:2] == [{"experiment": "workbench"}, {"run": "tracked-0001"}]
    assert told[-1] == {"ended": True}
    told = calls("trackio")
    assert [(call["train/global_step"], call["train/loss"]) for call in told if "train/loss" in call] == curve
    assert (told[0]["project"], told[0]["name"], told[0]["space_id"], told[0]["space"]) == (
        "workbench", "tracked-0001", None, None,
    )  # fmt: skip
    assert told[-1] == {"ended": True}
    told = calls("comet")
    assert [(call["step"], call["train/loss"]) for call in told if "train/loss" in call] == curve
    assert (told[0]["name"], told[0]["online"]) == ("tracked-0001", "0")
    # What it would take by itself is off before it is imported.
    quiet = told[0]["at_import"]
    assert (quiet["COMET_DISABLE_AUTO_LOGGING"], quiet["COMET_AUTO_LOG_OUTPUT_LOGGER"]) == ("1", "")
    assert {quiet[f"COMET_AUTO_LOG_{what}"] for what in ("CODE", "GIT_PATCH", "ENV_HOST")} == {"false"}
    receipt = {entry["requested"]: entry["detail"] for entry in view.receipt if "tracker" in entry["feature"]}
    assert all(f"trackers/{name}" in receipt[name] for name in ("mlflow", "trackio", "comet"))


def test_a_trackers_key_reaches_the_run_that_asks_for_it_alone() -> None:
    mapping = recipe_mapping("demo")
    assert WANDB_KEY not in secrets_of(read(mapping, Facts()).config, Facts())
    mapping["run"]["report_to"] = ["wandb"]
    assert secrets_of(read(mapping, Facts()).config, Facts()) == [WANDB_KEY]
    mapping["run"]["report_to"] = ["mlflow", "trackio"]
    assert secrets_of(read(mapping, Facts()).config, Facts()) == list(MLFLOW_LOGIN)
    mapping["run"]["report_to"] = ["comet"]
    assert secrets_of(read(mapping, Facts()).config, Facts()) == [COMET_KEY]
