"""An adapter merged into its base, a weight at a time: PEFT's own layers merge, and no more than one layer is in memory.

Adapters on experts that are one weight are added expert by expert, into the form in which the base's files hold these. The base
is read from its files and written in their number format, each file beside the one it comes from. Of a base that was quantized
for training, what training saw is merged: the weights as four or eight bits hold them, in the files' format. What the files hold
in FP8, and experts in MXFP4, becomes bfloat16.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from engine import model_files
from engine.config.kinds import LABELS
from engine.config.tree import RunConfig
from engine.errors import ModelError, visible
from engine.export.parity import loader_of
from engine.export.stored import (
    Share,
    dequantized_header,
    dequantized_weights,
    is_turned,
    read_weight,
    shares,
    stored_name,
)
from engine.export.streamed import quantized_weights
from engine.features.packed_experts import EXPERTS_ALONE, packs
from engine.kernels.experts import ExpertLoRA, mxfp4, nvfp4
from engine.models.packed_experts import PROJECTIONS

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from transformers import PreTrainedModel

Report = Callable[[str, int, int], None]
PREFIX = "base_model.model."
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NAMES = NAMES | {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"}
"""Those that are written too, and into which nothing is merged."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
_ITEMS = {name: dtype.itemsize for dtype, name in _NAMES.items()}


@dataclass
class Plan:
    """What becomes of each weight of the base, by its name in the model."""

    bare: torch.nn.Module
    """The model without its adapter, as its weights' own names are; without memory (on the meta device), like the layers."""
    layers: dict[str, LoraLayer]
    """Layers with an adapter by their path."""
    trained: dict[str, str]
    """Weights that were trained whole: name in the model to name in the adapter's file."""
    low_rank: dict[str, dict[str, str]]
    """For each path, parameter of the layer to name in the adapter's file."""
    quantized: set[str] = field(default_factory=set)
    """Weights that training held in four or eight bits."""
    tied: tuple[str, str] | None = None
    """(embedding, head) where they are one weight in the base's files and two from now on."""
    wrapped: dict[str, ParamWrapper] = field(default_factory=dict)
    """What PEFT's `target_parameters` made by its path: an adapter on a weight, not on a layer."""
    shares: dict[str, tuple[str, Share]] = field(default_factory=dict)
    """By its name in the files, what a weight there holds of one with such an adapter, by that one's path in `wrapped`, or of
    experts that were trained whole, by their name in `trained`."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Other weights that the files name otherwise than the model: name in the files to name in the model."""
    packed: dict[str, tuple[str, Share]] = field(default_factory=dict)
    """By its name in the files, what a weight there holds of experts that training held in few bits, by their name in the model."""
    left_out: set[str] = field(default_factory=set)
    """Weights of the files that the model has no place for: the head that a base for text predicts with, where it judges now."""

    def changes(self, name: str) -> bool:
        """Whether a weight, by its name in the files, is another one with the adapter merged in."""
        inner = self.renamed.get(name, name)
        return name in self.shares or inner in self.trained or inner.removesuffix(".weight") in self.layers

    def factors(self, path: str, weights: Any) -> ExpertLoRA:
        """The adapter of a wrapped weight, as views of its file `weights`."""
        layer, keys = self.wrapped[path], self.low_rank[path]
        a, b = (weights.get_tensor(keys[f"lora_{part}.default.weight"]) for part in "AB")
        return ExpertLoRA.from_peft(a, b, layer.num_experts, layer.scaling["default"])

    def delta(self, path: str, weights: Any) -> torch.Tensor:
        """What PEFT's own layer adds to a wrapped weight, [E, out, in] in float32."""
        layer: Any = self.wrapped[path]
        layer.to_empty(device="cpu")
        try:
            found = {part: weights.get_tensor(key).float() for part, key in self.low_rank[path].items()}
            layer.load_state_dict(found, strict=False)
            added: torch.Tensor = layer.get_delta_weight("default")
            return added.mT if getattr(layer.get_base_layer(), "is_transposed", False) else added
        finally:
            layer.to_empty(device="meta")


def plan(config: RunConfig, base: Path, adapter: Path, *, merging: bool = True) -> Plan:
    """What is to be merged where. Raises ModelError for what has no place in the base; where the adapter is only read, not for
    experts that the base's files hold in a form which nothing is merged into."""
    import transformers
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    head = config.method.head
    settings = LoraConfig.from_pretrained(str(adapter))
    shape = transformers.AutoConfig.from_pretrained(base)
    shape.update(LABELS.get(head, {}))
    with torch.device("meta"):
        loader = loader_of(config, base)
        model, bare = (loader.from_config(shape, dtype=torch.float32) for _ in range(2))
    tied = _tied(model)
    quantized = quantized_weights(config, model)
    stored = dequantized_weights(base)
    skeleton = get_peft_model(model, settings, low_cpu_mem_usage=True)
    every = {
        path.removeprefix(PREFIX): module for path, module in skeleton.named_modules() if isinstance(module, LoraLayer)
    }
    wrapped = {path: layer for path, layer in every.items() if isinstance(layer, ParamWrapper)}
    layers = {path: layer for path, layer in every.items() if path not in wrapped}
    trained: dict[str, str] = {}
    low_rank: dict[str, dict[str, str]] = {path: {} for path in every}
    with safe_open(adapter / model_files.ADAPTER_WEIGHTS, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            path, _, last = key.removeprefix(PREFIX).partition(".lora_")
            if last:
                if path not in every:
                    raise _no_place(key)
                low_rank[path][_parameter(last)] = key
                _refuse_other_shape(wrapped.get(path), _parameter(last), key, file)
            else:
                name = path.replace(".base_layer", "").replace(".modules_to_save.default", "")
                trained[name] = key
    for path, layer in every.items():
        own = (name for name in _module(layer).state_dict() if not name.startswith("base_layer."))
        wanted = {name for name in own if "lora_" in name and "dropout" not in name}
        if wanted != set(low_rank[path]):
            raise ModelError(
                f"{model_files.ADAPTER_WEIGHTS}: lacks weights for the layer {visible(path)}.",
                "Take another checkpoint.",
            )
    if tied is not None and not _either(tied, layers, trained):
        tied = None
    held = _held(bare, wrapped, trained, stored, merging)
    names = [*trained, *(f"{path}.weight" for path in layers)]
    renamed = {there: name for name in names if (there := stored_name(bare, name, stored)) != name}
    packed = _packed(config, bare, stored) if merging else {}
    left_out = _lm_head_weights(shape, bare) & stored.keys() if head in LABELS else set()
    return Plan(bare, layers, trained, low_rank, quantized, tied, wrapped, held, renamed, packed, left_out)


def _lm_head_weights(shape: Any, judge: Any) -> set[str]:
    """The weights of the head that a base for text predicts with, where a judge has none of that name."""
    import transformers

    if type(shape) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return set()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape)
    head = model.get_output_embeddings()
    paths = [path for path, module in model.named_modules() if module is head]
    return {f"{path}.{leaf}" for path in paths for leaf in ("weight", "bias")} - judge.state_dict().keys()


def _held(
    bare: Any,
    wrapped: Mapping[str, Any],
    trained: Iterable[str],
    stored: Mapping[str, model_files.Tensor],
    merging: bool,
) -> dict[str, tuple[str, Share]]:
    """The weights of the files that hold a part of an adapted or a trained weight of three dimensions, with that one's name.
    Raises ModelError, where anything is merged, for files that hold it in a form which nothing is merged into."""
    held: dict[str, tuple[str, Share]] = {}
    for path, layer in wrapped.items():
        name = f"{path.replace('.base_layer', '')}.{layer.parameter_name}"
        try:
            held |= {there: (path, share) for there, share in shares(bare, name, stored).items()}
        except ModelError:
            if merging:
                raise
    for name in trained if merging else ():
        if name not in stored and dict(bare.named_parameters()).get(name, torch.empty(0)).ndim == 3:
            held |= {there: (name, share) for there, share in shares(bare, name, stored).items()}
    return held


def _packed(config: RunConfig, bare: Any, stored: Mapping[str, model_files.Tensor]) -> dict[str, tuple[str, Share]]:
    """What the files hold of the experts that training held in few bits. Raises ModelError where that cannot be told."""
    if not packs(config):
        return {}
    names = [name for name, weight in bare.named_parameters() if ".experts." in name and weight.ndim == 3]
    return {
        there: (name, share)
        for name in names
        if name.endswith(PROJECTIONS)
        for there, share in shares(bare, name, stored).items()
    }


def _refuse_other_shape(layer: ParamWrapper | None, parameter: str, key: str, file: Any) -> None:
    if layer is None:
        return
    found, wanted = list(file.get_slice(key).get_shape()), list(_module(layer).get_parameter(parameter).shape)
    if found != wanted:
        raise ModelError(
            f"{model_files.ADAPTER_WEIGHTS}: {visible(key)} is {found}, and the base's weight asks for {wanted}.",
            "The base is another than the one the adapter was trained on: put that one back, or export the adapter alone.",
        )


def _parameter(last: str) -> str:
    """The parameter in a layer of what follows `.lora_` in the file, where the adapter has no name."""
    kind, _, rest = last.partition(".")
    if kind == "magnitude_vector":
        return "lora_magnitude_vector.default.weight"
    return f"lora_{kind}.default" + (f".{rest}" if rest else "")


def _tied(model: PreTrainedModel) -> tuple[str, str] | None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is not head.weight:
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    return f"{paths[id(embedding)]}.weight", f"{paths[id(head)]}.weight"


def _either(tied: tuple[str, str], layers: Mapping[str, Any], trained: Mapping[str, str]) -> bool:
    return any(name in trained or name.removesuffix(".weight") in layers for name in tied)


def _no_place(key: str) -> ModelError:
    return ModelError(
        f"{model_files.ADAPTER_WEIGHTS}: {visible(key)} has no place in the base model.",
        "The base is another than the one the adapter was trained on: put that one back, or export the adapter alone.",
    )


def merge(config: RunConfig, base: Path, adapter: Path, into: Path, report: Report) -> None:
    """Writes the merged weights, and their index where there are several files, into the folder `into`.

    Raises ModelError where a weight of the adapter has no place in the base's files, or these hold no plain numbers.
    """
    made = plan(config, base, adapter)
    every, stored = model_files.stored_weights(base), dequantized_weights(base)
    odd = next((name for name, each in stored.items() if each.dtype not in DTYPES), None)
    if odd is not None:
        raise ModelError(
            f"{visible(odd)}: is stored in {stored[odd].dtype}, into which an adapter cannot be merged.",
            "Export the adapter itself (--to adapter), or train on the model in 16 bits.",
        )
    added = added_weights(made, stored)
    refuse_left_over(made, stored, added)
    files = model_files.weight_files(base)
    total, done = sum(file.stat().st_size for file in files), 0
    with safe_open(adapter / model_files.ADAPTER_WEIGHTS, "pt") as weights:
        for number, file in enumerate(files):
            last = added if number == len(files) - 1 else {}
            header = _kept(made, dequantized_header(file, every))
            if not header and not last:
                continue

            def tensors(
                file: Path = file, header: Mapping[str, model_files.Tensor] = header, last: Mapping[str, str] = last
            ) -> Iterator[torch.Tensor]:
                nonlocal done
                with safe_open(file, "pt") as base_weights:
                    for name in header:
                        plain = name in every and every[name] == header[name]
                        value = base_weights.get_tensor(name) if plain else read_weight(base, name)
                        done += value.nbytes
                        if name in made.packed:
                            value = _as_packed(config, made, name, value, base)
                        yield merged_weight(config, made, name, value, weights)
                        report("Merging", done, total)
                for name, origin in last.items():
                    value = read_weight(base, origin) if origin else weights.get_tensor(made.trained[name])
                    yield merged_weight(config, made, name, value, weights) if origin else value

            shapes = header | {name: shape_of(made, name, origin, stored, weights) for name, origin in last.items()}
            write_safetensors(into / file.name, shapes, tensors())
    index = base / model_files.INDEX
    if len(files) > 1 or (files and files[0].name != model_files.WEIGHTS and index.is_file()):
        content = model_files.read_json(index)
        content["weight_map"] = {
            name: file.name for file in files for name in _kept(made, dequantized_header(file, every))
        }
        content["weight_map"] |= dict.fromkeys(added, files[-1].name)
        content.setdefault("metadata", {})["total_size"] = size_of_weights(into)
        (into / model_files.INDEX).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _kept(made: Plan, header: Mapping[str, model_files.Tensor]) -> dict[str, model_files.Tensor]:
    return {name: each for name, each in header.items() if name not in made.left_out}


def added_weights(made: Plan, stored: Mapping[str, model_files.Tensor]) -> dict[str, str]:
    """Weights that the base's files do not hold, by name: the weight they begin as, or nothing for a new head."""
    added: dict[str, str] = {}
    known = {*made.renamed.values(), *(path for path, _ in made.shares.values())}
    if made.tied is not None:
        embedding, head = made.tied
        there, lacking = (embedding, head) if embedding in stored else (head, embedding)
        if lacking not in stored:
            added[lacking] = there
    for name in made.trained:
        if name not in stored and name not in added and name not in known:
            added[name] = ""
    return added


def refuse_left_over(made: Plan, stored: Mapping[str, Any], added: Mapping[str, str]) -> None:
    plain = made.bare.state_dict()
    there = {*stored, *added, *made.renamed.values()}
    for path in made.layers:
        if f"{path}.weight" not in there:
            raise _no_place(next(iter(made.low_rank[path].values())))
    for name, origin in added.items():
        if not origin and not any(name == each or each.endswith("." + name) for each in plain):
            raise _no_place(made.trained[name])


def shape_of(made: Plan, name: str, origin: str, stored: Mapping[str, model_files.Tensor], weights: Any) -> Any:
    if origin:
        return stored[origin]
    part = weights.get_slice(made.trained[name])
    return model_files.Tensor(part.get_dtype(), tuple(part.get_shape()))


@torch.no_grad()
def merged_weight(config: RunConfig, made: Plan, name: str, value: torch.Tensor, weights: Any) -> torch.Tensor:
    """The weight as the trained model has it, in the format of the base's file."""
    if name in made.shares:
        return _with_experts(made, name, value, weights)
    name = made.renamed.get(name, name)
    if name in made.trained and name.removesuffix(".weight") not in made.layers:
        return weights.get_tensor(made.trained[name]).to(value.dtype)
    path = name.removesuffix(".weight")
    seen = _as_trained(config, value) if name in made.quantized else value
    if not name.endswith(".weight") or path not in made.layers:
        return seen.to(value.dtype)
    layer = made.layers[path]
    module = _module(layer)
    module.to_empty(device="cpu")
    try:
        found = {part: weights.get_tensor(key).float() for part, key in made.low_rank[path].items()}
        module.load_state_dict(found, strict=False)
        inner = layer.get_base_layer()
        inner.weight.data = seen.float()
        layer.merge(safe_merge=True)
        return inner.weight.data.to(value.dtype).contiguous()
    finally:
        layer.merged_adapters.clear()
        module.to_empty(device="meta")


def _as_packed(config: RunConfig, made: Plan, name: str, value: torch.Tensor, base: Path) -> torch.Tensor:
    """What training held of a weight of experts. Each expert was packed whole, as the model has it, of which another weight of
    the files may hold the other part."""
    owner, share = made.packed[name]
    turned, shape = is_turned(made.bare, owner), made.bare.get_parameter(owner).shape
    parts = {there: each for there, (of, each) in made.packed.items() if of == owner}
    others = {there: read_weight(base, there) for there, each in parts.items() if there != name and each.expert is None}
    seen = torch.empty_like(value)
    for expert in range(shape[0]) if share.expert is None else (share.expert,):
        whole = torch.empty(*(shape[:0:-1] if turned else shape[1:]), dtype=value.dtype)
        for there, each in parts.items():
            if each.expert in (None, expert):
                held = value if there == name else others[there] if there in others else read_weight(base, there)
                part = held[expert] if each.expert is None else held
                whole[each.rows] = part.mT if each.turned else part
        other = turned and config.model.quantization not in EXPERTS_ALONE  # whose blocks lie along what goes in
        trained = _as_trained(config, whole.mT.contiguous() if other else whole).to(getattr(torch, config.model.dtype))
        rows = (trained.mT if other else trained)[share.rows]
        seen[expert if share.expert is None else ...] = rows.mT if share.turned else rows
    return seen


def _with_experts(made: Plan, name: str, value: torch.Tensor, weights: Any) -> torch.Tensor:
    """A weight of the files [E, out, in], or of one expert, with its adapter: one expert at a time is in float32."""
    path, share = made.shares[name]
    if path in made.trained:
        whole = weights.get_tensor(made.trained[path])
        rows = share.of(whole.mT if is_turned(made.bare, path) else whole)
        return (rows.mT if share.turned else rows).to(value.dtype).contiguous()
    lora = made.factors(path, weights)
    a, b = lora.a if share.expert is None else lora.a[share.expert], share.of(lora.b)
    merged = torch.empty_like(value)
    for each in range(len(value)) if value.dim() == 3 else (...,):
        delta = b[each].float() @ a[each].float() * lora.scale
        merged[each] = value[each].float() + (delta.mT if share.turned else delta)
    return merged


def _module(layer: Any) -> torch.nn.Module:
    """The layer, of which PEFT's own class says only what an adapter adds."""
    found: torch.nn.Module = layer
    return found


def _as_trained(config: RunConfig, value: torch.Tensor) -> torch.Tensor:
    """What a quantized layer held of this weight."""
    kind, dtype = config.model.quantization, getattr(torch, config.model.dtype)
    if kind == "mxfp4":
        return mxfp4.unpacked(*mxfp4.packed(value.to(dtype)), value.shape[1])
    if kind == "nvfp4":
        return nvfp4.unpacked(*nvfp4.packed(value.to(dtype)), value.shape[1])
    import bitsandbytes.functional as bnb

    if kind == "int8":
        numbers, largest, _ = bnb.int8_vectorwise_quant(value.to(torch.float16))
        return numbers.float() * (largest.float() / 127).unsqueeze(1)
    packed, state = bnb.quantize_4bit(
        value.to(dtype).contiguous(), quant_type=kind, compress_statistics=True, blocksize=64
    )
    return bnb.dequantize_4bit(packed, state)


def size_of_weights(folder: Path) -> int:
    """Bytes of the weights in a folder's files, as `total_size` of an index counts them: without headers."""
    headers = (model_files.header(file) for file in folder.glob("*.safetensors"))
    return sum(torch.Size(each.shape).numel() * _ITEMS[each.dtype] for header in headers for each in header.values())


def write_safetensors(path: Path, shapes: Mapping[str, model_files.Tensor], tensors: Iterator[torch.Tensor]) -> None:
    """One safetensors file, of which no more than a tensor is in memory; `tensors` come in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in shapes.items():
        size = torch.Size(each.shape).numel() * _ITEMS[each.dtype]
        header[name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, each), value in zip(shapes.items(), tensors, strict=True):
            if tuple(value.shape) != each.shape or _NAMES[value.dtype] != each.dtype:
                raise ModelError(f"{visible(name)}: became {tuple(value.shape)} in {value.dtype} while it was merged.")
            file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
