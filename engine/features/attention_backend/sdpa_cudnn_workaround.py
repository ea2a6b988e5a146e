"""`sdpa_whole_tiles`: torch's fused attention, kept from cuDNN at the one length where a mask makes its gradients NaN.

On Hopper cards torch takes cuDNN's kernel. Given a mask and a number of keys that leaves 64 of 128, cuDNN before 9.26
leaves half of the last tile unmasked in the backward pass, and where all scores of a query lie some 88 below zero its
gradients are NaN. Seen on an H100 with torch 2.11 and cuDNN 9.19, with 704 and 832 keys; torch's memory-efficient kernel
gave numbers there, so it computes those lengths. Passes without a mask, which are most, and other lengths go on as they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_whole_tiles"
TILE, HALF = 128, 64
WITHOUT_CUDNN = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MENDED = 92600
"""The release of cuDNN that masks the whole tile."""


def at_stake(model: PreTrainedModel, device: torch.device | None) -> bool:
    """Whether this model's attention with a mask may meet that length: 16 bits, a Hopper card, that cuDNN."""
    return (
        device is not None
        and model.config._attn_implementation == "sdpa"
        and model.dtype in (torch.bfloat16, torch.float16)
        and getattr(model, "_supports_attention_backend", False)
        and torch.cuda.get_device_capability(device)[0] == 9
        and (torch.backends.cudnn.version() or 0) < MENDED
    )


def make_known(name: str, attention: Callable[..., Any], mask: Callable[..., Any] = sdpa_mask) -> None:
    """Makes an attention known to transformers by this name; a second time changes nothing."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def guard(model: PreTrainedModel) -> str:
    """Gives the model this attention, which transformers then knows by its name; why."""
    make_known(NAME, masked_sdpa_attention_forward)
    model.set_attn_implementation(NAME)
    return "torch's fused attention; with a mask and 64 keys more than whole tiles of 128 another kernel than cuDNN before 9.26"


def masked_sdpa_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa_attention_forward`, its arguments and result; `attention_mask`: [.., .., T, keys] or None."""
    if attention_mask is None or key.shape[-2] % TILE != HALF:
        return _plain(module, query, key, value, attention_mask, **kwargs)
    with sdpa_kernel(WITHOUT_CUDNN):
        return _plain(module, query, key, value, attention_mask, **kwargs)


def _plain(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **kwargs)[0], None
