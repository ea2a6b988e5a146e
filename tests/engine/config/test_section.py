"""Sections hold their settings: never changed in place, never shared, and pydantic reads the same from their annotations."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine.config.adapter import Lora
from engine.config.data import Data, DataSource
from engine.config.method import METHODS
from engine.config.schema import pydantic_model
from engine.config.tree import SECTIONS, RunConfig
from engine.rules import read

WRITTEN = {
    "method": {"kind": "dpo", "beta": 0.2},
    "adapter": {"kind": "lora", "r": 4},
    "data": {"train": [{"path": "rows.jsonl", "weight": 2}]},
}


def test_nothing_of_a_section_changes_in_place() -> None:
    section = Lora(r=8)
    with pytest.raises(AttributeError, match=r"Lora\.r never changes"):
        section.r = 16  # type: ignore[misc]  # what must not work
    with pytest.raises(AttributeError, match=r"Lora\.r never changes"):
        del section.r
    with pytest.raises(TypeError, match="Lora has no setting rank"):
        Lora.model_construct(rank=8)
    other = section.model_copy(update={"r": 16})
    assert (section.r, other.r, other.lora_alpha) == (8, 16, section.lora_alpha)


def test_a_default_that_could_be_changed_is_each_sections_own() -> None:
    one, other = DataSource(), DataSource()
    one.columns["prompt"] = "question"
    assert other.columns == {} == DataSource().columns
    RunConfig().data.train.append(one)
    assert RunConfig().data.train == []
    dumped = Data(train=[one]).model_dump()
    dumped["train"][0]["columns"]["answer"] = "reply"
    assert one.columns == {"prompt": "question"}


def test_sections_are_equal_by_what_they_hold() -> None:
    config = read(WRITTEN).config
    assert config == read(WRITTEN).config == copy.deepcopy(config)
    assert config != config.model_copy(update={"adapter": Lora(r=5)})
    assert METHODS["dpo"]() != METHODS["ipo"](), "another kind, also with the same settings"
    assert config.adapter.model_dump(exclude_defaults=True) == {"r": 4}


def test_pydantic_reads_from_the_annotations_what_is_read_here() -> None:
    theirs = pydantic_model(RunConfig).model_validate(WRITTEN)
    assert theirs.model_dump() == read(WRITTEN).config.model_dump()
    for models in SECTIONS.values():
        for model in models.values():
            assert pydantic_model(model)().model_dump() == model().model_dump()
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        pydantic_model(Lora).model_validate({"r": 0})


def test_every_mark_of_a_setting_is_one_that_is_read() -> None:
    """A bound of another library, such as pydantic's `Field`, would bind nothing."""
    owners = [*(model for models in SECTIONS.values() for model in models.values()), DataSource]
    settings = [setting for owner in owners for setting in owner.model_fields.values()]
    marks = [mark for setting in settings for mark in getattr(setting.annotation, "__metadata__", ())]
    marks = [mark if isinstance(mark, type) else type(mark) for mark in marks]
    assert len(marks) > 300
    assert {mark.__module__ for mark in marks} == {"engine.config.section"}


def test_what_starts_quickly_imports_no_pydantic() -> None:
    script = "import sys, engine.session.opening, engine.data.gather_facts; sys.exit(bool({'pydantic', 'annotated_types'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
