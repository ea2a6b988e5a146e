"""The gated activation of SwiGLU and GeGLU blocks: `act(gate) * up` in one launch, its gradients in another.

The backward launch can give the product again beside the gradients, and write all three over what it read, so that a block
that recomputes holds three wide tensors and not six. Rows may lie apart, as the halves of one fused projection do. float64
and what has no kernel get plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.gated.reference import ACTIVATIONS, gated_gradients_reference, gated_reference
from engine.kernels.shapes import first_derivatives_alone, refuse_formats
from engine.kernels.tuner import TUNER, Cost, Tile, Tiles, bucket

__all__ = ["ACTIVATIONS", "gated", "gated_gradients", "gated_reference"]


# Registers of a thread by the elements it holds, from above.
def _forward_cost(tile: Tile) -> Cost:
    block, warps = tile
    return Cost(24 + 6 * (block // (32 * warps)), 32 * warps)


def _backward_cost(tile: Tile) -> Cost:
    block, warps = tile
    return Cost(32 + 9 * (block // (32 * warps)), 32 * warps)


FORWARD = Tiles("gated_fwd", 1, ("block", "warps"), ((1024, 4), (512, 4), (2048, 4), (2048, 8)), _forward_cost)
BACKWARD = Tiles("gated_bwd", 1, ("block", "warps"), ((1024, 4), (512, 4), (2048, 4), (2048, 8)), _backward_cost)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """`act(gate) * up`, computed in float32 and rounded once; differentiable.

    Args:
        gate, up: [..., I] of one shape and dtype, float32, float16 or bfloat16; halves of one tensor are taken as they lie.
        activation: `silu`, `gelu_tanh` or `gelu`.

    Raises:
        ValueError: shapes, formats or devices that do not belong together, or another activation. RuntimeError: a
            second derivative.
    """
    _refuse(gate, up, activation)
    if not _served(gate, up):
        return gated_reference(gate, up, activation)
    if torch.compiler.is_compiling():
        out: torch.Tensor = _gated_op(gate, up, activation)
    else:
        out = _Gated.apply(gate, up, activation)
    return out


def gated_gradients(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str = "silu",
    *,
    with_product: bool = False,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of `gate` and `up` for the result's gradient, and with `with_product` the result itself, else None.

    `in_place` writes the three over `gate`, `up` and `grad`, in this order, and returns those; they must not overlap.
    Raises ValueError as `gated` does.
    """
    _refuse(gate, up, activation)
    if grad.shape != gate.shape:
        raise ValueError(f"gated: grad must be {tuple(gate.shape)} as gate is; got {tuple(grad.shape)}")
    outputs = (gate, up, grad) if in_place else None
    if _served(grad, gate, up):
        return _backward(grad, gate, up, activation, with_product, outputs)
    found = gated_gradients_reference(grad, gate, up, activation)
    if outputs is not None:
        for place, value in zip(outputs[: 2 + with_product], found, strict=False):
            place.copy_(value)
        found = outputs
    return found[0], found[1], found[2] if with_product else None


def _refuse(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        given = f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"gated: gate and up must have one shape and number format; got {given}")
    if not gate.dim():
        raise ValueError("gated: gate and up must have at least one dimension; got two single numbers")
    refuse_formats("gated", gate=gate, up=up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")


def _served(*tensors: torch.Tensor) -> bool:
    first = tensors[0]
    on_card = first.is_cuda if torch.compiler.is_compiling() else kernel_serves(*tensors)
    return on_card and first.dtype != torch.float64 and first.numel() > 0


def _row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row to the next where the leading dimensions collapse and a row's elements lie side by side."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    stride, size = None, 1
    for length, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if length == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * size:
            return None
        size *= length
    return x.shape[-1] if stride is None else stride


def _laid_out(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    stride = _row_stride(x)
    return (x, stride) if stride is not None else (x.contiguous(), x.shape[-1])


def _grid(x: torch.Tensor, block: int) -> tuple[int]:
    return (x.shape[:-1].numel() * -(-x.shape[-1] // block),)


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    from engine.kernels.gated.kernels import gated_fwd_kernel

    (gate, gate_stride), (up, up_stride) = _laid_out(gate), _laid_out(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    columns = gate.shape[-1]

    def launch(tile: Tile) -> None:
        block, warps = min(tile[0], bucket(columns)), tile[1]
        gated_fwd_kernel[_grid(gate, block)](
            gate, up, out, gate_stride, up_stride, columns,
            ACTIVATION=ACTIVATIONS.index(activation), BLOCK=block, num_warps=warps,
        )  # fmt: skip

    launch(_tile(FORWARD, gate, activation, launch))
    return out


def _backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    with_product: bool,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One launch. `outputs` are where to write: what was read, or None for fresh memory."""
    from engine.kernels.gated.kernels import gated_bwd_kernel

    if outputs is None:
        dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        product = torch.empty_like(dgate) if with_product else dgate
    else:
        dgate, dup, product = outputs
    wanted = dgate, dup, product
    (grad, grad_stride), (gate, gate_stride), (up, up_stride) = _laid_out(grad), _laid_out(gate), _laid_out(up)
    # What does not lie in rows is written beside and copied.
    written = [_laid_out(x) for x in wanted]
    columns = gate.shape[-1]

    def launch(tile: Tile, places: list[torch.Tensor]) -> None:
        block, warps = min(tile[0], bucket(columns)), tile[1]
        gated_bwd_kernel[_grid(gate, block)](
            grad, gate, up, *places, grad_stride, gate_stride, up_stride, *(stride for _, stride in written), columns,
            ACTIVATION=ACTIVATIONS.index(activation), WITH_PRODUCT=with_product, BLOCK=block, num_warps=warps,
        )  # fmt: skip

    def trial(tile: Tile) -> None:
        launch(tile, spare)

    spare = [place for place, _ in written]
    if TUNER.on and outputs is not None:
        spare = [
            torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=place.device) for place in spare
        ]
    launch(_tile(BACKWARD, gate, f"{activation}{int(with_product)}", trial), [place for place, _ in written])
    for place, (held, _) in zip(wanted[: 2 + with_product], written, strict=False):
        if held is not place:
            place.copy_(held)
    return dgate, dup, product if with_product else None


def _tile(tiles: Tiles, x: torch.Tensor, kind: str, launch: Any) -> Tile:
    if not TUNER.on:
        return tiles.default
    return TUNER.pick(tiles, (bucket(x.shape[:-1].numel()), bucket(x.shape[-1]), str(x.dtype), kind), x.device, launch)


class _Gated(torch.autograd.Function):
    """The eager path: one autograd node that keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        first_derivatives_alone("gated")
        gate, up = ctx.saved_tensors
        dgate, dup, _ = _backward(grads[0], gate, up, ctx.activation, False, None)
        return dgate, dup, None


# The compiled path: registered operations, which `torch.compile(fullgraph=True)` keeps whole in one graph.
@torch.library.custom_op("workbench::gated", mutates_args=())
def _gated_op(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return _forward(gate, up, activation)


@torch.library.custom_op("workbench::gated_backward", mutates_args=())
def _gated_backward_op(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(grad, gate, up, activation, False, None)[:2]


@_gated_op.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@_gated_backward_op.register_fake
def _(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    return *_gated_backward_op(grad, *ctx.saved_tensors, ctx.activation), None


_gated_op.register_autograd(_differentiate, setup_context=_remember)
