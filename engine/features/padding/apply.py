"""Rows padded behind their last token need no mask: a causal model never looks ahead, so no token sees the padding.

transformers makes a mask of all pairs of tokens of each batch with padding, waits for the device to find out whether there
is any, copies the heads that share keys and takes a slower kernel. The model's own instance, and a reference's, get a hook
that hands its layers no mask, and they compute with the causal kernel of whole rows. What comes out at padding is another
number, which no loss reads. Left with their mask: rows padded in front (`prompts`), sampling with a cache, models that
look both ways or see images. The collators pad behind in every batch, which their test holds; it is looked up all the same,
on a CPU at every batch, and on a card, which would be waited for, at the first.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.compat.cache_names import cache_in
from engine.compat.causal_masks import none_needed
from engine.compat.instances import all_of
from engine.config.tree import RunConfig
from engine.features.applied import Applied
from engine.features.built import Built, base_model
from engine.models.attention_direction import is_causal_lm

FEATURE = "padding"


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Hooks the backbones of the trainer's models; None where batches are padded in front, where there is no padding (packs
    of separate documents, which attention keeps apart in its own way) or no model is causal."""
    columns = getattr(getattr(built.trainer, "train_dataset", None), "column_names", None) or ()
    if config.method.rows == "prompts" or "seq_lengths" in columns:
        return None
    bases = [base for model in built.models() if isinstance(base := base_model(model), PreTrainedModel)]
    backbones = [base.base_model for base in bases if is_causal_lm(base)]
    if not backbones:
        return None
    hooks = [each.register_forward_pre_hook(_Unmasked(), with_kwargs=True) for each in backbones]
    detail = "behind each row's tokens, which do not look ahead: causal attention without a mask of all pairs"
    return Applied(FEATURE, None, "no mask", len(hooks), detail, all_of([hook.remove for hook in hooks]))


class _Unmasked:
    """The hook of one backbone; it remembers whether the first batch's padding lay behind."""

    def __init__(self) -> None:
        self.behind: bool | None = None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        given = cache_in(kwargs) is not None or kwargs.get("position_ids") is not None
        if given or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return None
        if self.behind is None or not mask.is_cuda:
            self.behind = bool((mask[:, 1:] <= mask[:, :-1]).all())
        return (args, {**kwargs, "attention_mask": none_needed(module)}) if self.behind else None
