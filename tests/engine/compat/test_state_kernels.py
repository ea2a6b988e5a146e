"""What computes the layers with a state is told as it is called."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from engine.compat.state_kernels import computed_by
from tests.engine.features.attention_backend.test_documents_as_rows import made


def called(model: torch.nn.Module) -> set[CodeType]:
    """The code of every function of Python that a pass of the model runs."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        model(input_ids=torch.tensor([[5, 6, 7]]))
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize(
    ("family", "function", "form"),
    [
        ("qwen3_5_text", "chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
        ("kimi_linear", "chunk_kda", "chunk_kimi_delta_attention"),
    ],
)
def test_torchs_own_form_is_told_where_that_is_what_runs(family: str, function: str, form: str) -> None:
    model = made(family)
    ran = {code.co_name for code in called(model) if "transformers" in code.co_filename}
    assert form in ran
    package, layers = computed_by(model)[function]
    assert package == "transformers"
    assert layers == sum(any(isinstance(part, torch.nn.Conv1d) for part in each.children()) for each in model.modules())


def test_a_model_without_such_layers_has_none() -> None:
    assert computed_by(made("afmoe")) == {}
