"""Numbers of four bits (e2m1: a sign, two bits of an exponent, one of a fraction) in plain torch, two in a byte, the first in
its low bits."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 6.0
VALUES = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, LARGEST)]
_BELOW = 1 - 2.0**-24
"""One float32 before a number, as a factor."""
# Halfway between two sizes; those in which the upper one is even belong to it.
_HALFWAY = [0.25, 0.75 * _BELOW, 1.25, 1.75 * _BELOW, 2.5, 3.5 * _BELOW, 5.0]


def coded(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of numbers [..., n], uint8, the nearest and the even one halfway, and the squares [...] of what that took
    from each row."""
    size = numbers.abs()
    sizes, halfway = (torch.tensor(each, device=size.device) for each in (VALUES[:8], _HALFWAY))
    code = torch.bucketize(size, halfway, out_int32=True)
    error = (sizes.index_select(0, code.view(-1)).view_as(code) - size).square().sum(-1)
    return (code | numbers.signbit().int() << 3).to(torch.uint8), error


def in_bytes(codes: Tensor) -> Tensor:
    """Two codes in each byte: [..., n / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def decoded(numbers: Tensor) -> Tensor:
    """What bytes [..., n] stand for: [..., 2 n] float32."""
    pairs = torch.tensor([[VALUES[byte & 15], VALUES[byte >> 4]] for byte in range(256)], device=numbers.device)
    return pairs.index_select(0, numbers.reshape(-1).int()).view(*numbers.shape[:-1], -1)
