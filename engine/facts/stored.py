"""How a model's files hold weights that were quantized before, by the note in their config.json; read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError, visible
from engine.model_files import Tensor, place

SERVED = "", "fp8", "mxfp4", "bitsandbytes"
"""Plain numbers, and what is loaded as it is: FP8 and MXFP4 here, the third by its own package."""


def stored_as(note: Any) -> str:
    """`quant_method` of a `quantization_config`, with `fp8` for every writer's FP8 numbers with scales; empty for plain ones."""
    if not isinstance(note, Mapping):
        return ""
    method = str(note.get("quant_method", ""))[:60]
    return "fp8" if method == "fbgemm_fp8" or _in_fp8(method, note) else method


def refuse_without_note(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError for numbers in eight bits of a folder whose config.json does not say so: transformers would take them
    as they stand, without their scales."""
    name = next((name for name, each in sorted(tensors.items()) if each.dtype.startswith(("F8_", "F6_", "F4"))), None)
    if name is not None and not stored_as(config.get("quantization_config")):
        raise ModelError(
            f"{place(folder)}: {visible(name)} is stored in {visible(tensors[name].dtype)}, and config.json says nothing of "
            "scales, without which its numbers mean nothing.",
            'Copy the note on quantization into it; where hf_quant_config.json names FP8 it is "quantization_config": '
            '{"quant_method": "modelopt", "quant_algo": "FP8"}.',
        )


def block_of(note: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share one scale of FP8 numbers; None for one a matrix or a row, and for sizes that are none."""
    sizes = [note.get("weight_block_size"), *(each.get("block_structure") for each in _groups(note))]
    size = next((each for each in sizes if isinstance(each, (list, tuple)) and len(each) == 2), (None, None))
    rows, columns = size
    return (rows, columns) if type(rows) is type(columns) is int and min(rows, columns) > 0 else None


def _in_fp8(method: str, note: Mapping[str, Any]) -> bool:
    """Whether llm-compressor or NVIDIA's Model Optimizer wrote FP8 numbers that a scale is multiplied with."""
    if method == "modelopt":
        return note.get("quant_algo") == "FP8"
    plain = note.get("format") in ("float-quantized", "naive-quantized")
    kinds = [(each.get("type"), each.get("num_bits"), each.get("symmetric", True)) for each in _groups(note)]
    known = bool(kinds) and all(each == ("float", 8, True) for each in kinds)
    return method == "compressed-tensors" and plain and known


def _groups(note: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each group of layers."""
    groups = note.get("config_groups")
    found = (
        [each.get("weights") for each in groups.values() if isinstance(each, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [each if isinstance(each, Mapping) else {} for each in found]
