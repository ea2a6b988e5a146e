"""The attention that a loaded model computes with: what was asked for where model and card take it, torch's own otherwise.

Flash and flex attention come from packages and compilers that can fail on one card and not on another, and torch's
attention over documents takes some models and cards only. So a model is loaded with torch's own and handed the other one
afterwards; on a card it is first tried on two short documents, forward and backward, in the model's own shape. What does
not work or computes something else is not taken, and the reason goes to the receipt.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from engine.errors import first_line, visible
from engine.features.attention_backend import FLASH, cudnn_documents, sinks, varlen, xformers_documents
from engine.hardware import installed

TRIED = (*FLASH, "flex_attention", varlen.NAME, sinks.NAME)
OURS: dict[str, Any] = {each.NAME: each for each in (varlen, cudnn_documents, xformers_documents, sinks)}
"""Those that this package makes known to transformers."""
LENGTHS = (64, 100)
"""Tokens of the two documents of a trial; kernels have failed in half-filled tiles, of 64 in 128."""
DEPTH = 120
"""How far below zero the scores of a second trial of ours lie: kernels have failed where exponentials of their sums overflow."""
ALLOWED = 3e-2
"""Relative error that 16 bits and another order of sums may make."""
FAILURES = (ImportError, ValueError, RuntimeError, OSError, KeyError, AttributeError, TypeError, NotImplementedError)


def settle(model: PreTrainedModel, wanted: str, device: torch.device | None = None) -> str:
    """Gives the model this attention, or leaves it with its own; why, where it does not serve.

    `device` is where it is tried; without one it is not.
    """
    own = model.config._attn_implementation
    try:
        # transformers would fetch a missing one from the hub and run it.
        if wanted in FLASH and installed(FLASH[wanted].package) is None:
            raise ImportError(f"the package {FLASH[wanted].package} is not installed")
        if (ours := OURS.get(wanted)) is not None:
            ours.register()
            if (lacking := ours.lacking(model)) is not None:
                raise ValueError(lacking)
        model.set_attn_implementation(wanted)
        if model.config._attn_implementation != wanted:
            reason: str | None = f"{type(model).__name__} keeps {model.config._attn_implementation}"
        else:
            reason = None if device is None else trial(wanted, model, device)
    except FAILURES as problem:
        reason = visible(first_line(problem))[:200] or type(problem).__name__
    if reason is None:
        return ""
    model.set_attn_implementation(own)
    told = f"{wanted} does not serve here: {reason}"
    if wanted == cudnn_documents.NAME and device is not None:
        # Torch's own over documents in cuDNN's place.
        told = "; ".join(filter(None, (told, settle(model, varlen.NAME, device))))
    return told


def trial(name: str, model: PreTrainedModel, device: torch.device) -> str | None:
    """Attention over two documents of one row against torch's own over each, or with sinks against the model's own: why they
    differ, or None."""
    if name == sinks.NAME:
        return sinks.trial(model, device, ALLOWED)
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return differs(name, asking(text, heads // shared, model.dtype, device), (heads, shared, width))


def asking(config: Any, groups: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """A module as attention functions ask it: the model's config, and how many heads share keys."""
    module: Any = torch.nn.Linear(1, 1, dtype=dtype, device=device)
    module.config, module.is_causal, module.layer_idx = config, True, 0
    module.num_key_value_groups = groups
    found: torch.nn.Module = module
    return found


def differs(name: str, module: Any, sizes: tuple[int, int, int]) -> str | None:
    """Why attention by this name over two documents of one row is not torch's own over each, or None; `sizes` are the heads,
    those of keys and values, and their width."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    heads, shared, width = sizes
    device, dtype = module.weight.device, module.weight.dtype
    attend = ALL_ATTENTION_FUNCTIONS[name]
    mask, more = (_documents_mask(device), {}) if name == "flex_attention" else (None, _lengths(device))

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(module, q, k, v, mask, scaling=width**-0.5, dropout=0.0, **more)[0]
        return out.transpose(1, 2)

    for depth in (0, DEPTH) if name in OURS else (0,):
        tensors = [x.to(device, dtype) for x in _drawn((heads, shared, shared, heads), width, depth)]
        found, truth = _with_gradients(theirs, *tensors), _with_gradients(_per_document_attention, *tensors)
        for what, ours, plain in zip(("output", "dq", "dk", "dv"), found, truth, strict=True):
            # A key's first number is the same for all: dq there is a difference of large equal sums, all rounding.
            ours, plain = (x[..., 1:] if depth and what == "dq" else x for x in (ours.double(), plain.double()))
            error = float((ours - plain).norm() / plain.norm())
            if not error <= ALLOWED:
                where = f" where scores lie {depth} below zero" if depth else ""
                return f"its {what} differs from torch's own by {error:.1%}{where}"
    return None


def _drawn(counts: tuple[int, ...], width: int, depth: int) -> list[torch.Tensor]:
    """Queries, keys, values and what comes from above, [1, heads, tokens, width], scores around `-depth`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(1, count, sum(LENGTHS), width, generator=generator) for count in counts)
    if depth:
        q, k = 0.1 * q, 0.1 * k
        q[..., 0], k[..., 0] = 1.0, -depth * width**0.5
    return [q, k, v, upstream]


def _with_gradients(attend: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    *inputs, upstream = tensors
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, upstream))


def _per_document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's own attention, one document after the other."""
    groups = q.shape[1] // k.shape[1]
    parts = zip(*(tensor.split(LENGTHS, 2) for tensor in (q, k, v)), strict=True)
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                own, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), is_causal=True
            )
            for own, key, value in parts
        ],
        2,
    )


def _documents_mask(device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)

    def apart(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (document[query] == document[key]) & (query >= key)

    return create_block_mask(apart, None, None, sum(LENGTHS), sum(LENGTHS), device=str(device))


def _lengths(device: torch.device) -> dict[str, Any]:
    ends = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
