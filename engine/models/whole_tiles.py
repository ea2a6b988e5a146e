"""`sdpa_whole_tiles`: torch's fused attention, kept away from the one length at which a mask makes its gradients NaN.

On Hopper cards torch takes cuDNN's kernel. Given a mask and a number of keys that leaves 64 of 128, cuDNN before 9.26 leaves
half of the last tile unmasked in the backward pass, and where all scores of a query lie some 88 below zero its gradients are
NaN (seen on an H100 with torch 2.11 and cuDNN 9.19). There keys and values get 64 places more, which the mask closes: the
numbers are the same. Passes without a mask, which are most, and other lengths go on as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

NAME = "sdpa_whole_tiles"
TILE, HALF = 128, 64
MENDED = 92600
"""The release of cuDNN that masks the whole tile."""


def at_stake(model: Any, device: torch.device | None) -> bool:
    """Whether this model's attention with a mask may meet that length: 16 bits, a Hopper card, that cuDNN."""
    return (
        device is not None
        and model.config._attn_implementation == "sdpa"
        and model.dtype in (torch.bfloat16, torch.float16)
        and getattr(model, "_supports_attention_backend", False)
        and torch.cuda.get_device_capability(device)[0] == 9
        and (torch.backends.cudnn.version() or 0) < MENDED
    )


def guard(model: Any) -> None:
    """Gives the model this attention, which transformers then knows by its name; `attention_reason` says why."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, whole_tiles_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    why = "torch's fused attention; a mask over 64 keys more than whole tiles of 128 gets 64 places more, for cuDNN before 9.26"
    model.attention_reason = "; ".join(filter(None, (getattr(model, "attention_reason", ""), why)))


def whole_tiles_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa_attention_forward`, its arguments and result; `attention_mask`: [.., .., T, keys] or None."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    keys = key.shape[-2]
    if attention_mask is not None and keys % TILE == HALF and attention_mask.shape[-1] == keys:
        key, value = (F.pad(x, (0, 0, 0, HALF)) for x in (key, value))
        closed = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
        attention_mask = F.pad(attention_mask, (0, HALF), value=closed)
    out: torch.Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    return out, None
