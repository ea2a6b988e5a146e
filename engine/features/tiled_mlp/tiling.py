"""A token-wise block over tiles of its tokens, computed again tile by tile in the backward pass.

`tiled(block, x, parameters, tokens)` equals `block(x)` and its gradients; what one tile computes on the way is all that is
held at a time. Gradients of the block's weights add over tiles, in the weights' own format or in float32.

Libraries have this (arXiv:2506.13996; DeepSpeed's TiledMLP, Liger's `apply_tiled_mlp`), but write gradients past autograd
into `.grad`, draw dropout anew in the backward pass and lose the gradients of a block whose input needs none. Here weights
are inputs of the node, so hooks, accumulation and data-parallel reduction see one gradient each.

A block's last product is needed for its result alone, so the backward pass leaves it out where the block says which linear
layer makes it: an eighth of the work of a gated block. A block that gives its gradients in closed form is asked for those
and not differentiated, and holds less of a tile at a time.

Two nodes make one call. The first keeps the input and computes nothing, the second computes and keeps nothing: a checkpoint
around the layer stops computing again once the last kept tensor is there, so it does not compute the block a third time.

Shapes: x is (..., H), a tile (1, at most `tokens`, H).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from engine.compat.instances import put

Block = Callable[[torch.Tensor], torch.Tensor]
Gradients = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]]
"""Of an input [N, H] and its result's gradient: the input's, where asked for, and those of the trained weights in order."""
_COMPUTING: ContextVar[bool] = ContextVar("computing", default=False)


def computing() -> bool:
    """Whether a tile is being computed whose results must not be kept, by whatever keeps results."""
    return _COMPUTING.get()


def tiled(
    block: Block,
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    tokens: int,
    *,
    in_float32: bool = False,
    random: bool = True,
    last: torch.nn.Linear | None = None,
    gradients: Gradients | None = None,
) -> torch.Tensor:
    """`block(x)` in even tiles of at most `tokens` tokens; one tile or less is `block(x)` itself.

    `block` maps each token by itself, keeping shape (1, N, H). `parameters` are the weights it uses; those that train get
    gradients, summed `in_float32` if asked for. `random` says that the block may draw numbers, which are drawn again alike.
    `last` is a layer to whose result the block does nothing but add: it is not computed again. With `gradients` the block
    is not differentiated.
    """
    rows = x.shape[:-1].numel()
    if rows <= tokens:
        return block(x)
    size = -(-rows // -(-rows // tokens))
    trained = [weight for weight in parameters if weight.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or trained):
        return _compute(block, x, size)
    call = _Call(block, size, x, in_float32, random, last, gradients)
    held: torch.Tensor = _Held.apply(call, x, *trained)
    out: torch.Tensor = _Computed.apply(held, call, x.detach())
    return out


def _compute(block: Block, x: torch.Tensor, size: int) -> torch.Tensor:
    flat = x.reshape(1, -1, x.shape[-1])
    out = None
    computing = _COMPUTING.set(True)
    try:
        for begin in range(0, flat.shape[1], size):
            part = block(flat[:, begin : begin + size])
            if out is None:
                # In its last shape: autograd lets no view be added to in place, as some layers add to their block's result.
                out = part.new_empty(*x.shape[:-1], part.shape[-1])
            out.view(1, -1, part.shape[-1])[:, begin : begin + size] = part
    finally:
        _COMPUTING.reset(computing)
    assert out is not None
    return out


class _Call:
    """What a call must find again in its backward pass: the block, and the state of chance and of mixed precision."""

    def __init__(
        self,
        block: Block,
        size: int,
        x: torch.Tensor,
        in_float32: bool,
        random: bool,
        last: torch.nn.Linear | None,
        gradients: Gradients | None,
    ) -> None:
        self.block, self.size, self.in_float32, self.last = block, size, in_float32, last
        self.gradients = gradients
        kind = x.device.type
        self.autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self.random = (torch.get_rng_state(), *get_device_states(x)) if random else None

    def of_tile(
        self, part: torch.Tensor, slope: torch.Tensor, inwards: bool, trained: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """Gradients of one tile (1, N, H) and of the trained weights."""
        if self.gradients is not None:
            return self.gradients(part[0], slope[0], inwards)
        part.requires_grad_(inwards)
        with torch.enable_grad():
            out = self.block(part)
        if not out.requires_grad:
            return None, [None] * len(trained)
        wanted = ((part,) if inwards else ()) + trained
        found = torch.autograd.grad(out, wanted, slope.to(out.dtype), allow_unused=True)
        return (found[0], found[1:]) if inwards else (None, found)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As it was when the call was made; afterwards as it is now."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(**self.autocast))
            if self.random is not None:
                host, devices, states = self.random
                stack.enter_context(torch.random.fork_rng(devices=devices))
                torch.set_rng_state(host)
                set_device_states(devices, states)
            if self.last is not None and not self.autocast["enabled"]:
                stack.enter_context(_without_result(self.last))
            yield


@contextlib.contextmanager
def _without_result(linear: torch.nn.Linear) -> Iterator[None]:
    """Inside, this layer's gradients are what they are and its result is nought."""
    undo = put(linear, "forward", lambda x: _Gradients.apply(x, linear.weight, linear.bias))
    try:
        yield
    finally:
        undo()


class _Gradients(torch.autograd.Function):
    """The backward pass of a linear layer without its forward pass; the result takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, flat = ctx.needs_input_grad, grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if wanted[0] else None,
            flat.T @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            flat.sum(0) if wanted[2] else None,
        )


class _Held(torch.autograd.Function):
    """Keeps the input; its output stands for the block's result in the graph and takes no memory."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.trained = call, trained
        ctx.save_for_backward(x)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, (x,) = ctx.call, ctx.saved_tensors
        inwards = ctx.needs_input_grad[1]
        flat, grad = x.reshape(1, -1, x.shape[-1]), grad.reshape(1, -1, grad.shape[-1])
        grad_x = torch.empty_like(flat) if inwards else None
        sums = [_Sum(weight.dtype, call.in_float32) for weight in ctx.trained]
        with call.again():
            for begin in range(0, flat.shape[1], call.size):
                tile = slice(begin, begin + call.size)
                inside, found = call.of_tile(flat[:, tile].detach(), grad[:, tile], inwards, ctx.trained)
                if grad_x is not None:
                    grad_x[:, tile] = 0 if inside is None else inside
                for total, each in zip(sums, found, strict=True):
                    total.add(each)
                del inside, found
        return (None, None if grad_x is None else grad_x.view_as(x), *(total.value() for total in sums))


class _Computed(torch.autograd.Function):
    """The block's result, in tiles; hands its gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, call: _Call, x: torch.Tensor) -> torch.Tensor:
        return _compute(call.block, x, call.size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _Sum:
    """The sum of one weight's gradients over tiles."""

    def __init__(self, dtype: torch.dtype, in_float32: bool) -> None:
        self.dtype = dtype
        self.held_as = torch.float32 if in_float32 and dtype.itemsize < 4 else dtype
        self._total: torch.Tensor | None = None
        self._own = False

    def add(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if self._total is None:
            self._total = gradient.to(self.held_as)
        elif self._own:
            self._total += gradient
        else:
            # A first gradient may share memory with others: from the second on the sum is its own.
            self._total, self._own = self._total + gradient, True

    def value(self) -> torch.Tensor | None:
        return None if self._total is None else self._total.to(self.dtype)
