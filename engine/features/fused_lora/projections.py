"""What a linear layer, with PEFT's adapter or without, computes in closed form, or why PEFT keeps it.

`described` looks at a layer as it is at this moment, so adapters that are merged, switched off or joined by another are seen
when they are. Base weights may be plain, bitsandbytes' 4-bit or stored in FP8 or packed integers; what is no plain LoRA (DoRA and
PEFT's other variants, several active adapters, an adapter's own bias), a layer with hooks, and a base of any other class stay as
they are. `gated_form` knows a SwiGLU or GeGLU block by what its class's own code makes of three small matrices, not by its name.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from peft.tuners.lora import LoraLayer

from engine.features.compile.grouped import View
from engine.kernels.gated import ACTIVATIONS, gated_reference
from engine.kernels.lora import Projection, Weights
from engine.models.stored_fp8 import Fp8Linear, dequantized
from engine.models.stored_packed.linear import PackedLinear

Described = tuple[Projection, Weights]
BLOCKS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
"""The projections of a gated block, by the names under which models hold them; gate and up may be one."""


def described(layer: Any, x: torch.Tensor | None = None) -> Described | str:
    """The layer's projection and its weights as they are now, or the reason in words why it is left as it is.

    With `x`, its input, number formats are held against it too.
    """
    adapted = isinstance(layer, LoraLayer)
    base = layer.base_layer if adapted else layer
    reason = _refusal_of_base(base, x) or (_refusal_of_adapter(layer) if adapted else None)
    if reason is None and any(map(_hooked, (layer, base, *(_pair(layer) if adapted else ())))):
        reason = "hooks on it"
    if reason is not None:
        return reason
    weight = base.weight if base.weight.requires_grad else None
    bias = base.bias if base.bias is not None and base.bias.requires_grad else None
    width = base.out_features
    if not adapted:
        return Projection(base, _base_weight(base), width), Weights(weight, bias)
    name = layer.active_adapters[0]
    drop = layer.lora_dropout[name]
    rate = float(drop.p) if isinstance(drop, torch.nn.Dropout) and drop.training else 0.0
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    return Projection(base, _base_weight(base), width, float(layer.scaling[name]), rate), Weights(weight, bias, a, b)


def all_described(layers: Sequence[Any], x: torch.Tensor) -> list[Described] | None:
    """Each layer's projection for this input, or None where one is left as it is."""
    if torch.is_autocast_enabled(x.device.type):
        return None
    found = []
    for layer in layers:
        each = described(layer, x)
        if isinstance(each, str):
            return None
        found.append(each)
    return found


def _refusal_of_base(base: Any, x: torch.Tensor | None) -> str | None:
    kind = type(base)
    if kind is torch.nn.Linear:
        weight = base.weight
        if type(weight.data) is not torch.Tensor or not weight.is_floating_point():
            return f"weights held as {type(weight.data).__name__}"
        return "another number format than its input" if x is not None and x.dtype != weight.dtype else None
    if kind in (Fp8Linear, PackedLinear):
        return None
    if _is_4bit(base):
        if getattr(_quant_state(base), "packing_format_for_cpu", False):
            return "4-bit weights packed for sampling on a CPU"
        own = base.compute_dtype if base.compute_type_is_set else None
        other = x is not None and own is not None and own != x.dtype
        return "4-bit weights that compute in another format" if other else None
    return f"{kind.__name__} weights"


def _refusal_of_adapter(layer: Any) -> str | None:
    if type(layer).__name__ not in ("Linear", "Linear4bit") or layer.fan_in_fan_out:
        return f"PEFT's {type(layer).__name__} of this kind"
    if layer.disable_adapters or layer.merged:
        return "adapters switched off or merged"
    if len(layer.active_adapters) != 1:
        return "several active adapters"
    name = layer.active_adapters[0]
    if name not in layer.lora_A:
        return "no active adapter"
    if name in layer.lora_variant:
        kind = type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
        return "DoRA" if kind == "Dora" else kind
    if layer.lora_bias[name]:
        return "an adapter's own bias"
    if not isinstance(layer.lora_dropout[name], (torch.nn.Identity, torch.nn.Dropout)):
        return "another dropout"
    return None


def _pair(layer: Any) -> tuple[Any, Any]:
    """The two matrices of the one active adapter, which closed form reads without calling them."""
    name = layer.active_adapters[0]
    return layer.lora_A[name], layer.lora_B[name]


_CLOSED_FORM = "closed_form"
Forward = TypeVar("Forward", bound=Callable[..., Any])


def in_closed_form(forward: Forward) -> Forward:
    """Marks a forward of ours, which other features may put their own around as if it were the class's."""
    setattr(forward, _CLOSED_FORM, True)  # functions take attributes, `Callable` names none
    return forward


def is_closed_form(forward: Any) -> bool:
    """Whether a module's forward is one of those."""
    return hasattr(forward, _CLOSED_FORM)


def _hooked(module: Any) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or ("forward" in vars(module) and not is_closed_form(vars(module)["forward"]))


def _is_4bit(base: Any) -> bool:
    return type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes.")


def _quant_state(base: Any) -> Any:
    """How a 4-bit weight is packed; one that fully_shard has put together is a plain parameter, and its layer knows it."""
    state = getattr(base.weight, "quant_state", None)
    return base.quant_state if state is None else state


def _base_weight(base: Any) -> Callable[[torch.dtype], torch.Tensor]:
    """The base's weight [O, I] in a format; a quantized one is made for the product that asks and kept by none."""
    if isinstance(base, Fp8Linear):
        return lambda dtype: dequantized(base.weight, base.weight_scale_inv, base.block, dtype)
    if isinstance(base, PackedLinear):
        return base.dequantize
    if _is_4bit(base):
        from bitsandbytes.functional import dequantize_4bit

        return lambda dtype: dequantize_4bit(base.weight.data.view(-1, 1), _quant_state(base)).to(dtype)
    return lambda dtype: base.weight.to(dtype)


def block_names(module: Any) -> tuple[str, ...] | None:
    """The names of the projections that make this module look like a gated block, or None."""
    return next((names for names in BLOCKS if all(name in module._modules for name in names)), None)


def gated_form(module: Any) -> str | None:
    """The activation of a block that computes `down(act(gate(x)) * up(x))`, or None for any other module.

    Asked is the forward of its class, with small matrices in place of the projections.
    """
    forward, names = module.forward, block_names(module)
    if not isinstance(forward, types.MethodType) or names is None:
        return None
    code = forward.__func__
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    both, down, x = drawn(4, 12), drawn(6, 4), drawn(2, 3, 4)
    gate, up = both.chunk(2, dim=-1)
    small = {
        "gate_proj": lambda x: x @ gate, "up_proj": lambda x: x @ up, "gate_up_proj": lambda x: x @ both,
        "down_proj": lambda x: x @ down,
    }  # fmt: skip
    try:
        with torch.no_grad():
            found = code(View(module, {name: small[name] for name in names}), x)
    except (TypeError, RuntimeError, AttributeError, ValueError, IndexError):
        return None
    if not isinstance(found, torch.Tensor) or found.shape != x.shape:
        return None
    for activation in ACTIVATIONS:
        wanted = gated_reference(x @ gate, x @ up, activation) @ down
        if float((found - wanted).norm()) <= 1e-9 * float(wanted.norm()):
            return activation
    return None
