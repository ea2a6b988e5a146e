"""A weight in each format's tensors, laid out as it is held: bit for bit.

GPTQ (arXiv:2210.17323): `qweight` [in * bits / 32, out] and `qzeros` [groups, out * bits / 32] int32, `scales` [groups, out],
`g_idx` [in], the group of each input; zero points are stored less one, but not where `checkpoint_format` is `gptq_v2`. AWQ
(arXiv:2306.00978), `gemm`: `qweight` [in, out / 8] and `qzeros` [groups, out / 8], eight outputs in each in the order 0 2 4 6
1 3 5 7. compressed-tensors: `weight_packed` [out, in * bits / 32], `weight_scale`, `weight_zero_point`, each code counted from
the least number. NVIDIA's Model Optimizer, NVFP4: `weight` [out, in / 2] bytes, `weight_scale` [out, in / 16] in FP8 and
`weight_scale_2`, one number that all of them are multiplied with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from engine.errors import ModelError, visible
from engine.facts.stored import bits_of
from engine.kernels.experts import groups
from engine.kernels.experts.packed import Form, Held, PackedExperts, of_groups
from engine.models.stored_packed.codes import code_layout, codes_in_whole_words, codes_of, codes_of_awq

Read = Callable[[str], torch.Tensor | None]
"""Reads a part of a layer by the end of its name; None where the files hold none."""


class Parts(NamedTuple):
    """A weight [rows, columns] as it is held: kind, bytes [rows, ...], scales [rows, groups], columns of a group, and what else
    `Held` has."""

    kind: str
    numbers: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    of_column: torch.Tensor | None = None
    middle: torch.Tensor | None = None


class Unfit(ValueError):
    """Why tensors are no weight."""


def note_bits(note: Mapping[str, Any]) -> int:
    bits = note.get("bits")
    return bits if type(bits) is int and bits in range(2, 9) else 4


def of_gptq(read: Read, rows: int, columns: int, note: Mapping[str, Any]) -> Parts:
    words, scales, zeros, of_column = (read(end) for end in ("qweight", "scales", "qzeros", "g_idx"))
    assert words is not None
    if words.dim() != 2 or words.shape[1] != rows:
        raise Unfit(f"its numbers have the shape {tuple(words.shape)} for {rows} x {columns}")
    if scales is None or scales.dim() != 2 or scales.shape[1] != rows:
        raise Unfit(f"its scales have the shape {None if scales is None else tuple(scales.shape)} for {rows} rows")
    bits = words.shape[0] * 32 // columns
    kind, numbers = _numbers(words.T.contiguous(), bits, columns)
    count = len(scales)
    half = 1 << (bits - 1)
    if zeros is not None:
        found = codes_of(zeros, bits)[:, :rows].to(torch.int16)
        form = note.get("checkpoint_format") or note.get("format") or "gptq"
        zeros = (found + (form != "gptq_v2")).T.contiguous()
        if zeros.shape != (rows, count):
            raise Unfit(f"its zero points have the shape {tuple(zeros.T.shape)}, and {count, rows} is wanted")
    group = _group(columns, count, note.get("group_size"), of_column)
    if of_column is not None:
        of_column = _order(of_column, columns, count, group)
    return Parts(kind, numbers, scales.T.contiguous(), group, _zeros(kind, zeros, half, scales.T), of_column)


def of_awq(read: Read, rows: int, columns: int) -> Parts:
    words, scales, zeros = (read(end) for end in ("qweight", "scales", "qzeros"))
    assert words is not None
    if words.shape != (columns, rows // 8) or rows % 8:
        raise Unfit(f"its numbers have the shape {tuple(words.shape)} for {rows} x {columns}")
    if scales is None or zeros is None or scales.shape[1:] != (rows,) or zeros.shape[1:] != (rows // 8,):
        raise Unfit(f"its scales and zero points are not those of {rows} rows")
    numbers = groups.in_bytes(codes_of_awq(words).T, 4)
    found = codes_of_awq(zeros).T.to(torch.int16)
    group = _group(columns, len(scales), None, None)
    return Parts("uint4", numbers.contiguous(), scales.T.contiguous(), group, _zeros("uint4", found, 8, scales.T))


def of_compressed_tensors(read: Read, rows: int, columns: int, note: Mapping[str, Any]) -> Parts:
    words, eights, scales = read("weight_packed"), read("weight"), read("weight_scale")
    if scales is None:
        raise Unfit("it has no scales")
    lead = eights if words is None else words
    if lead is None or lead.dim() != 2 or len(lead) != rows or (words is None and lead.shape[1] != columns):
        raise Unfit(f"its numbers have the shape {None if lead is None else tuple(lead.shape)} for {rows} x {columns}")
    if words is not None and words.dtype == torch.uint8:
        return _of_four_bit_floats(words, scales, read("weight_global_scale"), columns)
    scales = scales.reshape(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
    scales = scales.reshape(rows, -1).contiguous() if scales.numel() % rows == 0 else scales
    if scales.dim() != 2 or len(scales) != rows:
        raise Unfit(f"its scales have the shape {tuple(scales.shape)} for {rows} rows")
    read_codes = codes_of
    if words is not None:
        bits, whole = code_layout(words.shape[1], columns, bits_of(note))
        read_codes = codes_in_whole_words if whole else codes_of
        kind, numbers = _numbers(words.contiguous(), bits, columns, whole=whole)
    else:
        assert eights is not None
        bits, kind, numbers = 8, "uint8", eights.view(torch.uint8) ^ 128
    half = 1 << (bits - 1)
    zeros, of_column = read("weight_zero_point"), read("weight_g_idx")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = read_codes(zeros.T.contiguous(), bits)[:, :rows].T.to(torch.int16)
    elif zeros is not None:
        zeros = (zeros.to(torch.int16) + half).reshape(-1, 1 if zeros.numel() in (1, rows) else scales.shape[1])
        zeros = zeros.expand(rows, -1)
    if zeros is not None and zeros.shape != scales.shape:
        raise Unfit(f"its zero points have the shape {tuple(zeros.shape)}, and {tuple(scales.shape)} is wanted")
    count = scales.shape[1]
    group = _group(columns, count, None, of_column)
    if of_column is not None:
        of_column = _order(of_column, columns, count, group)
    return Parts(kind, numbers, scales, group, _zeros(kind, zeros, half, scales), of_column)


def _of_four_bit_floats(numbers: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor | None, columns: int) -> Parts:
    if numbers.shape[1] * 2 != columns:
        raise Unfit(f"its numbers have the shape {tuple(numbers.shape)} for {columns} columns")
    if whole is None:
        if scales.dtype != torch.uint8 or scales.shape[1] * 32 != columns:
            raise Unfit(f"its scales are {scales.dtype} {tuple(scales.shape)}, and MXFP4 has one for each 32 columns")
        return Parts("mxfp4", numbers, scales, 32)
    if scales.dtype != torch.float8_e4m3fn or scales.shape[1] * 16 != columns:
        raise Unfit(f"its scales are {scales.dtype} {tuple(scales.shape)}, and NVFP4 has one for each 16 columns")
    return Parts("nvfp4", numbers, scales.view(torch.uint8), 16, middle=1 / whole.float().reshape(1))


def of_model_optimizer(read: Read, rows: int, columns: int) -> Parts:
    numbers, scales, whole = read("weight"), read("weight_scale"), read("weight_scale_2")
    if numbers is None or numbers.shape != (rows, columns // 2) or numbers.dtype != torch.uint8:
        shape = None if numbers is None else tuple(numbers.shape)
        raise Unfit(f"its numbers have the shape {shape} for {rows} x {columns}")
    if scales is None or whole is None or whole.numel() != 1:
        raise Unfit("NVFP4 has a scale for each 16 columns and one for the whole, and not both are there")
    parts = _of_four_bit_floats(numbers, scales, whole, columns)
    return parts._replace(middle=whole.float().reshape(1))  # it is multiplied with here, where others divide by theirs


def _numbers(words: torch.Tensor, bits: int, columns: int, *, whole: bool = False) -> tuple[str, torch.Tensor]:
    """The kind, and the bytes, of words int32 [rows, n] in which codes of so many bits follow each other, none of them across
    the end of a word where they are `whole`."""
    if whole:
        kind = "uint4" if bits < 4 else "uint8"
        return kind, groups.in_bytes(codes_in_whole_words(words, bits)[:, :columns].contiguous(), groups.BITS[kind])
    if bits not in range(2, 9) or words.shape[1] != -(-columns * bits // 32):
        raise Unfit(f"{words.shape[1]} words of 32 bits are no {columns} numbers")
    if bits == 4:  # the first code lies in a word's lowest bits, and so in its first byte's
        return "uint4", words.view(torch.uint8)[:, : -(-columns // 2)].contiguous()
    codes = codes_of(words, bits)[:, :columns]
    kind = "uint4" if bits < 4 else "uint8"
    return kind, groups.in_bytes(codes.contiguous(), groups.BITS[kind])


def _group(columns: int, count: int, told: Any, of_column: torch.Tensor | None) -> int:
    """Columns of a group: as the note says where that fits, else as many as share the columns evenly."""
    if type(told) is int and told > 0 and -(-columns // told) == count:
        return told
    if columns % count and of_column is None:
        raise Unfit(f"{count} groups do not share {columns} columns evenly")
    return -(-columns // count)


def _order(of_column: torch.Tensor, columns: int, count: int, group: int) -> torch.Tensor | None:
    """The group of each column, or None where they lie side by side."""
    if of_column.shape != (columns,):
        raise Unfit(f"its g_idx names groups of {of_column.numel()} columns of {columns}")
    if int(of_column.min()) < 0 or int(of_column.max()) >= count:
        if bool((of_column == -1).all()):  # as it is initialized, where nothing was ordered
            return None
        raise Unfit(f"its g_idx names groups beyond its {count}")
    side_by_side = torch.arange(columns, device=of_column.device) // group
    return None if torch.equal(of_column.long(), side_by_side) else of_column.to(torch.int32)


def _zeros(kind: str, zeros: torch.Tensor | None, half: int, scales: torch.Tensor) -> torch.Tensor | None:
    """The zero points in as few bytes as they take: none where all are half of what the bits of the kind can count."""
    middle = 1 << (groups.BITS[kind] - 1)
    if zeros is None:
        return None if half == middle else torch.full(scales.shape, half, dtype=torch.uint8, device=scales.device)
    if bool((zeros == middle).all()):
        return None
    return (zeros.to(torch.uint8) if int(zeros.max()) < 256 else zeros).contiguous()


def checked(name: str, parts: Parts, rows: int, columns: int) -> Parts:
    if parts.kind == "mxfp4":
        fine = parts.scales < 255
    elif parts.kind == "nvfp4":
        fine = parts.scales & 127 != 127
    else:
        fine = parts.scales.isfinite()
    if not bool(fine.all()) or not (parts.middle is None or bool(parts.middle.isfinite().all())):
        raise ModelError(f"model.name: the scales of {visible(name)} are not finite.", "The files may be damaged.")
    return parts


def weight_of(each: list[Parts], shape: tuple[int, int], dtype: torch.dtype) -> PackedExperts:
    """The weight of all experts from the parts of each; one of a matrix."""
    first, (rows, columns) = each[0], shape
    numbers, scales = torch.stack([parts.numbers for parts in each]), torch.stack([parts.scales for parts in each])
    if first.kind in groups.BITS:
        zeros, of_column = _stacked([parts.zeros for parts in each]), _stacked([parts.of_column for parts in each])
        return of_groups(first.kind, numbers, scales, first.group, columns, dtype, zeros=zeros, of_column=of_column)
    middle = _stacked([parts.middle for parts in each])
    held = Held(numbers.flatten(1), scales.flatten(1), None if middle is None else middle.flatten())
    return PackedExperts(held, Form(first.kind, rows, columns, False, first.group, 1, dtype, True))


def _stacked(each: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Those of all experts, or None where they have none."""
    there = [part for part in each if part is not None]
    return torch.stack(there) if there else None
