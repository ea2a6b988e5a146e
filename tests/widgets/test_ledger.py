"""A config of another tool in the notebook: its ledger is told, and one message makes it the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from widgets import Workbench

FOREIGN = "base_model: Qwen/Qwen3-8B\nsequence_len: 1024\nmicro_batch_size: 2\nlearning_rate: 1e-4\nrelora: true\n"


def ask(face: Any, do: str) -> dict[str, Any]:
    answer = face.answer({"id": "1", "do": do}).data
    assert answer["ok"], answer
    return dict(answer)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    place = tmp_path / "theirs.yml"
    place.write_text(FOREIGN)
    return place


def test_the_ledger_is_shown_and_taking_it_over_makes_a_new_config(foreign: Path) -> None:
    face = Workbench(str(foreign))
    told = ask(face, "ledger")
    assert told["there"]
    assert "1 not supported" in told["title"]
    rows = {row["text"]: row for group in told["groups"] for row in group["rows"]}
    assert rows["sequence_len: 1024 -> data.max_length: 1024"]["outcome"] == "mapped"
    assert "ReLoRA" in rows["relora: true"]["reason"]
    assert face.draft.value("model.name") is None
    assert ask(face, "take_over")["taken"]
    assert face.draft.value("model.name") == "Qwen/Qwen3-8B"
    assert face.draft.dirty
    assert face.draft.path is None
    face.draft.set("data.max_length", 512)
    assert ask(face, "take_over")["taken"]
    assert face.draft.value("data.max_length") == 512, "what was changed since is kept"
    assert foreign.read_text() == FOREIGN
    again = Workbench(str(foreign))
    assert again.draft is face.draft
    assert ask(again, "ledger")["taken"]
    again.close()


def test_a_config_of_ours_has_no_ledger(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    place.write_text("model:\n  name: builtin/tiny\n")
    face = Workbench(place)
    assert ask(face, "ledger") == {"there": False, "id": "1", "ok": True}
    assert face.draft.path == place
    face.close()
