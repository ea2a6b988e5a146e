"""TRL's fused head: the settings it was given, and a `forward` of ours that keeps its call contract with another op.

`add_fused_lm_head` gives a model's instance a `forward` that returns per-token log-probabilities for `fused_lm_head=True`
(TRL 1.16, `trl.trainer.utils`). Its settings are the free variables of that function. `FusedForward` is called and answers
as it does, with `FusedCausalLMOutput`, and is known by its type. Refuses nothing; what a head must be, its callers ask.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from engine.kernels.linear_logp import Rows

IGNORED = -100


class TokenFields(NamedTuple):
    """What an op returns for the tokens that have a label, in the order of `FusedCausalLMOutput`; each [N] or None."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    log_sum_sq_probs: torch.Tensor | None
    mean_logits: torch.Tensor | None
    is_top1: torch.Tensor | None


@dataclass(frozen=True)
class HeadSettings:
    """How TRL's head makes scores: divided by the temperature, scaled, capped; and which fields it gives."""

    temperature: float
    soft_cap: float | None
    logit_scale: float
    outputs: tuple[str, ...]
    in_float32: bool
    plain: Callable[..., Any]
    """The model's own forward."""


_FREE = {
    "temperature": "temperature",
    "soft_cap": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "outputs": "outputs",
    "in_float32": "cast_lm_head_to_fp32",
    "plain": "original_forward",
}
"""Our names and those of the free variables of TRL's forward; a test fails by name when an upgrade changes them."""

Op = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, HeadSettings], TokenFields]
"""(hidden [N, H], weight [V, H], bias [V] or None, labels [N], settings) -> the fields of N tokens."""


def head_settings(model: torch.nn.Module) -> HeadSettings | None:
    """The settings of the fused head of this instance, TRL's or ours; None where it has none."""
    forward = vars(model).get("forward")
    if isinstance(forward, FusedForward):
        return forward.settings
    function = getattr(forward, "__func__", None)
    if not isinstance(function, types.FunctionType) or not set(_FREE.values()) <= set(function.__code__.co_freevars):
        return None
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return HeadSettings(**{name: held[theirs].cell_contents for name, theirs in _FREE.items()})


_KNOWN = "tokens_with_a_label"


def set_label_count(labels: torch.Tensor, count: int) -> None:
    """Tells a head that is given this very tensor [B, T] how many of the labels behind each row's first are none that are
    ignored, as whoever made the batch knows: so it does not ask the card, and wait."""
    setattr(labels, _KNOWN, count)


def _first(mask: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the first `count` tokens that are taken, in their order, without a look at how many there are."""
    return torch.argsort((~mask).to(torch.uint8), stable=True)[:count]


class FusedForward:
    """A model's `forward` with a fused head: `model(..., labels=labels, fused_lm_head=True)`; without it the model's own."""

    def __init__(self, model: PreTrainedModel, settings: HeadSettings, op: Op) -> None:
        self.model, self.settings, self.op = model, settings, op
        # `generate` checks its arguments against the signature of the model's class.
        self.__signature__ = inspect.signature(types.MethodType(type(model).forward, model))

    def __call__(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if not fused_lm_head:
            return self.settings.plain(
                *args, **kwargs, **{name: value for name, value in given.items() if value is not None}
            )
        config = self.model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        known: int | None = None if labels is None else getattr(labels, _KNOWN, None)
        backbone = self.model.base_model(*args, **{**kwargs, "use_cache": False})
        hidden = backbone.last_hidden_state
        if shift_labels is None:
            assert labels is not None
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        else:
            known = None
        head = self.model.get_output_embeddings()
        hidden, shift_labels = hidden.to(head.weight.device), shift_labels.to(head.weight.device)
        found = self._fields(hidden, shift_labels, head, known)
        mask = shift_labels != IGNORED
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -found.log_probs.sum() / count
        aux_loss: Any = None
        if kwargs.get("output_router_logits"):
            experts, each = config.num_experts, config.num_experts_per_tok
            aux_loss = load_balancing_loss_func(backbone.router_logits, experts, each, kwargs.get("attention_mask"))
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **found._asdict())

    def _fields(self, hidden: torch.Tensor, labels: torch.Tensor, head: Any, known: int | None) -> TokenFields:
        """Each field [B, T], zero where there is no label; connected to the model also where no token has one. `known` is the
        number of those that have one, or None."""
        flat = labels.flatten()
        # A mask would be read for each index, each spread field and each of their gradients, and a card waited for.
        places = (flat != IGNORED).nonzero().squeeze(1) if known is None else _first(flat != IGNORED, known)
        around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.settings.in_float32:
            hidden, around = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
        with around:
            rows = Rows.apply(hidden.reshape(-1, hidden.shape[-1]), places)
            found = self.op(rows, head.weight, head.bias, flat.index_select(0, places), self.settings)
        spread: list[Any] = [
            None if part is None else part.new_zeros(flat.shape).index_copy(0, places, part).view(labels.shape)
            for part in found
        ]
        return TokenFields(*spread)
