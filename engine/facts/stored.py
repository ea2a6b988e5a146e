"""How a model's files hold weights that were quantized before, by the note in their config.json; read without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError, visible
from engine.model_files import Tensor, place, read_json, stored_weights

PACKED = "gptq", "awq", "compressed-tensors", "modelopt"
"""What tools for quantization after training write: integers with scales or NVFP4, packed (`engine.models.stored_packed`)."""
SERVED = "", "fp8", "mxfp4", "bitsandbytes", *PACKED
"""Plain numbers, and what is loaded as it is: by bitsandbytes' own package, all else here."""
ROUNDED_TO = "fp8", "mxfp4", "bitsandbytes", *PACKED
"""Formats of files into which a merged weight is rounded again (`engine.export.to_packed`)."""
_ROUNDED = "int-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
"""Formats of compressed-tensors in which layers stay as they are stored."""


_WORDS = "qweight", "weight_packed"


NOTE_FILES = "quantize_config.json", "quant_config.json", "hf_quant_config.json"
"""Where AutoGPTQ, AutoAWQ and Model Optimizer wrote their notes before config.json had them."""


def with_note(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A folder's config.json with its note on quantization, which older tools put into a file of its own.

    Such a file says nothing of weights that are plain, and what cannot be read is left to those who miss the note.
    """
    if config.get("quantization_config") is not None:
        return config
    with contextlib.suppress(ModelError):
        file = next((folder / name for name in NOTE_FILES if (folder / name).is_file()), None)
        note = None if file is None else _note_of(file.name, read_json(file))
        if note is not None and any(name.endswith((".qweight", ".weight_scale")) for name in stored_weights(folder)):
            return {**config, "quantization_config": note}
    return config


def _note_of(name: str, told: Any) -> dict[str, Any] | None:
    """What a tool's own file says, in the words of config.json."""
    if not isinstance(told, Mapping):
        return None
    if name == NOTE_FILES[0]:
        return {"quant_method": "gptq", **told}
    if name == NOTE_FILES[1]:
        more = {new: told[old] for new, old in (("bits", "w_bit"), ("group_size", "q_group_size")) if old in told}
        return {"quant_method": "awq", **told, **more}
    inner = told.get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) else None


def stored_as(note: Any) -> str:
    """`quant_method` of a `quantization_config`, with `fp8` for every writer's FP8 numbers with scales and, in parentheses, the
    form of a method of which others are served; empty for plain numbers."""
    if not isinstance(note, Mapping):
        return ""
    method = str(note.get("quant_method", ""))[:60]
    if method == "fbgemm_fp8" or _in_fp8(method, note):
        return "fp8"
    form = _unserved(method, note)
    return f"{method} ({form[:60]})" if form else method


def packed_size(note: Any) -> float:
    """Bytes of one number of a layer that is stored packed, with its share of scales and zero points; 0 where none is."""
    if stored_as(note) not in PACKED:
        return 0.0
    if note["quant_method"] == "modelopt":
        return 0.5 + 1 / 16
    told = next(iter(_groups(note)), {}) if note["quant_method"] == PACKED[2] else note
    bits, group = (told.get(name) for name in ("num_bits" if told is not note else "bits", "group_size"))
    numbers = 1.0 if type(bits) is int and bits > 4 else 0.5
    uneven = told.get("symmetric" if told is not note else "sym", note["quant_method"] != "awq") is False
    floating = told.get("type") == "float"
    each = 1.0 if floating else 2.0 + (uneven or note["quant_method"] == "awq")
    return numbers + (each / group if type(group) is int and group > 0 else 0.0)


def growth(name: str, tensors: Mapping[str, Tensor], note: Any) -> float:
    """How many times the bytes of this entry of the files it is held in: codes of two and three bits each take four, of five to
    seven eight."""
    layer, _, end = name.rpartition(".")
    if end not in _WORDS or tensors[name].dtype != "I32":
        return 1.0
    told = next(iter(_groups(note)), {}) if note["quant_method"] == PACKED[2] else note
    bits, order = told.get("bits", told.get("num_bits")), tensors.get(f"{layer}.g_idx")
    if order is not None and end == "qweight":
        bits = tensors[name].shape[0] * 32 // order.shape[0]
    return (4 if bits <= 4 else 8) / bits if type(bits) is int and bits in range(2, 9) else 1.0


def bits_of(note: Any) -> tuple[int, ...]:
    """Bits of the weights of each group of layers that compressed-tensors tells of."""
    return tuple(each["num_bits"] for each in _groups(note) if each.get("num_bits") in range(2, 9))


def _unserved(method: str, note: Mapping[str, Any]) -> str:
    """Which form of a method it is, where others are served and this is not."""
    if method == "gptq":
        form = str(note.get("checkpoint_format") or note.get("format") or method)
        if form not in ("gptq", "gptq_v2") or note.get("is_marlin_format"):
            return form if form not in ("gptq", "gptq_v2") else "marlin"
        if note.get("pack_dtype", "int32") not in ("int32", None):
            return f"packed in {note['pack_dtype']}"
        return "" if note.get("bits", 4) in (2, 3, 4, 8) else f"{note['bits']} bits"
    if method == "awq":
        form = str(note.get("version") or note.get("format") or "gemm").lower()
        if note.get("backend") == "llm-awq" or form != "gemm":
            return form if form != "gemm" else "llm-awq"
        if note.get("zero_point", True) is not True:
            return "without zero points"
        return "" if note.get("bits", note.get("w_bit", 4)) == 4 else f"{note.get('bits')} bits"
    if method == "modelopt":
        algorithm = str(note.get("quant_algo") or "no algorithm named")
        return "" if algorithm == "NVFP4" else algorithm.lower()
    return _of_compressed_tensors(note) if method == "compressed-tensors" else ""


def _of_compressed_tensors(note: Mapping[str, Any]) -> str:
    groups = note.get("config_groups")
    told = [each for each in groups.values() if isinstance(each, Mapping)] if isinstance(groups, Mapping) else []
    formats = {str(each.get("format") or note.get("format")) for each in told} or {str(note.get("format"))}
    if odd := sorted(formats - {*_ROUNDED}):
        return odd[0]
    sparse = note.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "", "dense"):
        return str(sparse["format"])
    if note.get("transform_config"):
        return "transforms"
    kinds = {(each.get("type", "int"), each.get("num_bits")) for each in _groups(note) if _hashable(each)}
    known = [(kind == "float" and bits == 4) or (kind == "int" and bits in range(2, 9)) for kind, bits in kinds]
    if len(known) == 0 or not all(known):
        return "weights of another kind"
    strategies = {str(each.get("strategy") or "group") for each in _groups(note)}
    odd = sorted(strategies - {"group", "channel", "tensor", "tensor_group"})
    return f"scales of a {odd[0]}" if odd else ""


def _hashable(told: Mapping[str, Any]) -> bool:
    return all(isinstance(told.get(name), (str, int, type(None))) for name in ("type", "num_bits"))


def refuse_without_note(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError for numbers in eight bits or packed ones of a folder whose config.json does not say so, which
    transformers would take as they stand or leave out, and for scales beside packed ones that no weight has."""
    method = stored_as(config.get("quantization_config"))
    name = next((name for name, each in sorted(tensors.items()) if each.dtype.startswith(("F8_", "F6_", "F4"))), None)
    packed = next((name for name in sorted(tensors) if name.endswith(tuple(f".{end}" for end in _WORDS))), None)
    if packed is not None and not method:
        raise ModelError(
            f"{place(folder)}: {visible(packed)} is packed, and config.json says nothing of quantization, without which its "
            "numbers mean nothing.",
            'Copy the note on quantization into it as "quantization_config", with its "quant_method"; older tools wrote it as '
            "quantize_config.json (GPTQ) or quant_config.json (AWQ).",
        )
    if name is not None and not method:
        raise ModelError(
            f"{place(folder)}: {visible(name)} is stored in {visible(tensors[name].dtype)}, and config.json says nothing of "
            "scales, without which its numbers mean nothing.",
            'Copy the note on quantization into it; where hf_quant_config.json names FP8 it is "quantization_config": '
            '{"quant_method": "modelopt", "quant_algo": "FP8"}.',
        )
    _refuse_experts_as_one(folder, method, tensors)
    alone = (name for name in sorted(tensors) if name.endswith(".scales") and f"{name[:-6]}qweight" not in tensors)
    if method in PACKED[:2] and (name := next(alone, None)) is not None:
        raise ModelError(
            f"{place(folder)}: {visible(name)} is no scale of a packed weight but of what a layer computes, by which AWQ "
            "divides after some activations; transformers' model has no place for it.",
            "Take the model that it was made from, and model.quantization: nf4 holds it in as few bits.",
        )


def _refuse_experts_as_one(folder: Path, method: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError for all experts of a layer packed as one weight: no format says how its scales lie, and tools write
    experts one by one."""
    if method not in PACKED:
        return
    for name, each in sorted(tensors.items()):
        packed = each.dtype in ("U8", "I8", "I32") and (name.endswith(_WORDS) or ".experts." in name)
        if packed and len(each.shape) > 2:
            raise ModelError(
                f"{place(folder)}: {visible(name)} holds all experts of a layer packed as one weight {list(each.shape)}, and of "
                f"{method} experts are read that are packed one by one.",
                "Take a copy whose experts lie one by one, as llm-compressor writes them where it makes linear layers of them, or "
                "the model that it was made from: model.quantization nf4 or nvfp4 holds its experts in as few bits.",
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
