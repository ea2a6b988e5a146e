"""`run.push_to_hub` of a real run: it trains on while the hub hangs, waits for its last checkpoint, and says what arrived."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import Facts
from engine.config.files import absolute, as_yaml, overrides
from engine.config.recipes import recipe_mapping
from engine.errors import UsageError, WorkbenchError
from engine.rules import read
from engine.run import control, launch
from engine.run.ending import end_of, facts
from engine.run.from_config import launch_config, secrets_of
from engine.run.index import open_view
from engine.run.spawn import HUB_TOKENS
from engine.run.store import RunFolder
from engine.run.sweep import axes
from engine.run.view import RunView
from engine.session.resume import resume
from tests.hub_server import HANG, TOKEN, WHO, Hub, serving
from workbench.cli import sweep


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as server:
        for name, value in server.environment(tmp_path / "home", patience=60).items():
            monkeypatch.setenv(name, value)
        yield server


def config_of(folder: Path, *pairs: str) -> Any:
    settings = [
        "optim.max_steps=150", "optim.per_device_train_batch_size=2", "run.save_steps=50", "run.push_to_hub=true",
        f"run.hub_model_id={WHO}", *pairs,
    ]  # fmt: skip
    mapping = overrides(absolute(recipe_mapping("demo"), folder), settings)
    for name in ("prompts", "prompts_steps", "max_new_tokens"):
        mapping["run"].pop(name)
    mapping["data"].pop("eval")
    mapping["data"]["train"][0]["rows"] = 64
    mapping["optim"].pop("per_device_eval_batch_size")
    reading = read(mapping, Facts())
    assert reading.ok, reading.findings
    return reading.config


def started(tmp_path: Path, *pairs: str) -> RunFolder:
    return launch_config(config_of(tmp_path, *pairs), Facts(), runs_dir=tmp_path / "runs", name="pushed")


def followed(run: RunFolder, each: Callable[[RunView], object] = lambda view: None, segment: int = 0) -> RunView:
    end = time.monotonic() + 240
    with open_view(run) as watch:
        while not (watch.view.over and watch.view.segment >= segment) and time.monotonic() < end:
            watch.poll()
            each(watch.view)
            time.sleep(0.05)
        launch.settle(run)
        return watch.view.copy()


def sends_last(view: RunView) -> bool:
    return view.phase == f"Sending the last checkpoint to {WHO}"


def test_a_run_trains_on_while_the_hub_hangs_and_ends_with_its_last_checkpoint_there(hub: Hub, tmp_path: Path) -> None:
    hub.fails = [("/store/", HANG, 1), ("/commit/", HANG, 1)]
    run = started(tmp_path)
    view = followed(run, lambda view: sends_last(view) and view.progress and hub.released.set())
    assert view.state == "finished", (view.cause, view.findings)
    assert (view.step, view.committed) == (150, [100, 150])
    kinds = [
        (each["kind"], each.get("step"), each.get("state"))
        for each in map(json.loads, run.events.read_text().splitlines())
    ]
    begun, made = kinds.index(("upload", 50, "begun")), kinds.index(("metrics", 150, None))
    assert begun < made, "the first one hangs while steps are made"
    assert not [each for each in kinds[:made] if each[2] == "arrived"]
    assert kinds[-1][0] == "finished"
    assert view.uploads[-1]["state"] == "arrived"
    assert view.uploads[-1]["step"] == 150
    here = run.checkpoints / "checkpoint-150"
    weights = "adapter_model.safetensors" if (here / "adapter_model.safetensors").exists() else "model.safetensors"
    assert hub.files[weights] == (here / weights).read_bytes()
    assert {"README.md", "tokenizer.json"} <= set(hub.files)
    assert not [name for name in hub.files if name.endswith((".pt", ".pth", "_state.json")) or "/" in name]
    assert hub.private is True
    (row,) = [entry for entry in view.receipt if entry["feature"] == "push to hub"]
    assert (row["requested"], row["effective"]) == ("every_save", "on")
    assert dict(end_of(view, run, run.id).facts)["hub"] == f"checkpoint-150 is at {view.uploads[-1]['url']}"
    assert not [path for path in run.path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_a_person_ends_the_wait_and_going_on_sends_what_had_not_arrived(hub: Hub, tmp_path: Path) -> None:
    hub.fails = [("/store/", HANG, 99)]
    run = started(tmp_path, "optim.max_steps=400", "run.save_steps=350")
    asked: list[str] = []

    def ask(view: RunView) -> None:
        if view.step and not asked:
            asked.append(control.request(run, "save_stop"))
        elif sends_last(view) and view.progress and len(asked) == 1:
            asked.append(control.request(run, "stop"))

    view = followed(run, ask)
    stopped = view.step
    assert (view.state, view.committed) == ("stopped", [stopped]), (view.cause, view.findings)
    assert "asked to wait no longer" in view.findings[-1]["message"]
    assert [view.controls[each]["status"] for each in asked] == ["done", "done"]
    said = dict(facts(view, run))["hub"]
    assert said.startswith(f"nothing has arrived; checkpoint-{stopped} has not arrived: `workbench push ")
    assert said.endswith(f" --checkpoint {stopped} --to {WHO}` sends it")
    assert hub.commits == []
    hub.fails = []
    hub.released.set()
    launch.resume(run)
    view = followed(run, segment=1)
    assert view.state == "finished", view.cause
    assert {each["step"] for each in view.uploads if each["state"] == "arrived"} >= {stopped, 400}


def test_a_run_that_goes_on_may_begin_to_push(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker gets the token that it did not need before."""
    run = started(tmp_path, "optim.max_steps=4", "run.save_steps=4", "run.push_to_hub=false", "run.hub_model_id=null")
    assert followed(run).state == "finished"
    wanted = {"optim.max_steps": 8, "run.push_to_hub": True, "run.hub_model_id": WHO}
    with monkeypatch.context() as without:
        without.setenv("HF_TOKEN", "")
        with pytest.raises(WorkbenchError, match="there is none"):
            resume(run, settings=wanted)
    resume(run, settings=wanted)
    view = followed(run, segment=1)
    assert (view.state, view.uploads[-1]["step"], view.uploads[-1]["state"]) == ("finished", 8, "arrived"), view.cause


def test_a_repository_that_takes_nothing_is_told_before_the_first_step(hub: Hub, tmp_path: Path) -> None:
    hub.fails = [("/api/repos/create", 403, 9)]
    view = followed(started(tmp_path))
    assert (view.state, view.step) == ("failed", 0)
    assert "run.push_to_hub: the hub refuses me/model" in view.cause
    assert "Take a token that may write for me" in view.cause


def test_no_token_is_told_before_there_is_a_run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WorkbenchError, match="HF_HUB_OFFLINE forbids"):
        launch_config(config, Facts(), runs_dir=tmp_path / "runs", name="pushed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "")
    assert set(HUB_TOKENS) <= set(secrets_of(config, Facts()))
    with pytest.raises(WorkbenchError, match="the hub asks for a token, and there is none"):
        launch_config(config, Facts(), runs_dir=tmp_path / "runs", name="pushed")
    assert not (tmp_path / "runs").exists()


def test_runs_of_a_sweep_do_not_write_over_each_others_model(hub: Hub, tmp_path: Path) -> None:
    mapping = {
        "version": 1,
        "model": {"name": "builtin/tiny"},
        "data": {"train": [{"path": "builtin/dates"}]},
        "optim": {"max_steps": 2},
        "run": {"save_steps": 1, "push_to_hub": True, "hub_model_id": WHO},
    }
    file = tmp_path / "my.yaml"
    file.write_text(as_yaml(mapping))
    with pytest.raises(UsageError, match="2 runs would write over each other's model in me/model"):
        sweep.start(file, axes(["optim.learning_rate=0.001,0.002"]), str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_shares_of_two_processes_arrive_as_one_model(hub: Hub, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings = [
        "adapter.kind=none",
        "run.devices=2",
        "distributed.strategy=fsdp2",
        "optim.max_steps=4",
        "run.save_steps=2",
    ]
    run = started(tmp_path, *settings)
    view = followed(run)
    assert view.state == "finished", (view.cause, view.findings)
    assert view.uploads[-1]["state"] == "arrived"
    assert not view.findings, "no rank takes another for hung or lost while the first one waits"
    for name, content in hub.files.items():
        (tmp_path / "fetched").mkdir(exist_ok=True)
        (tmp_path / "fetched" / name).write_bytes(content)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "fetched", output_loading_info=True)[1]
    assert not any(opened[which] for which in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not [name for name in hub.files if "/" in name or "optim" in name]
