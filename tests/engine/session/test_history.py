"""Steps back and forth through the states of a config, each with its text."""

from __future__ import annotations

import pytest

from engine.session import history as module
from engine.session.history import DraftHistory

TEXT = "# mine\nversion: 1\nrun:\n  seed: 1  # of the dice\n"
SAYS = {"version": 1, "run": {"seed": 1}}
OTHER = {"version": 1, "run": {"seed": 2}}


def test_a_step_back_and_forth_gives_the_very_texts_and_a_new_one_forgets_what_was_undone() -> None:
    history = DraftHistory(TEXT, SAYS, saved=True)
    assert [history.can_undo, history.can_redo, history.undo(), history.redo(), history.dirty] == [False] * 5
    assert history.change(OTHER)
    changed = history.text()
    assert changed == TEXT.replace("seed: 1", "seed: 2")
    assert history.undo()
    assert history.text() == TEXT
    assert history.redo()
    assert history.text() == changed
    assert history.undo()
    assert history.replace("version: 1\n", {"version": 1})
    assert not history.redo()
    assert history.text() == "version: 1\n"


def test_what_changes_nothing_is_no_step() -> None:
    history = DraftHistory(TEXT, SAYS, saved=False)
    assert not history.change(history.now.mapping)
    assert not history.replace(TEXT, dict(SAYS))
    assert not history.can_undo


def test_a_state_that_reads_as_the_saved_one_is_not_dirty() -> None:
    history = DraftHistory(TEXT, SAYS, saved=True)
    history.change(OTHER)
    assert history.dirty
    history.save()
    assert not history.dirty
    history.undo()
    assert history.dirty
    history.change(OTHER)
    assert not history.dirty


def test_who_asks_at_each_draw_whether_it_is_saved_has_each_text_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    rewrite = module.rewrite
    monkeypatch.setattr(module, "rewrite", lambda *args: made.append("") or rewrite(*args))
    history = DraftHistory(TEXT, SAYS, saved=True)
    history.change(OTHER)
    history.save()
    history.change({"version": 1, "run": {"seed": 3}})
    assert all(history.dirty for _ in range(5))
    assert len(made) == 2
