"""An exported model that was edited afterwards is told from the one that was compared, here or where it was copied to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import WorkbenchError
from engine.export.__main__ import _config
from engine.export.folder import Model
from engine.export.making import make
from engine.export.places import source
from engine.export.record import RECORD, verify
from engine.run.store import RunFolder

Make = Callable[..., RunFolder]


@pytest.fixture
def exported(make_run: Make, tmp_path: Path) -> Path:
    """A folder and a Modelfile beside it, copied to another place."""
    model = Model(source(make_run(adapter={})), _config(next_run(tmp_path)))
    places = {"safetensors": str(tmp_path / "made/safetensors"), "modelfile": str(tmp_path / "made/Modelfile")}
    asked: dict[str, Any] = {"places": places, "quant": "F16"}
    for form, place in places.items():
        make(model, form, Path(place), asked, lambda *_: None)
    shutil.copytree(tmp_path / "made", tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def next_run(root: Path) -> RunFolder:
    return RunFolder(next((root / "runs").iterdir()))


def test_what_was_edited_lost_or_added_is_named(exported: Path) -> None:
    folder = exported / "safetensors"
    for artefact, form in ((folder, "safetensors"), (exported / "Modelfile", "modelfile")):
        found = verify(artefact)
        assert (found.changed, found.form, found.checkpoint) == ([], form, "checkpoint-3")
    (folder / "README.md").write_text("my own words")
    assert verify(folder).changed == []

    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text()[:-5])
    (folder / "tokenizer.json").unlink()
    (folder / "extra.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()  # transformers reads templates there
    assert verify(folder).changed == [
        "chat_template.jinja was changed, 5 bytes shorter",
        "model.safetensors was changed",
        "tokenizer.json is gone",
        "additional_chat_templates was added",
        "extra.json was added",
    ]
    (exported / "Modelfile").write_text("FROM scratch")
    assert verify(exported / "Modelfile").changed[0].startswith("Modelfile was changed, ")


def test_without_a_record_or_with_a_strange_one_it_is_a_sentence(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="is not there"):
        verify(tmp_path / "nothing")
    with pytest.raises(WorkbenchError, match=f"nothing is known of what was compared with it: {RECORD} is not there"):
        verify(tmp_path / "base")
    record = exported / "safetensors" / RECORD
    good = json.loads(record.read_text())
    strange = (
        "[]", "{", json.dumps({**good, "files": {}}), json.dumps({**good, "files": {"../x": {"size": 1, "sha256": "0"}}}),
        json.dumps({**good, "files": {"x": None}}), "[" * 100_000, " " * (1 << 22) + json.dumps(good),
        *(json.dumps({**good, "files": {name: {"size": 1, "sha256": "0"}}}) for name in ("", "..", "a\0b", "\ud800")),
        *(json.dumps({**good, "files": {"x": {"size": size, "sha256": "0"}}}) for size in (10**400, -1, True)),
        json.dumps({**good, "made": float("nan")}), json.dumps({**good, "made": 10**400}),
    )  # fmt: skip
    for text in strange:
        record.write_text(text)
        with pytest.raises(WorkbenchError, match="is no record of a comparison"):
            verify(exported / "safetensors")
    record.write_text(json.dumps(good))
    os.remove(exported / "safetensors/config.json")
    os.mkfifo(exported / "safetensors/config.json")
    assert verify(exported / "safetensors").changed == ["config.json cannot be read (no plain file)"]
    record.unlink()
    os.mkfifo(record)
    with pytest.raises(WorkbenchError, match="is no record of a comparison"):
        verify(exported / "safetensors")
