"""`3e-4`, `no` and `q_proj, v_proj` mean what a person means; what fits is what pydantic's own validator accepts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.config.coercion import Uncoerced, coerce, expectation, fit
from engine.config.data import DataSource
from engine.config.schema import pydantic_model
from engine.config.section import Section
from engine.config.tree import SECTIONS, FieldSpec, fields


@pytest.mark.parametrize(
    ("path", "written", "meant"),
    [
        ("optim.learning_rate", "3e-4", 3e-4),
        ("optim.learning_rate", "2e-5", 2e-5),
        ("optim.learning_rate", "AUTO", "auto"),
        ("optim.learning_rate", 1, 1.0),
        ("data.max_length", "2_048", 2048),
        ("data.max_length", "2e3", 2000),
        ("data.max_length", 512.0, 512),
        ("data.packing", "no", False),
        ("data.packing", "yes", True),
        ("data.packing", "on", True),
        ("data.packing", "off", False),
        ("data.packing", 1, True),
        ("model.quantization", "no", "none"),
        ("model.quantization", False, "none"),
        ("model.quantization", None, "none"),
        ("model.quantization", "4bit", "nf4"),
        ("model.dtype", "bf16", "bfloat16"),
        ("optim.optim", "came_pytorch", "came"),
        ("optim.optim", "q_galore_adamw8bit", "q_galore_adamw_8bit"),
        ("model.dtype", "BFloat16", "bfloat16"),
        ("memory.activation_offloading", "no", None),
        ("memory.activation_offloading", False, None),
        ("memory.gradient_checkpointing", "yes", True),
        ("memory.gradient_checkpointing", "no", False),
        ("memory.gradient_checkpointing", "full", "full"),
        ("kernels.quantization_aware", "fp8", "fp8"),
        ("optim.max_steps", "none", None),
        ("optim.max_steps", "", None),
        ("adapter.target_modules", "q_proj, v_proj", ["q_proj", "v_proj"]),
        ("adapter.target_modules", r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        ("adapter.modules_to_save", "lm_head", ["lm_head"]),
        ("run.devices", "0,1", [0, 1]),
        ("run.devices", "[0, 2]", [0, 2]),
        ("run.devices", "2", 2),
        ("run.name", 2024, "2024"),
        ("run.prompts", "hello, you", ["hello, you"]),
        ("run.prompts", [2021], ["2021"]),
        ("model.chat_template_kwargs", "enable_thinking: false", {"enable_thinking": False}),
        (
            "model.chat_template_kwargs",
            "{days: 3, language: no, ends: null}",
            {"days": 3, "language": "no", "ends": None},
        ),
        ("model.chat_template_kwargs", 'tools: ["a, b"], name: "2"', {"tools": ["a, b"], "name": "2"}),
        ("optim.lr_scheduler_kwargs", "power:3", {"power": 3}),
        ("optim.optim_args", "momentum: 9.5e-1", {"momentum": 0.95}),
        ("model.chat_template", "null", None),
    ],
)
def test_what_a_person_means(path: str, written: Any, meant: Any) -> None:
    got = fit(fields[path], written)
    assert got == meant
    assert type(got) is type(meant)


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("optim.learning_rate", True),
        ("optim.learning_rate", "fast"),
        ("optim.learning_rate", float("nan")),
        ("optim.learning_rate", float("inf")),
        ("optim.learning_rate", 0),
        ("data.max_length", 1.5),
        ("data.max_length", "1.5"),
        ("data.max_length", True),
        ("data.max_length", 10**400),
        ("data.packing", 2),
        ("data.packing", "perhaps"),
        ("run.devices", True),
        ("run.devices", [True]),
        ("run.devices", 0),
        ("run.devices", [-1]),
        ("model.dtype", None),
        ("adapter.target_modules", [1]),
        ("run.save_total_limit", 1),
        ("model.chat_template_kwargs", "no colon"),
        ("model.chat_template_kwargs", "open: [1"),
        ("memory.gradient_checkpointing", 2),
    ],
)
def test_what_is_not_bent(path: str, written: Any) -> None:
    assert isinstance(fit(fields[path], written), Uncoerced)


def owner_of(spec: FieldSpec) -> type[Section]:
    return next(model for model in SECTIONS[spec.section].values() if spec.name in model.model_fields)


ENTRY = [spec for spec in fields["data.train"].items]
PLAIN = [spec for spec in fields if spec.control != "sources" and spec.name != "kind"]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70_000),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["auto", "none", "no", "3e-4", "12", "-1", "0.5", "true", "sdpa", "left", "a, b", "x: y", "cpu", "fp8"]
    ),
    st.lists(st.one_of(st.integers(-1, 9), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.text(max_size=3)), max_size=2),
)


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from([(owner_of(spec), spec) for spec in PLAIN] + [(DataSource, spec) for spec in ENTRY]), VALUES)
def test_fit_agrees_with_pydantic(case: tuple[type[Section], FieldSpec], value: Any) -> None:
    model, spec = case
    ours = fit(spec, value)
    try:
        theirs = getattr(pydantic_model(model).model_validate({spec.name: coerce(spec, value)}), spec.name)
    except ValidationError:
        assert isinstance(ours, Uncoerced)
        return
    assert ours == theirs
    assert type(ours) is type(theirs)


def test_a_bad_choice_is_answered_with_what_this_version_takes() -> None:
    assert expectation(fields.run.backend) == "torch"
