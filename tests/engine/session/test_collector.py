"""What is found out beside a draft, and what is forgotten."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config.facts import DataFacts
from engine.config.tree import fields
from engine.session import collector
from engine.session.draft import Draft


class Silent:
    """Takes every question and answers none."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.progress: Any = None
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, do: str, **params: Any) -> Any:
        self.asked.append((do, params.get("config", {})))
        self.progress = params.get("on_progress")
        return SimpleNamespace(done=False, cancel=self._cancel, add_done_callback=lambda done: None)

    def _cancel(self) -> None:
        self.cancelled += 1


def test_what_was_counted_of_other_rows_is_forgotten_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "QUIET_SECONDS", -1.0)
    monkeypatch.chdir(tmp_path)
    draft, silent = Draft.new("demo"), Silent()
    facts: Any = collector.FactsCollector(draft, silent.ask)
    try:
        facts.refresh()
        for look in facts._looking.values():
            look.result(20)
        facts.refresh()
        assert facts.asking == "counting tokens …"
        draft.learn(replace(draft.facts, data=DataFacts(rows=24_000, exact=True)))
        draft.set(fields.data.max_length.path, 64)
        facts.refresh()
        assert draft.facts.data is not None, "the same rows: their old counts stand until the new ones are there"
        draft.set(fields.data.train.path, [{"path": "mine.jsonl"}])
        facts.refresh()
        assert draft.facts.data is None
        assert facts.asking == ""
        assert silent.cancelled == 3
    finally:
        facts.close()


def test_rows_are_prepared_again_for_another_seed_so_that_a_launch_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "QUIET_SECONDS", -1.0)
    monkeypatch.chdir(tmp_path)
    draft, silent = Draft.new("demo"), Silent()
    facts: Any = collector.FactsCollector(draft, silent.ask)
    try:
        facts.refresh()
        for look in facts._looking.values():
            look.result(20)
        facts.refresh()
        draft.set(fields.run.seed.path, 7)
        facts.refresh()
        for look in facts._looking.values():
            look.result(20)
        facts.refresh()
        counts = [config for do, config in silent.asked if do == "data"]
        assert [config.get("run", {}).get("seed") for config in counts] == [None, 7]
        assert silent.cancelled == 1, "the question about rows that nobody will train on is given up"
    finally:
        facts.close()


def test_a_model_is_looked_at_again_for_another_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "QUIET_SECONDS", -1.0)
    monkeypatch.chdir(tmp_path)
    draft = Draft.new("demo")
    facts: Any = collector.FactsCollector(draft, Silent().ask)
    looked: list[str] = []
    monkeypatch.setattr(facts, "_submit", lambda what, find: looked.append(what))
    try:
        facts.refresh()
        assert looked == ["model", "sources"]
        for path, value in ((fields.optim.max_steps.path, 7), (fields.model.revision.path, "0" * 40)):
            looked.clear()
            draft.set(path, value)
            facts.refresh()
        assert looked == ["model"]
    finally:
        facts.close()


def test_an_adapter_is_looked_at_when_it_is_named_and_its_rank_stands_in_the_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "QUIET_SECONDS", -1.0)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "before"
    folder.mkdir()
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    save_file({"layers.0.q_proj.lora_A.weight": torch.zeros(4, 64)}, folder / "adapter_model.safetensors")
    draft, silent = Draft.new("demo"), Silent()
    facts: Any = collector.FactsCollector(draft, silent.ask)

    def looked() -> None:
        facts.refresh()
        for look in facts._looking.values():
            look.result(20)
        facts.refresh()

    try:
        draft.set(fields.adapter.kind.path, "lora")
        looked()
        assert draft.config.adapter.r == 16
        draft.set(fields.adapter.path.path, "./before")
        looked()
        assert (draft.config.adapter.r, draft.config.adapter.lora_alpha) == (4, 12)
        draft.set(fields.adapter.r.path, 8)
        assert any(finding.path == "adapter.r" for finding in draft.findings)
        draft.set(fields.adapter.path.path, "./gone")
        looked()
        assert any("is not there" in finding.message for finding in draft.findings)
    finally:
        facts.close()


def test_counting_is_stopped_until_an_edit_or_a_person_asks_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(collector, "QUIET_SECONDS", -1.0)
    monkeypatch.chdir(tmp_path)
    draft, silent = Draft.new("demo"), Silent()
    facts: Any = collector.FactsCollector(draft, silent.ask)

    def asked() -> int:
        facts.refresh()
        for look in facts._looking.values():
            look.result(20)
        facts.refresh()
        return sum(do == "data" for do, _ in silent.asked)

    try:
        assert not facts.stop_counting(), "nothing is counted yet"
        assert asked() == 1
        assert facts.counting
        assert facts.stop_counting()
        assert (silent.cancelled, facts.counting, facts.stopped) == (1, False, True)
        silent.progress({"stage": "tokenize", "done": 5, "total": 9})
        assert asked() == 1, "it stays stopped"
        assert facts.asking == "reading the tokenizer …", "progress that comes late is of nothing that goes on"
        facts.count_again()
        assert asked() == 2
        assert not facts.stopped
        facts.stop_counting()
        draft.set(fields.data.max_length.path, 77)
        assert asked() == 3, "other rows are counted by themselves"
        assert not facts.stopped
    finally:
        facts.close()
