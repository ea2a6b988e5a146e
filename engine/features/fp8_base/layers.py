"""`model.quantization: fp8`: frozen linear layers under an adapter are rounded once to FP8 and multiply in FP8 from then on.

Each decoder layer's weights become float8_e4m3fn (arXiv:2209.05433) with one scale for each output row, and are the only
copy that stays. Forward, the input is rounded a token at a time. Backward, the gradient takes the weight's scales upon
itself before it is rounded, since the product then sums over rows, and meets a transposed copy made for the moment. Every
scale is a power of two, so that scaling rounds nothing: a number is rounded once, and the weights are the same each time.
In compiled layers the rounding becomes part of the norm or the activation before it, and layers that read one input share
its rounded form (`engine.kernels.fp8_rows`). Adapters and all gradients keep the model's format.

Heads, embeddings, routers and experts that are held together stay as they are, and so do layers that would gain little
(`engine.features.fp8_base`). Refuses a machine without FP8 products, and a model in which there is nothing to round.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config.facts import Facts
from engine.config.tree import RunConfig
from engine.errors import ModelError, visible
from engine.features import fp8_base
from engine.features.built import cards_here, decoder_layers
from engine.features.feature import refuse
from engine.kernels.fp8_rows import rounded_rows, rounded_rows_reference, transposed, transposed_reference
from engine.models.stored_fp8 import Fp8Linear

_LEAVE_OUT = "Set model.quantization to none."


@dataclass
class Computed:
    """What became of the layers, for the receipt."""

    layers: int
    left_out: Counter[str]
    error: float
    """Root mean square of what rounding changed, over that of the weights."""
    plain: dict[Fp8BaseLinear, torch.Tensor] = field(default_factory=dict)
    """The first decoder layer's weights as they were, on the host: what its output is compared with on the first batch."""


class Fp8BaseLinear(Fp8Linear):
    """A frozen linear layer that multiplies in FP8: `round(x) @ round(weight).T + bias`, each with a scale a row.

    `weight` (N, K) float8_e4m3fn, `weight_scale_inv` (N, 1) float32; x (..., K) and the result (..., N) of the model's
    format. The gradient of x is that of the product of the rounded numbers; the weight has none.
    """

    computed: Computed
    """What became of all layers that were swapped together with it."""

    def __init__(self, layer: torch.nn.Linear, rounded: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(layer, rounded, scale, (1, layer.in_features))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = _in_graph if torch.compiler.is_compiling() else _Product.apply
        out: torch.Tensor = product(input, self.weight, self.weight_scale_inv)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """Keeps nothing of its input: the weight is there anyway."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return _outputs(x, rounded_rows(_rows(x)), weight, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return _input_gradient(gradient, rounded_rows(_rows(gradient), scale.t()), transposed(weight)), None, None


class _Traced(torch.autograd.Function):
    """The same in plain operations, for code that is being compiled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return _outputs(x, rounded_rows_reference(_rows(x)), weight, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None
        rounded = rounded_rows_reference(_rows(gradient), scale.t())
        return _input_gradient(gradient, rounded, transposed_reference(weight)), None, None


@torch.compiler.allow_in_graph
def _in_graph(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One node for the first half of the compiler, which with torch 2.11 would otherwise forget that a checkpoint around
    it wants its operations computed again."""
    out: torch.Tensor = _Traced.apply(x, weight, scale)
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _outputs(
    x: torch.Tensor, rounded: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    return _scaled_product(*rounded, weight, scale, x.dtype).unflatten(0, x.shape[:-1])


def _input_gradient(
    gradient: torch.Tensor, rounded: tuple[torch.Tensor, torch.Tensor], w_KN: torch.Tensor
) -> torch.Tensor:
    """From the gradient that took the weight's scales upon itself; the turned weight has none."""
    ones = torch.ones(w_KN.shape[0], 1, dtype=torch.float32, device=w_KN.device)
    return _scaled_product(*rounded, w_KN, ones, gradient.dtype).unflatten(0, gradient.shape[:-1])


def _scaled_product(
    left: torch.Tensor, left_scale: torch.Tensor, right: torch.Tensor, right_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`(left * left_scale) @ (right * right_scale).T`, left (T, K), right (N, K), scales (rows, 1), summed in float32."""
    if left.is_cuda:
        # bfloat16 is all that the card's product gives with a scale a row
        out = torch._scaled_mm(
            left, right.t(), left_scale, right_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return out.to(dtype)
    # torch 2.11 on a CPU takes one scale; powers of two may as well come after the product
    one = torch.ones((), dtype=torch.float32, device=left.device)
    out = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)
    return (out * left_scale * right_scale.t()).to(dtype)


def compute_in_fp8(
    model: torch.nn.Module, device: torch.device | None = None, *, stay: bool = True, least: int | None = None
) -> Computed:
    """Swaps the linear layers of the model's decoder layers, one at a time; what became of them.

    Each weight is rounded on `device` (its own if none is given), so that there is one plain weight there at a time, and
    the rounded one stays there, or else goes back to where the plain one was. `least` is the size from which a layer is
    served, if not the usual one. Raises ModelError for weights that are not finite and where no layer is served.
    """
    left_out: Counter[str] = Counter()
    changed, whole = 0.0, 0.0
    swapped: dict[int, Fp8BaseLinear] = {}
    first: dict[Fp8BaseLinear, torch.Tensor] = {}
    for number, layer in enumerate(decoder_layers(model)):
        left_out["experts held together"] += sum(p.dim() == 3 and p.is_floating_point() for p in layer.parameters())
        for parent, name, module in _linear_layers(layer):
            if (reason := fp8_base.why_not(name, *module.weight.shape, least=least)) is not None:
                left_out[reason] += 1
                continue
            if id(module) not in swapped:
                made, apart, size = _rounded(module, f"{name} of layer {number}", device, stay)
                swapped[id(module)], changed, whole = made, changed + apart, whole + size
                if number == 0:
                    first[made] = module.weight.data
            setattr(parent, name, swapped[id(module)])
    if not swapped:
        reasons = ", ".join(f"{count} {what}" for what, count in sorted((+left_out).items()))
        raise ModelError(
            f"model.quantization: the model has no linear layers that FP8 would serve{f' ({reasons})' if reasons else ''}.",
            _LEAVE_OUT,
        )
    computed = Computed(len(swapped), +left_out, (changed / whole) ** 0.5 if whole else 0.0, first)
    for made in swapped.values():
        made.computed = computed
    return computed


def _linear_layers(layer: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Where the layer's plain linear layers stand."""
    return [
        (parent, name, module)
        for parent in layer.modules()
        for name, module in parent.named_children()
        if type(module) is torch.nn.Linear
    ]


def _rounded(
    module: torch.nn.Linear, called: str, device: torch.device | None, stay: bool
) -> tuple[Fp8BaseLinear, float, float]:
    """The layer that computes in FP8, the sum of squares of what rounding changed, and that of the weight."""
    home, weight = module.weight.device, module.weight.data.to(device or module.weight.device)
    numbers, scale = rounded_rows(weight)
    changed = (numbers.float() * scale - weight).square().sum(dtype=torch.float64).item()
    whole = weight.float().square().sum(dtype=torch.float64).item()
    if not (math.isfinite(changed) and math.isfinite(whole)):
        raise ModelError(
            f"model.name: the weight {visible(called)} holds numbers that are not finite.", "The files may be damaged."
        )
    if not stay:
        numbers, scale = numbers.to(home), scale.to(home)
    if module.bias is not None:
        module.bias.data = module.bias.data.to(numbers.device)
    return Fp8BaseLinear(module, numbers, scale), changed, whole


def refuse_what_has_no_fp8(config: RunConfig) -> None:
    """Raises ModelError for a machine or settings with which frozen layers cannot be computed in FP8; rules say so before,
    where they can."""
    refuse(fp8_base, config, cards_here(), machine_alone=True)
    refuse(fp8_base, config, Facts())
