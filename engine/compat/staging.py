"""Copies of shares of weights (DTensors) in main memory, as torch's own asynchronous checkpoints have them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from engine.compat.host_memory import locked

LOCKS = 1 << 20
"""Bytes from which a copy of what lies on a card is locked; below it locking takes longer than it saves."""


def room_for(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors and shares like those of `state` in main memory, their pages touched: what is asked of the machine here, a copy
    need not wait for. What will be copied from a card is locked, where the system locks so much."""
    return {name: _like(each) for name, each in state.items()}


def copy_into(room: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """The tensors and shares of `state` as they are now, into the room that was made for them."""
    with torch.no_grad():
        for name, each in state.items():
            local(room[name]).copy_(local(each))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    room = _touched(local(tensor))
    # torch's own way, `to("cpu")`, would copy each share twice.
    return DTensor(room, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else room


def _touched(like: torch.Tensor) -> torch.Tensor:
    if like.is_cuda and like.nbytes >= LOCKS:
        try:
            return locked(like.nbytes).view(like.dtype).view(like.shape)
        except MemoryError:
            pass
    return torch.zeros(like.shape, dtype=like.dtype)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
