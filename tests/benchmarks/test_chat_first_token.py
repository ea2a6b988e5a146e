"""The run that the benchmark of the chat makes without training is one that a chat takes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from engine.run import checkpoint
from engine.session.chat import who_answers


def test_what_it_makes_is_a_run_to_talk_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    run = importlib.import_module("chat_first_token").make(tmp_path, "tiny")
    tuned, base = who_answers([run])
    assert (tuned.checkpoint, base.checkpoint) == (2, None)
    assert checkpoint.newest_valid(run)[0] == run.checkpoints / "checkpoint-2"
