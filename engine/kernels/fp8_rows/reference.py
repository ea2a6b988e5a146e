"""Rows rounded to FP8 under scales that are powers of two, in plain torch: the truth for the kernel, and what is compiled."""

from __future__ import annotations

import torch

FORMAT = torch.float8_e4m3fn


def rounded_rows_reference(x: torch.Tensor, by: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`x * by` [R, C] as FP8 numbers and a float32 scale [R, 1]: `x * by = numbers * scale` but for the rounding."""
    x = x if by is None else x * by
    scale, inverse = _power_of_two(x.abs().amax(-1, keepdim=True).float())
    return (x * inverse).to(FORMAT), scale


def transposed_reference(numbers: torch.Tensor) -> torch.Tensor:
    """A copy of FP8 numbers [R, C] as [C, R], moved as bytes, since not everything that copies knows the format."""
    return numbers.view(torch.uint8).t().contiguous().view(numbers.dtype)


def _power_of_two(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least powers of two by which these float32 numbers are at most 448, the largest of the format, and one over them.

    Read off the bits, where a logarithm could miss by a factor: 448 is 1.75 * 2^8, so a fraction above 1.75 carries into
    the exponent, and eight are taken off.
    """
    exponent = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
