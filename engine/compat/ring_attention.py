"""torch's ring attention under a model of transformers: every token sees those before it, though GPUs divide the row.

torch's `context_parallel` replaces its fused attention, while it lasts, by one that sends keys and values round a group of
GPUs. Under it a model computes with an attention of ours, which asks for exactly what the ring has a form for: causal, no
mask, no plain matrix products. The model's config is given back as it was, so samples and chats never meet the ring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

NAME = "sdpa_ring"
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@contextlib.contextmanager
def ring_attention(model: PreTrainedModel, mesh: DeviceMesh) -> Iterator[None]:
    """Within it the model's layers attend over the group of `mesh` (one dimension), in forward and backward passes."""
    from torch.distributed.tensor.experimental import context_parallel
    from transformers import AttentionInterface

    # No mask goes by this name, so transformers makes none.
    AttentionInterface.register(NAME, ring_attention_forward)
    config, before = model.config, model.config._attn_implementation
    # The batch comes divided. torch wants to divide something itself: this, which nobody reads.
    unread = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    config._attn_implementation = NAME
    try:
        with context_parallel(mesh, buffers=[unread], buffer_seq_dims=[0], no_restore_buffers={unread}):
            yield
    finally:
        config._attn_implementation = before


def ring_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' layers call it, of this GPU's part of each row.

    Args:
        query: [B, heads, T, width] bfloat16; key, value: [B, shared heads, T, width]. `attention_mask` is not read.

    Returns:
        [B, T, heads, width] and no weights.
    """
    shared = query.shape[1] != key.shape[1]
    with sdpa_kernel(FUSED):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
    return out.transpose(1, 2).contiguous(), None
