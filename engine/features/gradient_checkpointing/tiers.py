"""Checkpointing tiers: what a layer keeps between forward and backward, and what it computes again.

`full` keeps a layer's input alone. `medium` keeps attention outputs and the products that are no wider than their input;
`selective` keeps attention outputs and nearly every product, so that only norms, activations and element-wise work come
again. Both are torch's selective checkpointing inside transformers' own layer checkpoint. An adapter's second matrix is
never kept: its inner size is a small share of its width, so it is cheaper to multiply again than to hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from engine.compat.instances import put
from engine.features.built import decoder_layers
from engine.features.tiled_mlp.tiling import computing
from engine.kernels.experts import in_tiles

_ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
# Of the packages flash-attn and xformers, torch's over documents and cuDNN's, which are registered when they are first used.
_OTHER_ATTENTION = (
    "flash_attn",
    "torch_attn._varlen_attn.",
    "workbench.attention_over_documents.",
    "workbench.attention_with_sinks.",
    "xformers",
)
# Left and right factor among a product's arguments.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
THIN = 8
"""A product whose inner size is this many times smaller than its width is computed again in every tier."""
WIDEST = {"selective": THIN - 1e-6, "medium": 1.0}
"""The widest product that a tier keeps, in inner sizes."""

Policy = Callable[..., CheckpointPolicy]


def _ops(names: Any) -> dict[Any, str]:
    found = {name: getattr(torch.ops.aten, name, None) for name in names}
    return {packet.default: name for name, packet in found.items() if packet is not None}


_ATTENTION_OPS, _PRODUCT_OPS = _ops(_ATTENTION), _ops(_PRODUCTS)


def _kept(op: Any, args: tuple[Any, ...], widest: float) -> bool:
    """Whether the result is held: attention, and products at most `widest` times as wide as their inner size; of what is
    computed in tiles nothing, since it is computed again anyway."""
    if computing() or in_tiles.computing():
        return False
    if op in _ATTENTION_OPS or any(name in str(op) for name in _OTHER_ATTENTION):
        return True
    if is_4bit_product(op):
        return keeps_product(args[2], widest)
    name = _PRODUCT_OPS.get(op)
    if name is None:
        return False
    left, right = (args[place] for place in _PRODUCTS[name])
    return bool(right.shape[-1] <= widest * left.shape[-1])


def is_4bit_product(op: Any) -> bool:
    """Whether it is bitsandbytes' product with packed weights (0.50 or later; before, it unpacks them and takes torch's)."""
    return getattr(op, "namespace", "") == "bitsandbytes" and getattr(op, "_opname", "") == "gemm_4bit"


def keeps_product(shape: Sequence[int], widest: float) -> bool:
    """Whether the result of a product with a weight of `(width, inner size)` is held."""
    width, inner = shape
    return bool(width <= widest * inner)


def _selective(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = _kept(op, args, WIDEST["selective"])
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _medium(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = _kept(op, args, WIDEST["medium"])
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


TIERS = {
    "selective": "layers; products and attention are kept, the rest is computed again",
    "medium": "layers; attention and products no wider than their input are kept, the rest is computed again",
    "full": "layers computed again",
}
"""What each tier does, for the receipt."""
POLICIES: dict[str, Policy] = {"selective": _selective, "medium": _medium}


def use_tier(model: PreTrainedModel, tier: str) -> Callable[[], None]:
    """Whenever this instance's checkpointing is turned on from now on, it is this tier; returns the undo.

    The instance's method is wrapped rather than the context handed through the training arguments, which are written to
    disk and cannot hold a function.
    """
    enable = model.gradient_checkpointing_enable
    context = functools.partial(create_selective_checkpoint_contexts, POLICIES[tier])

    def gradient_checkpointing_enable(
        gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        settings = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False, "context_fn": context}
        return enable(gradient_checkpointing_kwargs=settings, **kwargs)

    return put(model, "gradient_checkpointing_enable", gradient_checkpointing_enable)


def leave_out(model: PreTrainedModel, first: int) -> Callable[[], None]:
    """Whenever this instance's checkpointing is turned on from now on, it is for the decoder's `first` layers alone; returns
    the undo."""
    enable = model.gradient_checkpointing_enable

    def gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> Any:
        done = enable(*args, **kwargs)
        for layer in decoder_layers_of(model)[first:]:
            layer.gradient_checkpointing = False
        return done

    return put(model, "gradient_checkpointing_enable", gradient_checkpointing_enable)


def decoder_layers_of(model: PreTrainedModel) -> list[Any]:
    """The layers of the part that reads text, in their order."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return list(decoder_layers(decoder if isinstance(decoder, torch.nn.Module) else model))


def tier_of(module: Any) -> str | None:
    """The tier in force on a layer, read off its checkpoint function; None where nothing is computed again."""
    if not getattr(module, "gradient_checkpointing", False):
        return None
    context = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get("context_fn")
    policy = context.args[0] if isinstance(context, functools.partial) and context.args else None
    return next((name for name, each in POLICIES.items() if each is policy), "full")
