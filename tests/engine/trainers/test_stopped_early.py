"""A run that is asked to stop before its first step stops there and then, and goes on later as if it had never been asked."""

from __future__ import annotations

import signal

import pytest

from engine.features import load
from engine.features.auto_compose import apply as auto_compose
from engine.run import control
from tests.engine.trainers.conftest import CONVERSATIONS, heard_by, lines, resumed_from


def settings(source, **more):
    return {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4, "run.save_steps": 2, **more}


def ends(run, segment=None):
    return [(end["step"], end["by"]) for end in lines(run, "stopped", segment)]


@pytest.mark.parametrize(
    ("asked", "code", "by"), [("stop", 0, "me"), ("save_stop", 0, "me"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_while_kernels_are_timed(train, source, monkeypatch, asked, code, by):
    passes, real, hear = [], auto_compose._pass, heard_by(monkeypatch)

    def then_asked(*args, **kwargs):
        seconds = real(*args, **kwargs)
        passes.append(1)
        if len(passes) == 1:
            if isinstance(asked, str):
                control.request(hear.folder, asked, "me")
                hear()
            else:
                signal.raise_signal(asked)
        return seconds

    monkeypatch.setattr(auto_compose, "_pass", then_asked)
    given = settings(source, **{"kernels.kernel_auto_compose": True, "kernels.torch_compile": False})
    run = train(given, code=code)
    assert (len(passes), ends(run), lines(run, "started")) == (1, [(0, by)], [])
    (answer,) = lines(run, "control")
    assert (answer["do"], answer["status"]) == (asked if isinstance(asked, str) else "save_stop", "done")
    assert "before the first step" in answer["message"]
    assert list(run.control.iterdir()) == []


def test_on_the_way_to_a_checkpoints_next_step(train, source, monkeypatch, tmp_path):
    whole = train(settings(source, **{"run.logging_steps": 1}))
    copy = resumed_from(whole, 2, tmp_path / "copy")
    with monkeypatch.context() as slowly:
        real = load.load_pretrained
        hear = heard_by(slowly)
        slowly.setattr(load, "load_pretrained", lambda *given: (hear(), real(*given))[1])
        control.request(copy, "stop", "me")
        train(folder=copy)
    assert ends(copy, 1) == [(2, "me")]
    assert [path.name for path in copy.checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    train(folder=copy)
    segments = (whole, 0), (copy, 2)
    one, other = (
        {line["step"]: line["loss"] for line in lines(run, "metrics", segment) if "loss" in line}
        for run, segment in segments
    )
    assert sorted(other) == [3, 4]
    assert other == {step: one[step] for step in other}
