"""MXFP4 in plain torch: blocks of 32 numbers of four bits (e2m1) along a row, each block with a power of two (e8m0) as scale.

Bytes are those of the OCP Microscaling specification 1.0 as published checkpoints hold them: of the two numbers of a byte
the first is in the low bits, and a scale byte `s` is 2^(s - 127), 255 not a number. A last block that is not full ends in
zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
_VALUES = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
TOO_LARGE = 253
"""Scales from here on make numbers that no format of 16 or 32 bits holds."""
_BIAS, _NAN = 127, 255
_BELOW = 1 - 2.0**-24
"""One float32 before a number, as a factor."""
# Halfway between two sizes; those in which the upper one is even belong to it.
_HALFWAY = [0.25, 0.75 * _BELOW, 1.25, 1.75 * _BELOW, 2.5, 3.5 * _BELOW, 5.0]


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes [rows, blocks, 16] and scales [rows, blocks] of numbers [rows, columns], both uint8.

    A block's scale is the specification's, by which its largest number may be cut off at 6, or twice that, whichever is
    closer in squares. Numbers are rounded to the nearest, and to the even one halfway. A block with a number that is not
    finite is NaN.
    """
    wide = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = wide.abs().amax(-1)
    power = torch.frexp(largest).exponent - 3
    power = torch.stack([power, power + 1]).clamp(-_BIAS, TOO_LARGE - 1 - _BIAS)
    codes, errors = zip(*(_rounded(wide, each) for each in power), strict=True)
    up = 4 * errors[1] < errors[0]
    scales = torch.where(up, power[1], power[0]) + _BIAS
    scales = torch.where(largest.isfinite(), scales, _NAN).to(torch.uint8)
    chosen = torch.where(up[..., None], codes[1], codes[0])
    return chosen[..., ::2] | chosen[..., 1::2] << 4, scales


def unpacked(numbers: Tensor, scales: Tensor, columns: int) -> Tensor:
    """What bytes [rows, blocks, 16] and scales [rows, blocks] stand for: [rows, columns] float32, exact also in bfloat16."""
    pairs = torch.tensor([[_VALUES[byte & 15], _VALUES[byte >> 4]] for byte in range(256)], device=numbers.device)
    values = pairs.index_select(0, numbers.reshape(-1).int()).view(*scales.shape, BLOCK)
    return (values * _power(scales)[..., None]).flatten(1)[:, :columns]


def _power(scales: Tensor) -> Tensor:
    """2^(s - 127) in float32, of which the smallest has no bit of an exponent."""
    bits = scales.int() << 23
    bits = bits.masked_fill(scales == 0, 1 << 22).masked_fill(scales == _NAN, 0x7FC00000)
    return bits.view(torch.float32)


def _rounded(wide: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of blocks [..., 32] under these powers of two, and the squares, in units of theirs, of what rounding took
    from each block."""
    size = wide.abs() / _power((power + _BIAS).to(torch.uint8))[..., None]
    sizes, halfway = (torch.tensor(each, device=wide.device) for each in (_VALUES[:8], _HALFWAY))
    code = torch.bucketize(size, halfway, out_int32=True)
    error = (sizes.index_select(0, code.view(-1)).view_as(code) - size).square().sum(-1)
    return (code | wide.signbit().int() << 3).to(torch.uint8), error
