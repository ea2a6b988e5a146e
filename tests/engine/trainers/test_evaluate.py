"""A checkpoint measured afterwards has the numbers that its trainer measured, in any method; bad input is one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import RunBusy, UsageError, WorkbenchError
from engine.evaluate import _config as measures
from engine.evaluate import answer
from engine.run import checkpoint
from engine.run.evaluations import NOT_MEASURED, step_of
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_matrix import settings as of_method

KINDS = [
    pytest.param("sft", "lora", {"optim.bf16_full_eval": True}, id="sft"),
    pytest.param("dpo", "lora", {}, id="dpo"),
    # The loss weighs by what there is to train on.
    pytest.param("kto", "none", {}, id="kto", marks=pytest.mark.slow),
    # A value head beside the model, and answers that are sampled.
    pytest.param("ppo", "none", {"method.reward_funcs": ["regex:[aeiou]"]}, id="ppo"),
    pytest.param("reward", "lora", {}, id="reward", marks=pytest.mark.slow),
    pytest.param("embedding", "none", {}, id="embedding", marks=pytest.mark.slow),
]


def measured(run, step, **more):
    return answer({"run": str(run.path), "step": step, "base": False, "data": None, **more}, lambda **_: None, _quiet)


def _quiet(what, done, total):
    pass


def logged(run, step):
    (event,) = [event for event in lines(run, "metrics") if "eval_loss" in event and event["step"] == step]
    return {
        name: value for name, value in event.items() if name.startswith("eval_") and not name.endswith(NOT_MEASURED)
    }


@pytest.mark.parametrize(("method", "adapter", "more"), KINDS)
def test_the_numbers_are_those_of_the_trainer_at_that_checkpoint(train, source, method, adapter, more):
    wanted = {**of_method(source, method, adapter), "data.val_set_size": 8, "optim.learning_rate": 3e-3, **more}
    run = train({**wanted, "run.eval_steps": 1, "run.save_steps": 1, "optim.max_steps": 2})
    before = sorted(path.name for path in run.path.rglob("*"))
    for step in (1, 2):
        assert measured(run, step)["metrics"] == logged(run, step)
    assert logged(run, 1) != logged(run, 2)
    assert sorted(path.name for path in run.path.rglob("*")) == before


def test_the_base_is_the_model_before_training_and_other_rows_are_measured_on_request(train, source):
    rows = source(CONVERSATIONS)
    settings = {"data.train": [{"path": rows}], "data.val_set_size": 8, "run.eval_steps": 4, "optim.max_steps": 4}
    settings["adapter.kind"] = "lora"
    run = train(settings)
    shutil.copytree(run.path, twin := run.path.with_name("untouched-0001"))
    found = measured(run, 4, base=True)
    assert found["metrics"] == logged(run, 4)
    assert found["metrics"]["eval_loss"] < found["base"]["eval_loss"]
    assert (found["rows"], found["data"]) == (8, "data.val_set_size")
    # A run that learns nothing ends where it began: its trainer measures the base.
    still = train({**settings, "optim.learning_rate": 1e-30})
    assert found["base"]["eval_loss"] == pytest.approx(logged(still, 4)["eval_loss"], rel=1e-6)
    other = source(CONVERSATIONS[:5])
    there = measured(run, 4, data=other)
    assert (there["rows"], there["data"]) == (5, other)
    assert there["metrics"] != found["metrics"]
    (generated,) = measures(run, "builtin/dates").data.eval
    assert (generated.path, generated.split) == ("builtin/dates", "eval"), "its days that no run trains on"
    # The same file with other rows held out would be another question.
    Path(rows).write_text(Path(rows).read_text().replace("What comes", "Tell me what comes"))
    with pytest.raises(WorkbenchError, match=r"held-out rows are others now.*data\.eval"):
        measured(run, 4)
    assert json.loads((twin / "run.json").read_text())["id"] == run.id


def test_bad_input_is_one_sentence(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 2}
    run = train(settings)
    with pytest.raises(WorkbenchError, match="held no rows out"):
        measured(run, 2)
    run.update_json(state="finished")
    assert step_of(run, None) == step_of(run, "2") == 2
    for wanted, words in (("3", "no whole checkpoint 3"), ("first", "a step or best"), ("best", "knows no best one")):
        with pytest.raises(UsageError, match=words) as refused:
            step_of(run, wanted)
        assert refused.value.hint == "Its whole ones: 2."
    weights = next(run.checkpoints.glob("checkpoint-2/*.safetensors"))
    weights.write_bytes(bytes(len(weights.read_bytes())))
    with pytest.raises(WorkbenchError, match=r"checkpoint-2 cannot be measured: it .* has changed since it was saved"):
        measured(run, 2)
    weights.unlink()
    with pytest.raises(WorkbenchError, match=r"none of its checkpoints is whole \(checkpoint-2: .* is missing\)"):
        step_of(run, None)
    shutil.rmtree(run.checkpoints / "checkpoint-2")
    with pytest.raises(WorkbenchError, match="it has no checkpoint"):
        step_of(run, None)
    assert not checkpoint.newest_valid(run)[0]


def test_a_run_at_work_is_not_disturbed(train, source, monkeypatch):
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1})
    run.update_json(state="running")
    monkeypatch.setattr("engine.run.launch.at_work", lambda run: True)
    monkeypatch.setattr("engine.run.launch.settle", lambda run: None)
    with pytest.raises(RunBusy, match="is still running"):
        step_of(run, None)
