"""What the notebook's form finds out on the side, and what it forgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.draft import Draft
from engine.config.facts import DataFacts
from engine.config.schema import fields
from widgets import learning


class Silent:
    """Takes every question and answers none."""

    def __init__(self) -> None:
        self.cancelled = 0

    def ask(self, do: str, **params: Any) -> Any:
        return SimpleNamespace(done=False, cancel=self._cancel)

    def _cancel(self) -> None:
        self.cancelled += 1


def test_what_was_counted_of_other_rows_is_forgotten_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "QUIET_SECONDS", -1.0)
    monkeypatch.chdir(tmp_path)
    draft, silent = Draft.new("demo"), Silent()
    learner: Any = learning.Learner(draft, silent)  # type: ignore[arg-type]
    try:
        learner.refresh()
        for look in learner._looks.values():
            look.result(20)
        learner.refresh()
        assert learner.words == "counting tokens"
        draft.learn(replace(draft.facts, data=DataFacts(rows=24_000, exact=True)))
        draft.set(fields.data.max_length.path, 64)
        learner.refresh()
        assert draft.facts.data is not None, "the same rows: their old counts stand until the new ones are there"
        draft.set(fields.data.train.path, [{"path": "mine.jsonl"}])
        learner.refresh()
        assert draft.facts.data is None
        assert learner.words == ""
        assert silent.cancelled == 2
    finally:
        learner.close()


def test_a_pair_in_the_preview_says_how_long_its_longest_side_is() -> None:
    from widgets.preview import _row

    parts = {name: [{"id": 1, "text": name, "trained": False}] for name in ("prompt", "chosen", "rejected")}
    told = _row({"index": 0, "parts": parts, "length": 2}, 1)
    assert told["words"].startswith("3 tokens (longest side 2), 0 trained")
    assert _row({"index": 0, "parts": {"input": parts["prompt"]}, "length": 1}, 1)["words"].startswith("1 tokens, ")
