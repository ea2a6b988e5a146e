"""Whether a model's own scores are those of TRL's fused head: one product with one matrix, scaled and capped, no more.

The head knows a model's scale and cap by the names that most configs have for them. A model with more around its matrix (a
norm of its own, a cap by another name) would be trained for other scores than those it answers with, and nothing would
show. So before the first step both are asked what they make of a few hidden states, which costs a head's product; layers
do not run. A model that cannot be asked so, in whose forward the backbone is no call by itself, is taken as it comes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from engine.compat.instances import put
from engine.compat.trl_head import head_settings
from engine.errors import ModelError
from engine.features.built import Built
from engine.features.cut_cross_entropy.apply import fused_heads, refusal

_TOKENS, _REACH = 8, 20.0
"""Made-up hidden states, and the size of their scores: caps of 30 and 50 show there."""
_ALLOWED = 3e-2
"""Relative error that 16 bits may make."""
_NOT_ASKED = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError, NotImplementedError)


def refuse_other_scores(built: Built) -> None:
    """Raises ModelError for a model of the trainer whose scores the fused head would not give."""
    for model in fused_heads(built):
        name = type(model).__name__
        if model.base_model is model:
            raise ModelError(
                f"model.name: {name} does not tell its layers from its head, which the losses from hidden states need.",
                "Take another model.",
            )
        error = relative_error(model)
        if error is not None and not error <= _ALLOWED:
            raise ModelError(
                f"model.name: {name} makes its scores by more than one matrix, a scale and a cap that are known "
                f"(they differ by {error:,.0%}); it would be trained for others than those it answers with.",
                "Take another model.",
            )


@torch.no_grad()
def relative_error(model: PreTrainedModel) -> float | None:
    """The relative error of the fused head's scores by the model's own; None where it cannot be told."""
    matrix = model.get_output_embeddings()
    if refusal(matrix) is not None:
        return None
    weight = matrix.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TOKENS + 1, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    ids = torch.zeros(1, _TOKENS + 1, dtype=torch.long, device=weight.device)
    try:
        reached = _fused(model, hidden).square().mean().sqrt()
        if not 0 < reached < math.inf:  # a head that is nothing yet, or broken, tells nothing
            return None
        hidden = hidden * (_REACH / reached).to(hidden.dtype)
        ours = _fused(model, hidden, capped=True)
        own = _own(model, ids, hidden)
    except _NOT_ASKED:
        return None
    if own is None or own.shape != ours.shape:
        return None
    own = own.to(ours.dtype)
    return float((ours - own).norm() / own.norm())


def _own(model: PreTrainedModel, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
    """Scores [tokens, V] by the model's own forward, None where it does not call its backbone."""
    asked: list[bool] = []

    def answering(*args: Any, **kwargs: Any) -> _Answer:
        asked.append(True)
        return _Answer(hidden)

    back = put(model.base_model, "forward", answering)
    try:
        scores: torch.Tensor = model.forward(input_ids=ids).logits[0, :-1]
    finally:
        back()
    return scores if asked else None


def _fused(model: PreTrainedModel, hidden: torch.Tensor, *, capped: bool = False) -> torch.Tensor:
    """Scores [tokens, V] as the fused head makes them, without the cap or with it."""
    settings, head = head_settings(model), model.get_output_embeddings()
    assert settings is not None
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    scores: torch.Tensor = F.linear(hidden[0, :-1], head.weight, head.bias).to(wide) * settings.logit_scale
    if capped and settings.soft_cap is not None:
        return settings.soft_cap * torch.tanh(scores / settings.soft_cap)
    return scores


class _Answer:
    """A backbone's answer that holds hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, at: Any) -> Any:
        return (self.last_hidden_state,)[at]
