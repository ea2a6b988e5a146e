"""`kernels.fused_attn_kernel`: the norm and the rotation of queries and keys in one kernel, layer by layer.

An attention layer of a known class gets a `forward` of our own on its instance, which does what the class does with
`engine.kernels.norm_rope` in the middle. Before the first step one layer of each class is asked with and without, and the
run ends if the answers differ: a release of transformers that changes the layer is found out there. Refuses machines
where the kernel has no place to run.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.config.kernels import NORM_ROPE_MODELS
from engine.errors import ModelError
from engine.kernels.device import kernel_serves
from engine.kernels.norm_rope import norm_rope
from engine.patches.plan import Applied

FEATURE = "fused norm and rotary"
CLASSES = {
    f"transformers.models.{kind}.modeling_{kind}": ("Qwen3Attention", "Qwen3MoeAttention") for kind in NORM_ROPE_MODELS
}
"""Module of a model -> its classes of attention that the forward below stands for."""
_TURN_OFF = "Set kernels.fused_attn_kernel to false."
# Relative error that two orders of rounding may make in one layer.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def fused_attention(config: Any, trainer: Any) -> Applied | None:
    """Gives every attention layer of the trainer's models the fused forward; None where it was not asked for."""
    if config.kernels.fused_attn_kernel is not True:
        return None
    layers = list(attention_layers(trainer))
    if not layers:
        known = ", ".join(NORM_ROPE_MODELS)
        raise ModelError(f"kernels.fused_attn_kernel: the model has no attention layer of {known}.", _TURN_OFF)
    if not kernel_serves(*layers[0].parameters()):
        raise ModelError("kernels.fused_attn_kernel: the kernel needs a CUDA device and the package triton.", _TURN_OFF)
    undo = fuse(layers)
    return Applied(FEATURE, True, "Triton", len(layers), "attention layers; one kernel forward, one backward", undo)


def attention_layers(trainer: Any) -> Iterator[torch.nn.Module]:
    """Every layer of a known class among the trainer's models, once."""
    seen: set[int] = set()
    for value in list(vars(trainer).values()):
        for module in value.modules() if isinstance(value, torch.nn.Module) else ():
            kind = type(module)
            if kind.__name__ in CLASSES.get(kind.__module__, ()) and id(module) not in seen:
                seen.add(id(module))
                yield module


def fuse(layers: list[torch.nn.Module]) -> Callable[[], None]:
    """Gives these layers the fused forward; returns the undo. Raises ModelError where a layer would answer otherwise."""
    forwards = {kind: _forward_of(kind) for kind in {type(layer) for layer in layers}}
    for kind, forward in forwards.items():
        _try(next(layer for layer in layers if type(layer) is kind), forward)
    for layer in layers:
        layer.forward = types.MethodType(forwards[type(layer)], layer)

    def undo() -> None:
        for layer in layers:
            vars(layer).pop("forward", None)

    return undo


def _forward_of(kind: type) -> Callable[..., Any]:
    """The fused forward for a class. What `attention: eager` asks for is looked up here: no graph may hold an import."""
    eager = importlib.import_module(kind.__module__).eager_attention_forward

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention with queries and keys normed and rotated at once; arguments and results are the class's own."""
        rows = hidden_states.shape[:-1]
        heads = (*rows, -1, self.head_dim)
        q, k = norm_rope(
            self.q_proj(hidden_states).view(heads),
            self.k_proj(hidden_states).view(heads),
            _scale(self.q_norm),
            _scale(self.k_norm),
            *position_embeddings,
            eps=_source(self.q_norm).variance_epsilon,
        )
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling,
            sliding_window=getattr(self, "sliding_window", None), **kwargs,
        )  # fmt: skip
        return self.o_proj(out.reshape(*rows, -1).contiguous()), weights

    return forward


def _source(norm: Any) -> Any:
    """The norm in force: behind PEFT's `modules_to_save` the trained copy, or the original while adapters are off."""
    if not hasattr(norm, "modules_to_save"):
        return norm
    if norm.disable_adapters or not norm.active_adapters:
        return norm.original_module
    return norm.modules_to_save[norm.active_adapters[0]]


def _scale(norm: Any) -> torch.Tensor:
    weight: torch.Tensor = _source(norm).weight
    return weight


@torch.no_grad()
def _try(layer: Any, forward: Callable[..., Any]) -> None:
    """Both forms of one layer on 8 tokens. Raises ModelError where they differ by more than their rounding."""
    weight = _scale(layer.q_norm)
    hidden = torch.randn(1, 8, layer.config.hidden_size, device=weight.device, dtype=weight.dtype)
    angles = torch.rand(1, 8, layer.head_dim // 2, device=weight.device).repeat(1, 1, 2)
    position = (angles.cos().to(weight.dtype), angles.sin().to(weight.dtype))
    training = layer.training
    layer.eval()
    theirs = layer(hidden, position_embeddings=position, attention_mask=None)[0]
    ours = forward(layer, hidden, position, None)[0]
    layer.train(training)
    error = float((ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-12))
    if not error <= _TOLERANCE.get(weight.dtype, 1e-4):
        raise ModelError(
            f"kernels.fused_attn_kernel: {type(layer).__name__} of this release of transformers computes something else "
            f"(relative error {error:.1e}).",
            _TURN_OFF,
        )
