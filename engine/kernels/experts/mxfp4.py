"""MXFP4 in plain torch: blocks of 32 numbers of four bits (e2m1) along a row, each block with a power of two (e8m0) as scale.

Bytes are those of the OCP Microscaling specification 1.0 as published checkpoints hold them: a scale byte `s` is 2^(s - 127),
255 not a number. A last block that is not full ends in zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.experts.e2m1 import coded, decoded, in_bytes

BLOCK = 32
TOO_LARGE = 253
"""Scales from here on make numbers that no format of 16 or 32 bits holds."""
_BIAS, _NAN = 127, 255


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes [rows, blocks, 16] and scales [rows, blocks] of numbers [rows, columns], both uint8.

    A block's scale is the specification's, by which its largest number may be cut off at 6, or twice that, whichever is
    closer in squares. A block with a number that is not finite is NaN.
    """
    wide = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = wide.abs().amax(-1)
    power = torch.frexp(largest).exponent - 3
    power = torch.stack([power, power + 1]).clamp(-_BIAS, TOO_LARGE - 1 - _BIAS)
    tried = (coded(wide / _power((each + _BIAS).to(torch.uint8))[..., None]) for each in power)
    codes, errors = zip(*tried, strict=True)
    up = 4 * errors[1] < errors[0]
    scales = torch.where(up, power[1], power[0]) + _BIAS
    scales = torch.where(largest.isfinite(), scales, _NAN).to(torch.uint8)
    return in_bytes(torch.where(up[..., None], codes[1], codes[0])), scales


def unpacked(numbers: Tensor, scales: Tensor, columns: int) -> Tensor:
    """What bytes [rows, blocks, 16] and scales [rows, blocks] stand for: [rows, columns] float32, exact also in bfloat16."""
    return (decoded(numbers) * _power(scales)[..., None]).flatten(1)[:, :columns]


def _power(scales: Tensor) -> Tensor:
    """2^(s - 127) in float32, of which the smallest has no bit of an exponent."""
    bits = scales.int() << 23
    bits = bits.masked_fill(scales == 0, 1 << 22).masked_fill(scales == _NAN, 0x7FC00000)
    return bits.view(torch.float32)
