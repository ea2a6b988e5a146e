"""NVFP4 in plain torch: blocks of 16 numbers of four bits (e2m1) along a row, each block with a scale of eight (e4m3), and one
float32 scale for all of an expert.

A last block that is not full ends in zeros. Source of the choice of scales: arXiv:2512.02010.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.experts.e2m1 import LARGEST, coded, decoded, in_bytes

BLOCK = 16
_SCALE = 256.0
"""The largest block's scale: one and a half of it is held as exactly as it, and lies below e4m3's 448."""


def packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes [rows, blocks, 8] and scales [rows, blocks] of numbers [rows, columns], both uint8, and the expert's scale.

    A block's scale makes its largest number 6 or 4, whichever is closer in squares: between the two lies no number.
    """
    wide = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = wide.abs().amax(-1)
    whole = (largest.max() / (LARGEST * _SCALE)).clamp(min=torch.finfo(torch.float32).tiny)
    tried = []
    for most in (LARGEST, 4.0):
        scale = (largest / most / whole).to(torch.float8_e4m3fn)
        step = scale.float() * whole
        codes, error = coded(torch.where(step[..., None] > 0, wide / step[..., None], 0.0))
        tried.append((scale.view(torch.uint8), codes, error * step.square()))
    (scales, codes, error), (others, other_codes, other) = tried
    better = other < error
    return (
        in_bytes(torch.where(better[..., None], other_codes, codes)),
        torch.where(better, others, scales),
        whole,
    )


def unpacked(numbers: Tensor, scales: Tensor, whole: Tensor, columns: int) -> Tensor:
    """What bytes [rows, blocks, 8], scales [rows, blocks] and the expert's scale stand for: [rows, columns] float32."""
    step = scales.view(torch.float8_e4m3fn).float() * whole
    return (decoded(numbers) * step[..., None]).flatten(1)[:, :columns]
