"""What every device is asked of rows in FP8: the reference's bytes and scales, for rows of all lengths and every number."""

from __future__ import annotations

import torch

from engine.kernels.fp8_rows import FORMAT, rounded_rows, rounded_rows_reference, transposed, transposed_reference
from tests.engine.kernels.judging import DEVICE, DTYPES, INTERPRETED, combined, said


def same(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether these are the same numbers and scales, to the bit but for the sign of nought."""
    return torch.equal(ours[0].float(), theirs[0].float()) and torch.equal(ours[1], theirs[1])


def fp8_rows_cases() -> None:
    """Rows of any length, longer than a block, laid out apart, each under its scale and weighed by column or not."""
    shapes = [(5, 64), (3, 100), (1, 1), (2, 16_390)] + ([] if INTERPRETED else [(1000, 4096), (333, 12_288)])
    for shape, dtype, weighed, apart in combined(shapes, DTYPES, (False, True), (False, True)):
        x = torch.randn(shape[0], 2 * shape[1], device=DEVICE) * torch.logspace(-3, 3, shape[0], device=DEVICE)[:, None]
        x = x.to(dtype)
        x = x[:, ::2] if apart else x[:, : shape[1]]
        by = torch.exp2(torch.randint(-9, 9, (1, shape[1]), device=DEVICE).float()) if weighed else None
        name = f"fp8_rows {dtype} {shape}{' weighed' if weighed else ''}{' apart' if apart else ''}"
        said(same(rounded_rows(x, by), rounded_rows_reference(x, by)), name)
        numbers = rounded_rows_reference(x)[0]
        said(torch.equal(*(f(numbers).view(torch.uint8) for f in (transposed, transposed_reference))), f"{name} turned")


def fp8_rows_numbers() -> None:
    """Every number of the format, what lies between two of them and next to it; rows of nought and what is not finite."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FORMAT).float()
    every = every[every.isfinite()].sort().values
    between = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, between, between * (1 + 2**-20), between * (1 - 2**-20)])[None]
    said(same(rounded_rows(x), rounded_rows_reference(x)), "fp8_rows of every number")
    odd = torch.zeros(3, 16, device=DEVICE)
    odd[1, 3], odd[2, 5] = float("nan"), float("inf")
    numbers, scale = rounded_rows(odd)
    good = not numbers[0].float().any() and not (numbers.float() * scale)[1:].isfinite().all(1).any()
    said(good and bool(scale[0].isfinite()), "fp8_rows of nought and of what is not finite")
    said(rounded_rows(odd[:0])[0].shape == (0, 16), "fp8_rows without a row")
