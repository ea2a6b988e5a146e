"""Rows rounded to FP8 in one launch, and FP8 numbers transposed: what products with a scale for each row are made of.

A scale is the least power of two that leaves the row's largest number within float8_e4m3fn (arXiv:2209.05433), so that
scaling rounds nothing. Code that is being compiled gets the plain operations instead of the rounding kernel, on purpose:
there they become part of what made the rows, and rows that several products read are rounded once.
"""

from __future__ import annotations

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.fp8_rows.reference import FORMAT, rounded_rows_reference, transposed_reference
from engine.kernels.shapes import named, refuse_formats

__all__ = ["FORMAT", "rounded_rows", "rounded_rows_reference", "transposed", "transposed_reference"]

_LONGEST = 16_384
"""Numbers of a row that a program holds at once."""
_TILE = 64, 64


def rounded_rows(x: torch.Tensor, by: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`x * by` as FP8 numbers and a float32 scale a row: `x * by = numbers * scale` but for the rounding.

    Rows of nought stay nought, and what is not finite stays so.

    Args:
        x: [R, C], float32, float16 or bfloat16.
        by: [1, C] float32, or None for ones.

    Returns:
        numbers [R, C] float8_e4m3fn, scale [R, 1] float32.

    Raises:
        ValueError: rows without a number, shapes, formats or devices that do not belong together.
    """
    if x.dim() != 2 or not x.shape[1] or (by is not None and by.shape != (1, x.shape[1])):
        given = f"{tuple(x.shape)}{'' if by is None else f' and {tuple(by.shape)}'}"
        raise ValueError(f"rounded_rows: must get x [R, C] with C at least 1 and by [1, C] or none; got {given}")
    refuse_formats("rounded_rows", x=x, by=by)
    if torch.compiler.is_compiling() or not x.numel() or not kernel_serves(x):
        return rounded_rows_reference(x, by)
    from engine.kernels.fp8_rows.kernels import rounded_rows_kernel

    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    numbers = torch.empty(rows, width, dtype=FORMAT, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(_LONGEST, 1 << max(width - 1, 0).bit_length())
    rounded_rows_kernel[(rows,)](
        x, x if by is None else by.contiguous(), numbers.view(torch.uint8), scale, x.stride(0), width,
        HAS_BY=by is not None, CHUNKS=-(-width // block), BLOCK=block, num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip
    return numbers, scale


def transposed(numbers: torch.Tensor) -> torch.Tensor:
    """A contiguous copy [C, R] of FP8 numbers [R, C]. Raises ValueError for anything else."""
    if numbers.dim() != 2 or numbers.element_size() != 1:
        raise ValueError(f"transposed: must get FP8 numbers [R, C]; got {named(numbers.dtype)} {tuple(numbers.shape)}")
    if torch.compiler.is_compiling() or not numbers.numel() or not kernel_serves(numbers):
        return transposed_reference(numbers)
    return transposed_by_kernel(numbers)


def transposed_by_kernel(numbers: torch.Tensor) -> torch.Tensor:
    """As `transposed`, by the kernel whatever calls."""
    from engine.kernels.fp8_rows.kernels import transpose_kernel

    numbers = numbers.contiguous()
    rows, columns = numbers.shape
    out = torch.empty(columns, rows, dtype=numbers.dtype, device=numbers.device)
    high, wide = _TILE
    transpose_kernel[(-(-rows // high), -(-columns // wide))](
        numbers.view(torch.uint8), out.view(torch.uint8), rows, columns, BLOCK_R=high, BLOCK_C=wide, num_warps=4
    )
    return out
