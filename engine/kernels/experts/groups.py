"""Unsigned numbers of four or eight bits in plain torch, with a scale and a zero point for each group of columns of a row, as
GPTQ, AWQ and compressed-tensors hold them: a number stands for `(code - zero) * scale`.

Groups are so many columns side by side, the last one maybe fewer, or those that `of_column` names, where columns were
quantized in another order. Two codes of four bits lie in a byte, the first in its low bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = {"uint4": 4, "uint8": 8}


def in_bytes(codes: Tensor, bits: int) -> Tensor:
    """Bytes of codes [rows, columns], uint8; a row of an odd number of four bits ends in zeros."""
    if bits == 8:
        return codes.contiguous()
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., ::2] | codes[..., 1::2] << 4


def codes_of(numbers: Tensor, bits: int, columns: int) -> Tensor:
    """Codes [rows, columns], uint8, of bytes [rows, ...]."""
    if bits == 8:
        return numbers[:, :columns]
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)[:, :columns]


def unpacked(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, of_column: Tensor | None, bits: int, group: int, columns: int
) -> Tensor:
    """What bytes [rows, ...] and scales [rows, groups] stand for: [rows, columns] float32. Without `zeros` [rows, groups], whole
    numbers, the zero point is half of what the bits can count."""
    codes = codes_of(numbers, bits, columns)
    scale = _by_column(scales.float(), of_column, group, columns)
    if zeros is None:
        return (codes.float() - float(1 << (bits - 1))) * scale
    return (codes.float() - _by_column(zeros.float(), of_column, group, columns)) * scale


def _by_column(values: Tensor, of_column: Tensor | None, group: int, columns: int) -> Tensor:
    if of_column is not None:
        return values.index_select(1, of_column)
    return values if values.shape[1] == 1 else values.repeat_interleave(group, 1)[:, :columns]
