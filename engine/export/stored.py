"""Where a weight of a model lies in its base's files: as it is, under another name, or cut into weights of single experts.

Experts that the files hold in MXFP4 count as the bfloat16 that they stand for, which is exact, and numbers in FP8 as the
bfloat16 that their products with their scales are rounded to, as training sees them; so do packed integers.

transformers puts experts together while it loads and takes them apart while it saves. What its saving makes of a weight is
asked here with numbers that say where they come from, so that no family is known by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from engine import model_files
from engine.errors import ModelError, visible
from engine.facts.stored import PACKED, block_of, stored_as, with_note
from engine.kernels.experts.packed import of_mxfp4
from engine.models.stored_fp8 import widened
from engine.models.stored_packed.entries import Entries
from engine.models.stored_packed.in_bitsandbytes import BitsAndBytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FP8 = "F8_E4M3", "F8_E5M2"
WIDE = 3
"""Columns of a probe: more are not needed to see which side of a weight is which."""


_OF_THE_CACHE = (
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
    ".k_proj.k_scale",
    ".v_proj.v_scale",
)
"""Scales of a cache of keys and values in eight bits, as llm-compressor and Model Optimizer write them, for servers alone."""


@dataclass(frozen=True)
class Share:
    """What one weight of the files holds of a weight of the model."""

    expert: int | None
    """The expert whose it is, a matrix; None where it holds what the weight of the model holds, all experts."""
    rows: slice
    """Which outputs."""
    turned: bool
    """Whether it is [in, out], each expert's too."""

    def of(self, factors: torch.Tensor) -> torch.Tensor:
        """Its rows of what each expert has [E, out, ...]."""
        return factors[:, self.rows] if self.expert is None else factors[self.expert, self.rows]


def dequantized_weights(folder: Path) -> dict[str, model_files.Tensor]:
    """The weights by the headers of a folder's files, those in FP8 and experts in MXFP4, [E, in, out], as bfloat16."""
    every = model_files.stored_weights(folder)
    return {
        name: each
        for part in model_files.weight_files(folder)
        for name, each in dequantized_header(part, every).items()
    }


def dequantized_header(file: Path, every: Mapping[str, model_files.Tensor]) -> dict[str, model_files.Tensor]:
    """The same of one file, of which others of `every` may hold a part."""
    found = {}
    packed = packed_in(file.parent)
    for name, each in model_files.header(file).items():
        if packed is not None and packed.holds(name):
            if packed.leads(name):
                layer = packed.layer_of(name)
                found[f"{layer}.weight"] = model_files.Tensor("BF16", packed.shape(layer))
            continue
        if name.endswith(_OF_THE_CACHE) and len(each.shape) <= 1:
            continue
        whole, _, end = name.rpartition("_")
        blocks = every.get(f"{whole}_blocks")
        if end in ("blocks", "scales") and blocks and len(blocks.shape) == 4 and f"{whole}_scales" in every:
            if end == "blocks":
                experts, rows, count, half = each.shape
                found[whole] = model_files.Tensor("BF16", (experts, 2 * half * count, rows))
        elif each.dtype in _FP8:
            found[name] = model_files.Tensor("BF16", each.shape)
        elif not _scales_fp8(name, every):
            found[name] = each
    return found


def packed_in(folder: Path) -> Entries | BitsAndBytes | None:
    """What GPTQ, AWQ, compressed-tensors, Model Optimizer or bitsandbytes packed in a folder's files; None where no note says
    so."""
    path = folder / "config.json"
    return _entries(folder, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=1)
def _entries(folder: Path, _: int) -> Entries | BitsAndBytes | None:
    note = with_note(folder, model_files.read_json(folder / "config.json")).get("quantization_config")
    if stored_as(note) == "bitsandbytes":
        return BitsAndBytes(folder)
    return Entries(folder, note) if note is not None and stored_as(note) in PACKED else None


def _scales_fp8(name: str, every: Mapping[str, model_files.Tensor]) -> bool:
    """Whether this is a scale of numbers in FP8, or of what they are multiplied with."""
    ends = {"_scale_inv": "", "_scale": "", ".input_scale": ".weight"}
    weights = (every.get(name.removesuffix(end) + rest) for end, rest in ends.items() if name.endswith(end))
    return any(weight is not None and weight.dtype in _FP8 for weight in weights)


def read_weight(folder: Path, name: str) -> torch.Tensor:
    """A weight of the folder's files by its name in `dequantized_weights`. Raises KeyError for one that is not there."""
    packed = packed_in(folder)
    layer, _, end = name.rpartition(".")
    if packed is not None and end == "weight" and layer in packed:
        return packed.dequantize(layer, torch.bfloat16)
    for file in model_files.weight_files(folder):
        header = model_files.header(file)
        for there in (name, f"{name}_blocks"):
            if there in header:
                with safe_open(file, "pt") as weights:
                    value: torch.Tensor = weights.get_tensor(there)
                if there == name:
                    return value if header[there].dtype not in _FP8 else _from_fp8(folder, name, value)
                scales = read_weight(folder, f"{name}_scales")
                return of_mxfp4(value, scales, torch.bfloat16, turned=True).all_unpacked().contiguous()
    raise KeyError(name)


def _from_fp8(folder: Path, name: str, numbers: torch.Tensor) -> torch.Tensor:
    scale = None
    for end in ("_scale_inv", "_scale"):
        with contextlib.suppress(KeyError):
            scale = read_weight(folder, f"{name}{end}")
    told = with_note(folder, model_files.read_json(folder / "config.json")).get("quantization_config")
    block = block_of(told) if isinstance(told, Mapping) else None
    return widened(name, numbers, scale, block, torch.bfloat16)


def is_turned(model: torch.nn.Module, name: str) -> bool:
    """Whether a weight of the model is [E, in, out], as gpt-oss has it; the others are [E, out, in]."""
    owner, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    return getattr(module, leaf).dim() == 3 and bool(getattr(module, "is_transposed", False))


def shares(model: PreTrainedModel, name: str, stored: Mapping[str, model_files.Tensor]) -> dict[str, Share]:
    """The weights of the files that hold the model's weight `name` of two or three dimensions, by their names there.

    `model` may be without memory. Raises ModelError where the files hold it packed, or in a way that cannot be told.
    """
    shape, turned = tuple(model.get_parameter(name).shape), is_turned(model, name)
    if name in stored:
        if stored[name].shape == shape:
            return {name: Share(None if len(shape) == 3 else 0, slice(None), turned)}
        if len(shape) == 3 and stored[name].shape == (shape[0], shape[2], shape[1]):
            return {name: Share(None, slice(None), not turned)}
    if f"{name}_blocks" in stored:
        raise ModelError(
            f"{visible(name)}: the base's files hold these experts packed in four bits, into which no adapter is merged.",
            "Export the adapter itself (--to adapter), or train on a copy of the base in bfloat16.",
        )
    experts, sides = shape[:-2], shape[-2:]
    out, width = sides[::-1] if turned else sides
    probe = torch.arange(prod(experts) * out * WIDE, dtype=torch.int32).view(*experts, out, WIDE)
    found = {}
    for each, value in _saved(model, name, probe.mT.contiguous() if turned else probe).items():
        share = found[each] = _share(name, value, probe.view(-1, out, WIDE))
        rows = len(range(out)[share.rows])
        wanted = (*(experts if share.expert is None else ()), *((width, rows) if share.turned else (rows, width)))
        if each not in stored or stored[each].shape != wanted:
            raise _unknown(name)
    return found


def stored_name(model: PreTrainedModel, name: str, stored: Mapping[str, model_files.Tensor]) -> str:
    """The files' name of a weight that has one there whole, its numbers in the same places; the same name where that cannot
    be told."""
    if name in stored or name not in dict(model.named_parameters()):
        return name
    value = torch.empty(model.get_parameter(name).shape, device="meta")
    found = _saved(model, name, value)
    other, shape = next((each, value.shape) for each, value in found.items())
    whole = len(found) == 1 and other in stored and stored[other].shape == tuple(shape)
    return other if whole and _stays_in_place(model, name, value.shape) else name


def _stays_in_place(model: PreTrainedModel, name: str, shape: torch.Size) -> bool:
    """Whether saving gives a weight another name and no other order of its rows, as rotary embeddings of other builds have."""
    rows, *others = shape
    probe = torch.arange(rows, dtype=torch.int32).view(rows, *(1 for _ in others)).expand(rows, *(WIDE for _ in others))
    try:
        (made,) = _saved(model, name, probe).values()
    except ModelError:
        return False
    return torch.equal(made, probe)


def _saved(model: PreTrainedModel, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What transformers' saving makes of one weight."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(model, {name: value}))
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, RuntimeError) as problem:
        raise _unknown(name) from problem


def _share(name: str, value: torch.Tensor, whole: torch.Tensor) -> Share:
    """What a saved probe says; `whole` is the probe [E, out, WIDE]."""
    if value.dim() not in (2, 3) or not value.numel():
        raise _unknown(name)
    flat = value.flatten(0, -2)
    turned = value.shape[-1] != WIDE or int(flat[0, 1] - flat[0, 0]) != 1
    straight = value.mT if turned else value
    if straight.shape[-1] != WIDE:
        raise _unknown(name)
    out = whole.shape[1]
    first = straight[..., 0].flatten() // WIDE
    expert = int(first[0]) // out if value.dim() == 2 else None
    rows = (first[: straight.shape[-2]] % out).tolist()
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    share = Share(expert, slice(rows[0], rows[-1] + 1, step), turned)
    if step < 1 or not torch.equal(share.of(whole), straight):
        raise _unknown(name)
    return share


def _unknown(name: str) -> ModelError:
    return ModelError(
        f"{visible(name)}: how the base's files hold this weight cannot be told, so nothing is merged into it.",
        "Export the adapter itself (--to adapter).",
    )
