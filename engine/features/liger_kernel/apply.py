"""`kernels.use_liger_kernel`: norms, rotary embeddings and gates by Liger's kernels, on this run's own layers.

The package's own way in, `apply_liger_kernel_to_*`, writes into modules of transformers, where it stays for whatever the
process builds next. Here its functions alone are used, in a `forward` on each instance. What a norm computes is asked of its
class with small numbers (weights or one more than weights, rounded before or after them), as is what a gated block's gate
is; rotations are taken in the attention layers that `kernels.fused_attn_kernel` serves, where whole heads are rotated.
One layer of each kind is then held to its class, outputs and gradients. Norms give their gradient a place of its own: Liger's
default writes it over the gradient that came in, which a residual stream behind the norm needs as well. The gates' gradients
are written over gate and up, which no projection keeps, and the rotation over queries and keys, so it has no place where
a checkpointing tier keeps those. A pass that is under autocast, in mixed formats or empty goes through the class.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.compat.instances import all_of, atomic, in_mode, put
from engine.config.facts import Facts
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features import liger_kernel
from engine.features.applied import Applied, left_out
from engine.features.built import Built, base_model
from engine.features.compile.grouped import View
from engine.features.feature import refuse
from engine.features.fused_lora.projections import block_names, gated_form
from engine.features.fused_norm_rope.apply import attention_layers, forward_by, is_whole_heads
from engine.hardware import installed
from engine.kernels.device import kernel_serves, lacking

FEATURE = "Liger kernels"
_TURN_OFF = "Set kernels.use_liger_kernel to false."
_OFF = {"kernels.use_liger_kernel": False}
_GATES = {"silu": "swiglu", "gelu_tanh": "geglu"}
"""What a gated block's gate is -> the part that computes it."""
_FORMATS = (torch.float32, torch.float16, torch.bfloat16)
# Relative error that two orders of rounding may make in one layer, in outputs and gradients.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_SMALL = (TypeError, RuntimeError, AttributeError, ValueError, IndexError)
_WORDS = {"rms_norm": "norms", "rope": "rotations", "swiglu": "gated blocks", "geglu": "gated blocks (GELU)"}

Forward = Callable[..., Any]


@dataclass
class Found:
    """What became of the layers, for the receipt."""

    taken: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    """Parts that are not Liger's, with the reason."""

    def summary(self) -> str:
        """What was taken and what was left, in words."""
        said = ", ".join(f"{count:,} {_WORDS[part]}" for part, count in self.taken.items())
        return "; ".join([said, *(f"{part} left out: {reason}" for part, reason in self.left.items())])


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Gives norms, attention layers and gated blocks of the trainer's models a forward by Liger's kernels; None where it was
    neither asked for nor left to be chosen. Raises ModelError where nothing is served or a layer answers otherwise."""
    if config.kernels.use_liger_kernel is not True:
        return left_out(FEATURE, built.notes.reasons.get("kernels.use_liger_kernel"))
    version = installed(liger_kernel.PACKAGE)
    refuse(liger_kernel, config, Facts(packages={liger_kernel.PACKAGE: version}), machine_alone=True)
    if (missing := lacking(_device(built))) is not None:
        raise ModelError(f"kernels.use_liger_kernel: the kernels need {missing}.", _TURN_OFF).mended_by(_OFF)
    found, undo = use(config, built)
    if not found.taken:
        reasons = "; ".join(f"{part}: {reason}" for part, reason in found.left.items())
        raise ModelError(f"kernels.use_liger_kernel: it has nothing to compute ({reasons}).", _TURN_OFF).mended_by(_OFF)
    detail = f"{found.summary()}; {liger_kernel.PACKAGE} {version}"
    return Applied(FEATURE, True, " + ".join(found.taken), found.taken.total(), detail, undo)


def why_not(built: Built) -> str | None:
    """Why Liger's kernels have no place in this process, or None."""
    if installed(liger_kernel.PACKAGE) is None:
        return f"the package {liger_kernel.PACKAGE} is not installed (`{liger_kernel.INSTALL}`)"
    missing = lacking(_device(built))
    return None if missing is None else f"the kernels need {missing}"


@atomic()
def use(config: RunConfig, built: Built) -> tuple[Found, Callable[[], None]]:
    """Gives every layer that a part serves its forward; what was found, and the undo."""
    found, undos = Found(), []
    for part in liger_kernel.parts(config):
        reason = liger_kernel.of_other_settings(part, config)
        served = [] if reason is not None else list(_SERVED[part](built, part))
        if not served:
            found.left[part] = reason or "no layer has it"
            continue
        for module, forward in _one_per_class(served):
            _compare(part, module, forward, base_model(built.policy).dtype)
        undos += [put(module, "forward", types.MethodType(forward, module)) for module, forward in served]
        found.taken[part] = len(served)
    return found, all_of(undos)


def _device(built: Built) -> torch.device:
    return next(built.policy.parameters()).device


def _one_per_class(served: list[tuple[Any, Forward]]) -> list[tuple[Any, Forward]]:
    """One layer of each class and width."""
    kinds = {
        (type(module), *(tuple(x.shape) for x in module.parameters(recurse=False))): (module, f) for module, f in served
    }
    return list(kinds.values())


# -- norms -------------------------------------------------------------------------------------------------------------
def _norms(built: Built, part: str) -> list[tuple[Any, Forward]]:
    """Norms that compute as their class does, but for those whose weights another kernel reads."""
    read = {id(each) for layer in attention_layers(built) if "forward" in vars(layer) for each in layer.modules()}
    forms: dict[tuple[type, float], tuple[float, str] | None] = {}
    served = []
    for module in built.modules():
        if not _is_norm(module) or id(module) in read:
            continue
        kind = type(module), _eps(module)
        if kind not in forms:
            forms[kind] = norm_form(module)
        if (form := forms[kind]) is not None:
            served.append((module, _normed(*form)))
    return served


def _is_norm(module: Any) -> bool:
    weights = dict(module.named_parameters(recurse=False))
    alone = set(weights) == {"weight"} and weights["weight"].dim() == 1 and not list(module.children())
    return alone and "RMSNorm" in type(module).__name__ and "forward" not in vars(module) and bool(_eps(module))


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)


def norm_form(norm: Any) -> tuple[float, str] | None:
    """What is added to the weights of this norm, and Liger's name for where it rounds: `llama` before the weights, `gemma`
    after them; None for a module that computes something else.

    Asked is the forward of its class, with small numbers in place of its weights.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, generator=generator), torch.randn(64, 8, generator=generator)
    errors: dict[tuple[float, str], float] = {}
    for form in ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma")):
        try:
            wide, rounded = (
                _error_of_form(norm, form, weight.to(dtype), x.to(dtype)) for dtype in (torch.float32, torch.bfloat16)
            )
        except _SMALL:
            return None
        if wide <= 1e-5:
            errors[form] = rounded
    return min(errors, key=lambda form: errors[form]) if errors else None


def _error_of_form(norm: Any, form: tuple[float, str], weight: torch.Tensor, x: torch.Tensor) -> float:
    with torch.no_grad():
        found = type(norm).forward(View(norm, {"weight": weight}), x)
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + _eps(norm))
        scaled = (
            normed.to(x.dtype) * weight if form[1] == "llama" else (normed * (form[0] + weight.float())).to(x.dtype)
        )
    return _relative(found, scaled)


def _normed(offset: float, casting: str) -> Forward:
    from liger_kernel.ops import LigerRMSNormFunction

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not _serves(hidden_states, self.weight):
            plain: torch.Tensor = type(self).forward(self, hidden_states)
            return plain
        # Not in place: a gradient that came in may be a residual stream's too.
        out: torch.Tensor = LigerRMSNormFunction.apply(hidden_states, self.weight, _eps(self), offset, casting, False)
        return out

    return forward


# -- gates -------------------------------------------------------------------------------------------------------------
def _gated(built: Built, part: str) -> list[tuple[Any, Forward]]:
    """Gated blocks of two projections whose gate this part computes."""
    served = []
    for module in built.modules():
        names = block_names(module)
        if (
            names is None
            or len(names) != 3
            or "forward" in vars(module)
            or any(_hooked(module, name) for name in names[:2])
        ):
            continue
        # Each by itself: two models of one class may have other activations.
        if _GATES.get(gated_form(module) or "") == part:
            served.append((module, _block(part)))
    return served


def _hooked(module: Any, name: str) -> bool:
    """Whether somebody else gets the projection's result, which the backward pass writes over."""
    return bool(module._modules[name]._forward_hooks)


def _block(part: str) -> Forward:
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    function: Any = LigerSiLUMulFunction if part == "swiglu" else LigerGELUMulFunction

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not _serves(x):
            plain: torch.Tensor = type(self).forward(self, x)
            return plain
        out: torch.Tensor = self.down_proj(function.apply(self.gate_proj(x), self.up_proj(x)))
        return out

    return forward


# -- rotations ---------------------------------------------------------------------------------------------------------
def _rotating(built: Built, part: str) -> list[tuple[Any, Forward]]:
    """Attention layers of known classes that rotate whole heads and compute as their class does."""
    layers = [layer for layer in attention_layers(built) if "forward" not in vars(layer) and is_whole_heads(layer)]
    forwards = {kind: forward_by(kind, _turned) for kind in {type(layer) for layer in layers}}
    return [(layer, forwards[type(layer)]) for layer in layers]


def _turned(layer: Any, q: Any, k: Any, angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
    """[B, H, T, D] of queries and keys [B, T, H, D], normed by the layer's own norms where it has some, and rotated."""
    from liger_kernel.ops import LigerRopeFunction

    if hasattr(layer, "q_norm"):
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if not _serves(q, k):
        cos, sin = (each.unsqueeze(1) for each in angles)
        return tuple(x * cos + _half_turned(x) * sin for x in (q, k))
    turned: tuple[torch.Tensor, torch.Tensor] = LigerRopeFunction.apply(q, k, *angles)
    return turned


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


_SERVED: dict[str, Callable[[Built, str], list[tuple[Any, Forward]]]] = {
    "rms_norm": _norms,
    "rope": _rotating,
    "swiglu": _gated,
    "geglu": _gated,
}


def _serves(*tensors: torch.Tensor) -> bool:
    """Whether a kernel may compute with these: one format that it takes, somewhere where it runs, outside of autocast."""
    first = tensors[0]
    one_format = first.dtype in _FORMATS and all(x.dtype == first.dtype for x in tensors)
    return (
        one_format
        and first.numel() > 0
        and not torch.is_autocast_enabled(first.device.type)
        and kernel_serves(*tensors)
    )


# -- what is held to its class -----------------------------------------------------------------------------------------
def _compare(part: str, module: Any, forward: Forward, dtype: torch.dtype) -> None:
    """Both forms of one layer on 2 x 8 tokens, forward and backward. Raises ModelError where they differ by more than their
    rounding."""
    dtype = dtype if dtype in _FORMATS else torch.bfloat16
    device = next(module.parameters()).device
    # Numbers of its own: a run with the kernels draws what it would draw without.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 8, _width(part, module), generator=generator).to(device, dtype)
    given: dict[str, Any] = {}
    if part == "rope":
        angles = torch.rand(1, 8, module.head_dim // 2, generator=generator).to(device).repeat(1, 1, 2)
        given = {"position_embeddings": (angles.cos().to(dtype), angles.sin().to(dtype)), "attention_mask": None}
    upstream = torch.randn(hidden.shape, generator=generator).to(device, dtype)
    with in_mode(module, training=False), torch.enable_grad():
        theirs, ours = (
            _with_gradients(module, each, hidden, upstream, given) for each in (type(module).forward, forward)
        )
    error = max(_relative(mine, plain) for mine, plain in zip(ours, theirs, strict=True) if plain is not None)
    if not error <= _TOLERANCE[dtype]:
        raise ModelError(
            f"kernels.use_liger_kernel: {part} of {type(module).__name__} is computed otherwise (relative error {error:.1e}).",
            f"Set kernels.liger_kernel_config.{part} to false.",
        ).mended_by({f"kernels.liger_kernel_config.{part}": False})


def _width(part: str, module: Any) -> int:
    if part == "rms_norm":
        return int(module.weight.shape[0])
    if part == "rope":
        return int(module.config.hidden_size)
    return int(module.gate_proj.in_features)


def _with_gradients(
    module: Any, forward: Forward, hidden: torch.Tensor, upstream: torch.Tensor, given: dict[str, Any]
) -> list[torch.Tensor | None]:
    leaf = hidden.detach().clone().requires_grad_()
    out = forward(module, leaf, **given)
    out = out[0] if isinstance(out, tuple) else out
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    # What the backward pass writes over is its own.
    return [out.detach().clone(), *torch.autograd.grad(out, [leaf, *trained], upstream.clone(), allow_unused=True)]


def _relative(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    if found is None:
        return float("inf")
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))
