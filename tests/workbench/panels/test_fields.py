"""Values as a form writes them: with the unit of one and of many, in few words."""

from __future__ import annotations

from engine.config.data import DataSource
from engine.config.tree import fields
from workbench.panels.fields import entry_text, format_value, unit_of, value_parts, when_empty


def test_one_of_a_unit_is_no_more_than_one() -> None:
    assert {spec.unit for spec in fields if spec.unit.endswith("ches")} <= {"batches"}
    for spec in fields:
        if spec.unit.endswith("s") and spec.unit not in ("times",):
            one = unit_of(spec, 1)
            assert unit_of(spec, 2) == spec.unit
            assert one + ("es" if spec.unit.endswith("ches") else "s") == spec.unit
    assert unit_of(fields.run.save_steps, 1) == "step"


def test_values_are_short_and_whole() -> None:
    length, seed = fields.data.max_length, fields.run.seed
    assert [format_value(length, value) for value in (512, 10_000, None, True)] == ["512", "10,000", "none", "yes"]
    assert format_value(seed, 123_456) == "123456", "no number of things"
    assert format_value(fields.optim.learning_rate, 2e-05) == "2e-05"
    parts = fields.kernels.liger_kernel_config
    assert format_value(parts, {"rope": False, "geglu": True}) == "rope: false, geglu: true", (
        "as it is typed and stands in the file"
    )
    assert format_value(fields.run.report_to, ["wandb", "tensorboard"]) == "wandb, tensorboard"
    assert format_value(fields.run.prompts, ["Who?", "When?"]) == "Who? +1"


def test_a_source_is_told_by_what_is_unusual_in_it() -> None:
    source = DataSource(path="rows.jsonl", format="messages", rows=20, weight=2.0)
    assert entry_text(source) == entry_text(source.model_dump()) == "rows.jsonl (messages, weight 2.0, rows 20)"


def test_what_is_left_empty_says_what_that_means() -> None:
    words = {spec.path: when_empty(spec) for spec in fields if "Empty means" in spec.help}
    assert words["optim.max_steps"] == "the epochs decide"
    assert words["run.name"] == "the file's name"
    assert words["model.revision"] == "its main branch"
    assert len(words) > 10
    assert all(0 < len(text) <= 40 for text in words.values()), words
    assert value_parts(fields.optim.max_steps, None, None, False) == (("the epochs decide", "faint"),)
    assert when_empty(fields.run.notify) == "none"
