"""`xformers`: the memory-efficient attention of the package xformers over documents, as an attention of transformers.

It serves cards on which torch's own over documents does not run (Volta, Turing). What says who sees whom is made once a
pass from the documents' lengths and handed to all layers. A pass whose documents are not told goes through torch's fused
attention, as under `varlen`, and refused is what that refuses too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.features.attention_backend import XFORMERS, varlen
from engine.features.attention_backend.sdpa_cudnn_workaround import make_known, masked_sdpa_attention_forward

NAME = XFORMERS
lacking = varlen.lacking


def register() -> None:
    """Makes the name known to transformers; a second time changes nothing. Raises ImportError without the package."""
    import xformers.ops  # noqa: F401

    make_known(NAME, xformers_attention_forward)


def lengths(told: Mapping[str, Any]) -> dict[str, Any]:
    """Beside the bounds that layers are told: the tokens of each document, on the host. Waits for the device once."""
    return {"document_lengths": told["cu_seq_lens_q"].diff().tolist()}


def xformers_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    document_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' layers call it: arguments and answer are those of `varlen_attention_forward`, and
    `document_lengths` are the tokens of each document in the B * T tokens."""
    if cu_seq_lens_q is None:
        kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return masked_sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    from xformers.ops import fmha, memory_efficient_attention

    counts = cu_seq_lens_q.diff().tolist() if document_lengths is None else document_lengths
    rows, heads, tokens, width = query.shape
    shared = key.shape[1]
    q, k, v = (x.transpose(1, 2).reshape(1, rows * tokens, x.shape[1], width) for x in (query, key, value))
    if shared != heads:
        # Heads that share keys stand beside each other: [1, tokens, shared, heads of each, width].
        q = q.view(1, rows * tokens, shared, heads // shared, width)
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, heads // shared, -1) for x in (k, v))
    causal = getattr(module, "is_causal", True)
    kind = fmha.attn_bias.BlockDiagonalCausalMask if causal else fmha.attn_bias.BlockDiagonalMask
    bias = kind.from_seqlens(counts)
    if sliding_window and causal:
        bias = bias.make_local_attention(sliding_window)
    out = memory_efficient_attention(q, k, v, attn_bias=bias, scale=scaling)
    return out.reshape(rows, tokens, heads, width), None
