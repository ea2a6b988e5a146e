"""Bases with random weights, made where they are to lie: packed one expert at a time, or on the host for layers that stream.

No more than the finished base and one expert lies on the device while it is made, so that a model that fits in few bits is
made on a card that has no room for it in 16. Nothing is read: numbers that are packed as files hold them are drawn as bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from engine.kernels.experts.packed import PackedExperts, Packer, of_mxfp4
from engine.models.packed_experts import PROJECTIONS

SPREAD = 0.02
"""Standard deviation of a weight, as transformers begins with."""
BLOCK, WEIGHTS = 32, 33_554_393
"""Numbers of one MXFP4 scale; how many numbers are drawn for the host, where they are repeated: an odd count, so that no
expert equals another."""


def random_base(
    kind: Any,
    shape: Any,
    dtype: torch.dtype,
    device: str,
    packed: str = "",
    *,
    on_host: bool = False,
    known: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """A model of this shape. `packed`: nf4 holds linear layers and experts of the layers in NF4, mxfp4 experts alone, as
    files would hold them; `on_host` leaves the layers in the host's memory; weights that are `known` by name are taken."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = kind.from_config(copy.deepcopy(shape), dtype=dtype)
    layers = {id(module) for layer in model.model.layers for module in layer.modules()}
    drawn = _Drawn(dtype) if on_host else None
    for path, module in list(model.named_modules()):
        inside = id(module) in layers
        if "inv_freq" in module._buffers:
            with torch.device(device):
                model.set_submodule(path, type(module)(model.config).to(device))
            continue
        if inside and packed == "nf4" and isinstance(module, torch.nn.Linear):
            model.set_submodule(path, linear_in_nf4(module, _like(module.weight, "weight", device)))
            continue
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if known is not None:
                made: torch.Tensor = known[f"{path}.{name}"]
            elif inside and packed and name in PROJECTIONS and weight.dim() == 3:
                made = experts_in(packed, module, weight, device)
            elif inside and drawn is not None:
                made = drawn.like(weight, name)
            else:
                made = _like(weight, name, device)
            module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    model.tie_weights()
    if packed == "nf4":
        model.is_loaded_in_4bit = True
    return model


def _like(weight: torch.Tensor, name: str, device: str) -> torch.Tensor:
    """A matrix drawn, a norm of ones, biases of zeros."""
    made = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    if weight.dim() > 1:
        return made.normal_(0, SPREAD)
    return made.fill_(1 if name == "weight" else 0)


class _Drawn:
    """The same numbers over and over, which the host copies faster than it draws."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.numbers = torch.empty(WEIGHTS, dtype=dtype).normal_(0, SPREAD)

    def like(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        if weight.dim() < 2:
            return _like(weight, name, "cpu")
        made = torch.empty(weight.shape, dtype=weight.dtype)
        for part in made.view(-1).split(WEIGHTS):
            part.copy_(self.numbers[: len(part)])
        return made


def linear_in_nf4(module: torch.nn.Linear, weight: torch.Tensor) -> torch.nn.Module:
    """The layer with this weight in NF4, scales quantized again, as bitsandbytes holds it."""
    import bitsandbytes

    few = bitsandbytes.nn.Linear4bit(
        module.in_features, module.out_features, bias=module.bias is not None, compute_dtype=weight.dtype,
        compress_statistics=True, quant_type="nf4", device="meta",
    )  # fmt: skip
    few.weight = bitsandbytes.nn.Params4bit(
        weight.detach(), requires_grad=False, quant_type="nf4", compress_statistics=True
    ).to(weight.device)
    few.bias = module.bias
    if module.bias is not None and module.bias.is_meta:
        few.bias = torch.nn.Parameter(torch.zeros_like(module.bias, device=weight.device), requires_grad=False)
    return few


def experts_in(packed: str, module: Any, weight: torch.Tensor, device: str) -> PackedExperts:
    """The weight [E, ...] of a layer's experts: each drawn and packed before the next, or drawn as bytes of MXFP4."""
    if packed != "mxfp4":
        packer = Packer(len(weight), packed, weight.dtype)
        for _ in range(len(weight)):
            packer.add(torch.empty(weight.shape[1:], dtype=weight.dtype, device=device).normal_(0, SPREAD))
        return packer.done()
    turned = bool(module.is_transposed)
    rows, columns = reversed(weight.shape[1:]) if turned else weight.shape[1:]
    blocks = torch.randint(256, (len(weight), rows, columns // BLOCK, BLOCK // 2), dtype=torch.uint8, device=device)
    # Numbers of four bits are 2.9 in the mean square: times 2**-7 they are spread as others are.
    scales = torch.full(blocks.shape[:3], 127 - 7, dtype=torch.uint8, device=device)
    return of_mxfp4(blocks, scales, weight.dtype, turned=turned)
