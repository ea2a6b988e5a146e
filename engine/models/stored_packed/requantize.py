"""Another weight in a base's own format: rounded to the nearest numbers that the files' scales can say.

Groups, blocks and zero points stay. A group or block keeps the scale that was calibrated for it, or takes one that reaches as far as
the new numbers, whichever is nearer in squares; the one scale above NVFP4's blocks stays, since servers join layers that share it,
and so does one scale of a whole layer of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from engine.facts.stored import bits_of
from engine.kernels.experts import groups, mxfp4
from engine.kernels.experts.e2m1 import LARGEST, coded, in_bytes
from engine.models.stored_fp8 import Block, fitting
from engine.models.stored_packed.codes import code_layout, words_of, words_of_awq
from engine.models.stored_packed.entries import Entries
from engine.models.stored_packed.formats import Parts
from engine.models.stored_packed.in_bitsandbytes import BitsAndBytes


def requantized(entries: Entries | BitsAndBytes, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a layer, by the ends of their names, that change where it is to hold `weight` [rows, columns], float32."""
    if isinstance(entries, BitsAndBytes):
        return entries.requantized(name, weight)
    parts, method = entries.parts(name), str(entries.note.get("quant_method"))
    if parts.kind not in groups.BITS:
        numbers, scales = _nearest_in_blocks(weight, parts)
        old = entries.read(name, "weight_scale")
        end = "weight" if method == "modelopt" else "weight_packed"
        return {end: numbers, "weight_scale": scales.view(old.dtype).reshape(old.shape)}
    columns = weight.shape[1]
    if method in ("awq", "gptq"):
        bits = 4 if method == "awq" else entries.read(name, "qweight").shape[0] * 32 // columns
        codes, scales = _nearest_codes(weight, parts, bits)
        words = words_of_awq(codes.T.contiguous()) if method == "awq" else words_of(codes, bits).T.contiguous()
        return {"qweight": words, "scales": scales.T.contiguous()}
    held, old = entries.maybe(name, "weight_packed"), entries.read(name, "weight_scale")
    bits, whole = (8, False) if held is None else code_layout(held.shape[1], columns, bits_of(entries.note))
    within = bits if held is not None else _fewest_bits(entries.read(name, "weight"), bits_of(entries.note))
    codes, scales = _nearest_codes(weight, parts, bits, within=within, keep=old.numel() == 1)
    own = {} if old.numel() == 1 else {"weight_scale": scales.reshape(old.shape)}
    return own | (
        {"weight": (codes ^ 128).view(torch.int8)}
        if held is None
        else {"weight_packed": words_of(codes, bits, whole=whole)}
    )


def _fewest_bits(numbers: torch.Tensor, said: tuple[int, ...]) -> int:
    """Of the bits that a note tells of the fewest that say these integers of a byte each."""
    reach = max(int(numbers.max()) + 1, -int(numbers.min()))
    return next((bits for bits in sorted(said) if reach <= 1 << (bits - 1)), 8)


def _nearest_codes(
    weight: torch.Tensor, parts: Parts, bits: int, *, within: int | None = None, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, columns] and scales [rows, groups], the latter as they are where they are to be kept. Codes of `bits` may be
    held to fewer `within`, around the middle."""
    columns = weight.shape[1]
    half = 1 << (groups.BITS[parts.kind] - 1)
    least, most = 0, (1 << bits) - 1
    if within is not None and within < bits:
        least, most = half - (1 << (within - 1)), half + (1 << (within - 1)) - 1
    of_column = parts.of_column
    if of_column is None:
        of_column = torch.arange(columns) // parts.group if parts.scales.shape[1] > 1 else torch.zeros(columns)
    of_column = of_column.long()
    zeros = torch.full_like(parts.scales, half, dtype=torch.float32) if parts.zeros is None else parts.zeros.float()
    zero = zeros.index_select(1, of_column)

    def rounded(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = scales.float().index_select(1, of_column)
        codes = (torch.where(step != 0, weight / step, 0.0) + zero).round().clamp(least, most)
        return codes, torch.zeros_like(zeros).index_add_(1, of_column, ((codes - zero) * step - weight).square())

    codes, error = rounded(parts.scales)
    if not keep:
        reach = torch.maximum(weight / (most - zero).clamp(min=0.5), -weight / (zero - least).clamp(min=0.5))
        wanted = torch.zeros_like(zeros).index_reduce_(1, of_column, reach, "amax").to(parts.scales.dtype)
        others, less = rounded(wanted)
        better = (less < error) & wanted.isfinite()
        codes = torch.where(better.index_select(1, of_column), others, codes)
        return codes.to(torch.uint8), torch.where(better, wanted, parts.scales)
    return codes.to(torch.uint8), parts.scales


def _nearest_in_blocks(weight: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes [rows, columns / 2] and scales [rows, blocks] of MXFP4 and NVFP4."""
    if parts.kind == "mxfp4":
        return nearest_mxfp4(weight, parts.scales)
    assert parts.middle is not None
    whole = parts.middle
    blocks = weight.unflatten(1, (-1, parts.group))
    largest = blocks.abs().amax(-1)
    fresh = (
        (largest / most / whole).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8) for most in (LARGEST, 4.0)
    )
    return _nearest(blocks, (parts.scales, *fresh), lambda each: each.view(torch.float8_e4m3fn).float() * whole)


def nearest_mxfp4(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes [rows, columns / 2] and scales [rows, blocks], uint8, of numbers [rows, columns] that were held with these."""
    _, fresh = mxfp4.packed(weight)
    blocks = weight.unflatten(1, (-1, mxfp4.BLOCK))
    return _nearest(blocks, (scales, fresh), lambda each: torch.exp2(each.float() - 127))


def _nearest(
    blocks: torch.Tensor, tried: Iterable[torch.Tensor], step_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the scales that are tried the one, block by block, with which the numbers are nearest; the first where two are alike."""
    least: torch.Tensor | None = None
    codes = scales = torch.empty(0)
    for each in tried:
        step = step_of(each)
        found, error = coded(torch.where(step[..., None] > 0, blocks / step[..., None], 0.0))
        error = torch.where(step > 0, error * step.square(), blocks.square().sum(-1))
        if least is None:
            least, codes, scales = error, found, each
            continue
        better = error < least
        least, scales = torch.where(better, error, least), torch.where(better, each, scales)
        codes = torch.where(better[..., None], found, codes)
    return in_bytes(codes).flatten(1), scales


def nearest_fp8(
    name: str, weight: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor | None, block: Block | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [rows, columns] and scales, in the formats and shapes of those that are there, of a `weight` in float32. Raises
    ModelError for scales that do not cover it."""
    known, (high, wide) = fitting(name, weight.shape, scale, block)
    assert scale is not None
    rows, columns = weight.shape
    largest = torch.finfo(numbers.dtype).max
    padded = F.pad(weight, (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    fresh = blocks.abs().amax((1, 3)) / largest
    if bool(((torch.frexp(known).mantissa == 0.5) | (known == 0)).all()):  # powers of two, as some kernels want them
        fresh = fresh.log2().ceil().exp2()
    tried = []
    for each in (known, fresh.to(scale.dtype).float()):
        step = each[:, None, :, None]
        found = torch.where(step > 0, blocks / step, 0.0).clamp(-largest, largest).to(numbers.dtype)
        tried.append((each, found, (found.float() * step - blocks).square().sum((1, 3))))
    (kept, first, error), (made, other, less) = tried
    better = less < error
    found = torch.where(better[:, None, :, None], other.float(), first.float()).to(numbers.dtype)
    scales = torch.where(better, made, kept).to(scale.dtype).reshape(scale.shape)
    return found.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales
