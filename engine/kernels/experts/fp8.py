"""FP8 in plain torch: numbers of eight bits (e4m3), and a float32 scale for each block of rows and columns.

Numbers and scales are those of published checkpoints (`weight`, `weight_scale_inv`): what a number stands for is their product.
Blocks at the ends may be cut off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
_LARGEST = 448.0


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers [rows, columns], uint8, and scales [blocks of rows, blocks of columns] of a weight."""
    rows, columns = weight.shape
    wide = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = wide.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = (blocks.abs().amax((1, 3)) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return numbers.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def unpacked(numbers: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """What numbers [n, k] with a scale for each block of so many rows and columns stand for: [n, k] float32."""
    by_number = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return numbers.view(torch.float8_e4m3fn).float() * by_number[: numbers.shape[0], : numbers.shape[1]]
