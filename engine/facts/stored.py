"""How a model's files hold weights that were quantized before, by the note in their config.json; read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVED = "", "fp8", "mxfp4", "bitsandbytes"
"""Plain numbers, and what is loaded as it is: FP8 and MXFP4 here, the third by its own package."""


def stored_as(note: Any) -> str:
    """`quant_method` of a `quantization_config`, with `fp8` for every writer's FP8 numbers with scales; empty for plain ones."""
    if not isinstance(note, Mapping):
        return ""
    method = str(note.get("quant_method", ""))[:60]
    return "fp8" if method == "fbgemm_fp8" or _in_fp8(method, note) else method


def block_of(note: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share one scale of FP8 numbers; None for one a matrix or a row."""
    sizes = [note.get("weight_block_size"), *(each.get("block_structure") for each in _groups(note))]
    size = next((each for each in sizes if isinstance(each, (list, tuple)) and len(each) == 2), None)
    return None if size is None else (int(size[0]), int(size[1]))


def _in_fp8(method: str, note: Mapping[str, Any]) -> bool:
    """Whether llm-compressor or NVIDIA's Model Optimizer wrote FP8 numbers that a scale is multiplied with."""
    if method == "modelopt":
        return note.get("quant_algo") == "FP8"
    plain = note.get("format") in ("float-quantized", "naive-quantized")
    kinds = [(each.get("type"), each.get("num_bits"), each.get("symmetric", True)) for each in _groups(note)]
    return method == "compressed-tensors" and plain and set(kinds) == {("float", 8, True)}


def _groups(note: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each group of layers."""
    groups = note.get("config_groups")
    found = (
        [each.get("weights") for each in groups.values() if isinstance(each, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [each if isinstance(each, Mapping) else {} for each in found]
