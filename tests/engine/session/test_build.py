"""A build session without a screen: what an edit changes, what typing costs in undo, where a run would go."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import DataFacts
from engine.config.tree import fields
from engine.errors import WorkbenchError
from engine.planning.estimate import Estimate
from engine.session.build import BuildSession, step_statuses
from engine.session.consequences import consequences
from engine.session.draft import Draft

RATE, BATCH = fields.optim.learning_rate.path, fields.optim.per_device_train_batch_size.path


def nobody(do: str, **params: Any) -> Any:
    raise AssertionError("nothing is to be asked here")


@pytest.fixture
def session() -> Any:
    found = BuildSession(Draft.new("demo"), nobody)
    yield found
    found.close()


def test_what_is_typed_in_one_place_is_one_step_of_undo_though_facts_arrive_between(session: BuildSession) -> None:
    draft = session.draft
    before = draft.text()
    for typed in ("0", "0.0", "0.001"):
        session.edit(lambda typed=typed: draft.set(RATE, typed), typing=RATE)
        draft.learn(replace(draft.facts, data=DataFacts(rows=len(typed))))
    assert draft.value(RATE) == 0.001
    session.edit(draft.undo)
    for typed in ("1", "12", "128"):
        session.edit(lambda typed=typed: draft.set(BATCH, typed), typing=BATCH)
    told = {each.name: each.change for each in session.consequences}
    assert told["effective_batch"] == "+64", "from what stood there before it was typed"
    session.edit(draft.undo)
    assert draft.text() == before


def test_the_change_of_an_edit_stays_until_the_next_one_and_is_not_that_of_a_fact(session: BuildSession) -> None:
    def changes() -> dict[str, str]:
        return {each.label: each.change for each in session.consequences if each.change}

    assert changes() == {}
    session.edit(lambda: session.draft.set(BATCH, 128))
    assert changes()["effective batch"] == "+64"
    session.draft.learn(replace(session.draft.facts, data=DataFacts(rows=6000, tokens=70_000, exact=True)))
    assert changes()["effective batch"] == "+64"
    assert "tokens per epoch" in {each.label for each in session.consequences}
    assert "tokens per epoch" not in changes()
    session.edit(lambda: session.draft.set(RATE, 0.002))
    assert changes() == {}


def test_a_run_goes_where_the_file_says_seen_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "my.yaml").write_text("version: 1\nmodel: {name: builtin/tiny}\nrun: {output_dir: mine}\n")
    monkeypatch.chdir(tmp_path)
    assert BuildSession(Draft.open(home / "my.yaml"), nobody).runs_dir == home / "mine"
    assert BuildSession(Draft.open(home / "my.yaml"), nobody, runs="said").runs_dir == Path("said").absolute()


def test_a_ready_config_takes_the_place_of_this_one_in_one_step_with_or_without_what_is_the_persons_own(
    session: BuildSession,
) -> None:
    assert not session.is_own
    session.draft.set(fields.model.name.path, "./mine")
    assert session.is_own
    session.begin_from("dpo", keep_own=True)
    assert (session.draft.config.method.kind, session.draft.config.model.name) == ("dpo", "./mine")
    session.begin_from("sft-lora")
    assert session.draft.config.model.name != "./mine"
    session.edit(session.draft.undo)
    assert session.draft.config.model.name == "./mine"


def test_a_config_with_an_error_is_no_start_and_its_step_says_so(session: BuildSession) -> None:
    assert {each.step for each in step_statuses(session.typed(RATE, "-1")) if each.errors} == {"method"}
    assert session.errors == 0, "what is typed is not kept"
    session.edit(lambda: session.draft.set("optim.warmup_steps", 10_000))
    (method,) = (each for each in step_statuses(session.typed(RATE, "-1")) if each.step == "method")
    assert (method.worst, method.errors, method.others) == ("error", 2, 0)
    session.edit(session.draft.undo)
    session.edit(lambda: session.draft.set(RATE, -1))
    with pytest.raises(WorkbenchError, match="learning_rate"):
        session.launch()


def test_what_threads_find_waits_for_the_owner_and_training_counts_where_both_splits_name_one_source() -> None:
    woken: list[str] = []
    session = BuildSession(Draft.new("demo"), nobody, wake=lambda: woken.append(threading.current_thread().name))
    try:
        session.facts.refresh(ask=False)
        end = time.monotonic() + 30
        while len(woken) < 2:
            assert time.monotonic() < end, "nobody was woken"
            time.sleep(0.02)
        assert session.draft.facts.sources is None
        session.facts.refresh(ask=False)
        sources = session.draft.facts.sources
        assert sources is not None
        assert sources["builtin/dates"].rows == 24_000
    finally:
        session.close()


def test_undo_and_redo_say_whether_there_was_anything(session: BuildSession) -> None:
    assert (session.undo(), session.redo()) == (False, False)
    session.edit(lambda: session.draft.set(RATE, "3e-4"))
    assert (session.undo(), session.undo(), session.draft.value(RATE)) == (True, False, 0.004)
    assert (session.redo(), session.redo(), session.draft.value(RATE)) == (True, False, 3e-4)


def test_a_text_is_read_once_for_each_state_of_the_draft(session: BuildSession) -> None:
    first = session.typed(RATE, "fast")
    assert any(each.path == RATE and each.severity == "error" for each in first)
    assert session.typed(RATE, "fast") is first
    assert not any(each.path == RATE for each in session.typed(RATE, "3e-4"))
    session.edit(lambda: session.draft.set("optim.num_train_epochs", -1))
    again = session.typed(RATE, "fast")
    assert {each.path for each in again} - {each.path for each in first} == {"optim.num_train_epochs"}
    assert session.draft.value(RATE) == 0.004


def test_more_memory_and_more_than_there_is_are_told_as_worse_and_over() -> None:
    before = Estimate(steps=5, memory_total=4 * 2**30, seconds_left=10.0, device_bytes=8 * 2**30)
    now = replace(before, steps=6, memory_total=9 * 2**30, seconds_left=9.0)
    found = {each.name: (each.change, each.worse, each.over) for each in consequences(now, before)}
    assert found == {
        "steps": ("+1", False, False),
        "memory_total": ("+5.0 GiB", True, True),
        "seconds_left": ("−1.0 s", False, False),
    }
    assert consequences(before, None)[1].over is False
