"""`varlen`: the flash attention that torch itself carries, over documents of any lengths, as an attention of transformers.

It takes all rows end to end with the bounds of each document, needs no package and no compiler, and no mask. A pass whose
bounds are told (`engine.features.attention_backend.apply`) goes through it; any other, with padding or a cache, goes through torch's fused
attention with the mask that transformers makes for that. Refuses what it has no form for: dropout, capped scores, sinks.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.features.attention_backend import VARLEN
from engine.features.attention_backend.sdpa_cudnn_workaround import make_known, masked_sdpa_attention_forward

NAME = VARLEN


def register() -> None:
    """Makes the name known to transformers; a second time changes nothing."""
    make_known(NAME, varlen_attention_forward)


def lacking(model: PreTrainedModel) -> str | None:
    """What this model asks of attention that torch's has no form for, or None."""
    text = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} computes attention in its own way"
    if getattr(text, "attention_dropout", 0.0):
        return f"it has no dropout, and the model asks for {text.attention_dropout}"
    if getattr(text, "attn_logit_softcapping", None):
        return "it has no cap on scores, which the model asks for"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "it has no attention sinks, which the model has"
    return None


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' layers call it.

    Args:
        query: [B, heads, T, width] float16 or bfloat16; key, value: [B, shared heads, T, width].
        cu_seq_lens_q: [documents + 1] int32, their bounds in the B * T tokens; None: `attention_mask` says who sees whom.
        max_length_q: tokens of the longest document. sliding_window: tokens that each sees, itself among them.

    Returns:
        [B, T, heads, width] and no weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return masked_sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows, heads, tokens, _ = query.shape
    left = sliding_window - 1 if sliding_window else -1
    window = (left, 0) if getattr(module, "is_causal", True) else (left, left)
    # [B, heads, T, width] is a view of [B, T, heads, width] in every model: nothing is copied.
    q, k, v = (x.transpose(1, 2).reshape(rows * tokens, x.shape[1], x.shape[3]) for x in (query, key, value))
    out = over_documents(q, k, v, cu_seq_lens_q, max_length_q, scaling, window)
    return out.view(rows, tokens, heads, -1), None


def over_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Before torch 2.12 heads that share keys needed no word.
    shared: dict[str, Any] = {"enable_gqa": True} if _SHARING and q.shape[1] != k.shape[1] else {}
    found: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, **shared)
    out: torch.Tensor = found
    return out


def _sharing_is_requested() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


_SHARING = _sharing_is_requested()
