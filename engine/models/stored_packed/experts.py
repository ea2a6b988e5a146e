"""The weight of all experts of a layer from each one's packed parts, put under each other or widened."""

from __future__ import annotations

from typing import NoReturn

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from engine.errors import ModelError, visible
from engine.kernels.experts import groups
from engine.kernels.experts.packed import PackedExperts
from engine.models.packed_experts import converted
from engine.models.stored_packed.entries import Entries
from engine.models.stored_packed.formats import Parts, weight_of


def joined(
    entries: Entries, name: str, converter: WeightConverter, sources: dict[str, list[str]], like: torch.Tensor,
    device: torch.device,
) -> PackedExperts:  # fmt: skip
    """The weight of all experts from each one's packed parts, put under each other. Raises ModelError for parts that are not
    alike, and for conversions that do more."""
    for operation in converter.operations:
        if (kind := type(operation).__name__) not in ("MergeModulelist", "Concatenate"):
            _refuse_packing(name, f"{kind} of transformers moves numbers, and not their scales")
    count, rows, columns = like.shape
    turn = _in_turn(name, converter, sources, count)
    made: list[Parts] = []
    for expert in range(count):
        each = [
            entries.parts(names[expert], device, (entries.shape(names[expert])[0], columns)) for names in turn.values()
        ]
        whole = _concatenated(name, each)
        if len(whole.numbers) != rows:
            raise ModelError(
                f"model.name: {visible(name)} has {len(whole.numbers)} rows an expert, and {rows} are wanted."
            )
        made.append(whole)
    zeroed = any(parts.zeros is not None for parts in made)
    made = [_with_zeros(parts) if zeroed else parts for parts in made]
    ordered = any(parts.of_column is not None for parts in made)
    made = [_with_order(parts, columns) if ordered else parts for parts in made]
    if len({(parts.kind, parts.group, parts.scales.shape, parts.scales.dtype) for parts in made}) > 1:
        _refuse_packing(name, "its experts are not all held in the same bits and groups")
    return weight_of(made, (rows, columns), like.dtype)


def _in_turn(name: str, converter: WeightConverter, sources: dict[str, list[str]], count: int) -> dict[str, list[str]]:
    """The names of each source, one an expert, in the order in which the conversion joins them. Raises ModelError for fewer or
    more."""
    turn = {source: sources[source] for source in converter.source_patterns if source in sources}
    for names in turn.values():
        if len(names) != count:
            raise ModelError(
                f"model.name: the files hold {len(names)} packed parts of {visible(name)} for {count} experts."
            )
    return turn


def _concatenated(name: str, each: list[Parts]) -> Parts:
    if len(each) == 1:
        return each[0]
    if any(parts.zeros is not None for parts in each):
        each = [_with_zeros(parts) for parts in each]
    first = each[0]
    for other in each[1:]:
        alike = (first.kind, first.group, first.scales.dtype) == (other.kind, other.group, other.scales.dtype)
        if not alike or not _same(first.middle, other.middle):
            _refuse_packing(name, "the parts of an expert are held in other bits, groups or scales than each other")
        if not _same(first.of_column, other.of_column):
            _refuse_packing(name, "the parts of an expert have their columns in other orders")
    zeros = [parts.zeros for parts in each if parts.zeros is not None]
    return first._replace(
        numbers=torch.cat([parts.numbers for parts in each]),
        scales=torch.cat([parts.scales for parts in each]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _with_zeros(parts: Parts) -> Parts:
    if parts.kind not in groups.BITS:
        return parts
    half = 1 << (groups.BITS[parts.kind] - 1)
    zeros = torch.full(parts.scales.shape, half, device=parts.scales.device) if parts.zeros is None else parts.zeros
    return parts._replace(zeros=zeros.to(torch.int16))


def _with_order(parts: Parts, columns: int) -> Parts:
    if parts.of_column is not None:
        return parts
    return parts._replace(of_column=(torch.arange(columns, device=parts.scales.device) // parts.group).to(torch.int32))


def joined_dequantized(
    entries: Entries, name: str, converter: WeightConverter, sources: dict[str, list[str]], like: torch.Tensor,
    model: PreTrainedModel, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """What all experts' weight stands for."""
    out = torch.empty(like.shape, dtype=like.dtype, device=device)
    turn = _in_turn(name, converter, sources, len(out))
    for expert, room in enumerate(out):
        parts = {source: [entries.dequantize(names[expert], like.dtype, device)] for source, names in turn.items()}
        room.copy_(converted(converter, parts, name, like, model.config))
    return out


def _refuse_packing(name: str, reason: str) -> NoReturn:
    raise ModelError(
        f"model.quantize_moe_experts: {visible(name)} cannot stay packed: {reason}.",
        "Set model.quantize_moe_experts to false.",
    ).mended_by({"model.quantize_moe_experts": False})
