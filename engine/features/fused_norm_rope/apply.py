"""`kernels.fused_attn_kernel`: the norm and the rotation of queries and keys in one kernel, layer by layer.

An attention layer of a known class gets a `forward` of our own on its instance, which does what the class does with
`engine.kernels.norm_rope` in the middle, or `engine.kernels.rope` where the class has no norms. The three axes of Qwen2-VL's
positions are merged into cos and sin by its rotary embedding, once a pass, so its layers are as any other. Before the first
step one layer of each class is asked with and without, and the run ends if the answers differ: a release of transformers
that changes the layer is found out there. Refuses machines where the kernel has no place to run.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.compat.cache_names import CACHE
from engine.compat.instances import all_of, in_mode, put
from engine.config.kernels import NORM_ROPE_MODELS, ROPE_MODELS
from engine.config.tree import RunConfig
from engine.errors import ModelError, visible
from engine.features.applied import Applied, left_out
from engine.features.built import Built
from engine.features.fp32_norms.apply import dtype_around
from engine.kernels.device import lacking
from engine.kernels.norm_rope import norm_rope
from engine.kernels.rope import rope
from engine.kernels.shapes import FORMATS

FEATURE = "fused norm and rotary"


@dataclass(frozen=True)
class Family:
    """How a class of attention differs: its norms scale by `1 + weight`; its queries come with gates for the output, and a
    part of each head stays as it is; it has no norms; its sliding window is said by itself, by the model or by none; its
    scores are capped; some layers attend to the keys and values of one before them."""

    name: str
    unit_offset: bool = False
    gated: bool = False
    normed: bool = True
    window: Literal["layer", "config"] | None = "layer"
    capped: bool = False
    sharing: bool = False


_FAMILIES = {
    "qwen3": Family("Qwen3Attention"),
    "qwen3_moe": Family("Qwen3MoeAttention"),
    "qwen3_vl_text": Family("Qwen3VLTextAttention"),
    "qwen3_vl_moe_text": Family("Qwen3VLMoeTextAttention"),
    "qwen3_5_text": Family("Qwen3_5Attention", unit_offset=True, gated=True),
    "qwen3_5_moe_text": Family("Qwen3_5MoeAttention", unit_offset=True, gated=True),
    "gemma3_text": Family("Gemma3Attention", unit_offset=True),
    "gemma4_text": Family("Gemma4TextAttention", sharing=True),
    "gemma4_unified_text": Family("Gemma4UnifiedTextAttention", sharing=True),
    "qwen2_vl": Family("Qwen2VLAttention", normed=False),
    "qwen2_5_vl": Family("Qwen2_5_VLAttention", normed=False),
    "qwen2": Family("Qwen2Attention", normed=False),
    "qwen2_moe": Family("Qwen2MoeAttention", normed=False, window=None),
    "llama": Family("LlamaAttention", normed=False, window=None),
    "mistral": Family("MistralAttention", normed=False, window="config"),
    "mixtral": Family("MixtralAttention", normed=False, window="config"),
    "gemma": Family("GemmaAttention", normed=False, window=None),
    "gemma2": Family("Gemma2Attention", normed=False, capped=True),
    "granite": Family("GraniteAttention", normed=False, window=None),
}
SERVED = NORM_ROPE_MODELS + ROPE_MODELS


def _module(model_type: str) -> str:
    kind = model_type.removesuffix("_text")
    return f"transformers.models.{kind}.modeling_{kind}"


CLASSES = {_module(kind): family for kind, family in _FAMILIES.items()}
"""Module of a model -> its class of attention that the forward below stands for."""
# As by releases before 5.17 whose Qwen2-VL takes the three axes of its positions apart in every layer.
_CALLED_OTHERWISE = (TypeError, ValueError, IndexError, KeyError, AttributeError)
_TURN_OFF = "Set kernels.fused_attn_kernel to false."
_OFF = {"kernels.fused_attn_kernel": False}
# Relative error that two orders of rounding may make in one layer.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Gives every attention layer of the trainer's models the fused forward; None where it was neither asked for nor left to be chosen."""
    if config.kernels.fused_attn_kernel is not True:
        return left_out(FEATURE, built.notes.reasons.get("kernels.fused_attn_kernel"))
    layers = attention_layers(built)
    if not layers:
        raise ModelError(
            f"kernels.fused_attn_kernel: the model has no attention layer of {', '.join(SERVED)}.", _TURN_OFF
        ).mended_by(_OFF)
    if (missing := lacking(next(layers[0].parameters()).device)) is not None:
        raise ModelError(f"kernels.fused_attn_kernel: the kernel needs {missing}.", _TURN_OFF).mended_by(_OFF)
    if _dtype_into(layers[0]) == torch.float64:
        raise ModelError(
            "kernels.fused_attn_kernel: no kernel serves float64; float32, float16 and bfloat16 are served.", _TURN_OFF
        ).mended_by(_OFF)
    undo = fuse(layers)
    alone = (
        ""
        if _family(layers[0]).normed
        else (
            ", the rotation alone: their queries and keys have no norms; where layers are compiled the compiler makes it"
        )
    )
    detail = f"attention layers; one kernel forward, one backward{alone}"
    return Applied(FEATURE, True, "Triton", len(layers), detail, undo)


def attention_layers(built: Built) -> list[torch.nn.Module]:
    """Every layer of a known class among the trainer's models."""
    return [module for module in built.modules() if _served(type(module))]


def _served(kind: type) -> bool:
    family = CLASSES.get(kind.__module__)
    return family is not None and kind.__name__ == family.name


def fuse(layers: list[torch.nn.Module]) -> Callable[[], None]:
    """Gives these layers the fused forward; returns the undo. Raises ModelError where a layer would answer otherwise."""
    forwards = {kind: _forward_of(kind) for kind in {type(layer) for layer in layers}}
    for kind, forward in forwards.items():
        _try(next(layer for layer in layers if type(layer) is kind), forward)
    undos = [put(layer, "forward", types.MethodType(forwards[type(layer)], layer)) for layer in layers]
    return all_of(undos)


def _forward_of(kind: type) -> Callable[..., Any]:
    """The fused forward for a class. What `attention: eager` asks for is looked up here: no graph may hold an import."""
    module: Any = importlib.import_module(kind.__module__)
    family = CLASSES[kind.__module__]
    attended = _attended(family, module.eager_attention_forward)
    return (
        _sharing(attended) if family.sharing else _usual(family, _turned(family, module.apply_rotary_pos_emb), attended)
    )


Turned = Callable[[Any, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]], tuple[Any, Any]]
"""(layer, queries and keys [B, T, H, D], cos and sin [B or 1, T, D]) -> both [B, H, T, D], normed and rotated."""


def forward_by(kind: type, turned: Turned) -> Callable[..., Any]:
    """The forward of a class that `is_whole_heads` knows, with `turned` for its norms and rotation."""
    module: Any = importlib.import_module(kind.__module__)
    family = CLASSES[kind.__module__]
    return _usual(family, turned, _attended(family, module.eager_attention_forward))


def is_whole_heads(layer: torch.nn.Module) -> bool:
    """Whether a served layer rotates queries and keys of its own in all their numbers."""
    family, rotary = _family(layer), getattr(layer.config, "rope_parameters", None) or {}
    return not (family.gated or family.sharing) and rotary.get("partial_rotary_factor", 1.0) == 1.0


def _attended(family: Family, eager: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, Any]]:
    def attended(self: Any, q: Any, k: Any, v: Any, mask: Any, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """[B, T, H * D] of what every head found, told how far and how strongly it attends as the class tells it."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        holder = self.config if family.window == "config" else self
        own = {"sliding_window": getattr(holder, "sliding_window", None)} if family.window else {}
        own |= {"softcap": self.attn_logit_softcapping} if family.capped else {}
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **own, **more)
        return out.flatten(2).contiguous(), weights

    return attended


def _turned(family: Family, plain: Callable[..., Any]) -> Turned:
    """By our kernels; `plain` rotates queries and keys in torch, where the compiler is to make it."""

    def turned(self: Any, q: Any, k: Any, angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        """[B, H, T, D] of queries and keys, normed where the class norms them, and rotated."""
        if not family.normed and torch.compiler.is_compiling():
            # The compiler makes it together with what is around it: on an H200 the kernel's step took 1.04 of that time.
            return plain(q.transpose(1, 2), k.transpose(1, 2), *angles)
        if family.normed:
            scales = _scale(self.q_norm), _scale(self.k_norm)
            q, k = norm_rope(q, k, *scales, *angles, eps=_eps(self.q_norm), unit_offset=family.unit_offset)
        else:
            q, k = rope(q, k, *angles)
        return q.transpose(1, 2), k.transpose(1, 2)

    return turned


def _usual(family: Family, turned: Turned, attended: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention with queries and keys normed and rotated at once; arguments and results are the class's own."""
        rows = hidden_states.shape[:-1]
        heads = (*rows, -1, self.head_dim)
        if family.gated:
            q, gate = self.q_proj(hidden_states).view(*rows, -1, 2 * self.head_dim).chunk(2, dim=-1)
        else:
            q = self.q_proj(hidden_states).view(heads)
        q, k = turned(self, q, self.k_proj(hidden_states).view(heads), position_embeddings)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if (cache := kwargs.pop(CACHE, None)) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out, weights = attended(self, q, k, v, attention_mask, kwargs)
        if family.gated:
            out = out * torch.sigmoid(gate.reshape(*rows, -1))
        return self.o_proj(out), weights

    return forward


def _sharing(attended: Callable[..., Any]) -> Callable[..., Any]:
    def sharing(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        shared_kv_states: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same where a layer may have no keys and values of its own; then the kernel turns queries alone."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        alone, cache = self.is_kv_shared_layer, kwargs.pop(CACHE, None)
        q = self.q_proj(hidden_states).view(heads)
        raw = q[:, :, :0] if alone else self.k_proj(hidden_states).view(heads)
        q, k = norm_rope(
            q, raw, _scale(self.q_norm), _scale(self.q_norm if alone else self.k_norm), *position_embeddings,
            eps=_eps(self.q_norm),
        )  # fmt: skip
        if alone:
            k, v = shared_kv_states[self.layer_type]
        else:
            k = k.transpose(1, 2)
            v = self.v_norm(raw if self.v_proj is None else self.v_proj(hidden_states).view(heads)).transpose(1, 2)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx)
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = k, v
        out, weights = attended(self, q.transpose(1, 2), k, v, attention_mask, kwargs)
        return self.o_proj(out), weights

    return sharing


def _family(layer: torch.nn.Module) -> Family:
    return CLASSES[type(layer).__module__]


def _dtype_into(layer: Any) -> torch.dtype:
    """The format in which hidden states come: of the norm or of the projection; bfloat16 around weights of fewer bits."""
    if _family(layer).normed:
        return dtype_around(_source(layer.q_norm))
    dtype = getattr(getattr(layer.q_proj, "weight", None), "dtype", None)
    return dtype if dtype in FORMATS else torch.bfloat16


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


def _eps(norm: Any) -> float:
    source = _source(norm)
    return float(source.variance_epsilon if hasattr(source, "variance_epsilon") else source.eps)


@torch.no_grad()
def _try(layer: Any, forward: Callable[..., Any]) -> None:
    """Both forms of one layer on 8 tokens. Raises ModelError where they differ by more than their rounding."""
    dtype, device = _dtype_into(layer), next(layer.parameters()).device
    # Numbers of its own: a run with the kernel draws what it would draw without.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 8, layer.config.hidden_size, generator=generator).to(device, dtype)
    rotated = layer.head_dim // (2 if _family(layer).gated else 1) // 2
    angles = torch.rand(1, 8, rotated, generator=generator).to(device).repeat(1, 1, 2)
    given: dict[str, Any] = {
        "position_embeddings": (angles.cos().to(dtype), angles.sin().to(dtype)),
        "attention_mask": None,
    }
    given |= {"shared_kv_states": {}} if _family(layer).sharing else {}
    with in_mode(layer, training=False):
        try:
            theirs = layer(hidden, **given)[0]
        except _CALLED_OTHERWISE as problem:
            raise ModelError(
                f"kernels.fused_attn_kernel: {type(layer).__name__} of this release of transformers is called otherwise "
                f"({visible(str(problem))[:200]}).",
                f"Take a newer transformers. {_TURN_OFF}",
            ) from problem
        ours = forward(layer, hidden, **given)[0]
    error = float((ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-12))
    if not error <= _TOLERANCE.get(dtype, 1e-4):
        raise ModelError(
            f"kernels.fused_attn_kernel: {type(layer).__name__} of this release of transformers computes something else "
            f"(relative error {error:.1e}).",
            _TURN_OFF,
        ).mended_by(_OFF)
