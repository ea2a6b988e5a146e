"""Models whose files hold FP8 numbers with scales, as DeepSeek-V3 and Qwen3-FP8 are published, or as llm-compressor, Model
Optimizer and FBGEMM write them (`engine.facts.stored`).

Under an adapter the weights stay in FP8, one byte a number, and are scaled to the model's format in each product, forward
and backward; without one they are scaled once and trained as plain numbers. Scales are applied here and not by
transformers, whose loader takes the size of a block from the number of scales, which is wrong where the last block is
ragged, and needs a GPU and kernels from a hub to keep FP8. Experts, which the model fuses, stay so too where the pass over
packed experts computes them (`engine.models.packed_experts`), and are scaled once elsewhere. Refuses numbers that bring no
scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import ModelError, visible
from engine.facts.stored import block_of, stored_as, with_note
from engine.model_files import complete, weight_files

_SUFFIXES = ("_scale_inv", "_scale")
"""What the name of a weight's scales ends in, behind the name of the weight."""
_FORMATS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
Block = tuple[int, int]


@dataclass(frozen=True)
class Stored:
    """How a model's files hold it: its config without the note on quantization, the size of a block of one scale (rows
    and columns, or one scale for a matrix), and the folder."""

    config: PreTrainedConfig
    block: Block | None
    source: str
    revision: str | None


@dataclass(frozen=True)
class Held:
    """What became of the FP8 numbers, for the receipt."""

    layers: int
    kept: bool
    block: Block | None
    fused: int
    """Matrices that the model fuses with others (experts)."""
    packed: bool = False
    """Whether these stay in FP8 too."""


def stored_fp8(source: str, revision: str | None) -> Stored | None:
    """How the model is stored, or None where that is not FP8. Raises OSError or ValueError for a config not to be had."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    quantization = note_of(config, source, revision)
    if quantization is None or stored_as(quantization) != "fp8":
        return None
    without_note(config)
    return Stored(config, block_of(quantization), source, revision)


def note_of(config: PreTrainedConfig, source: str, revision: str | None) -> dict[str, Any] | None:
    """What a model's files say of how its weights are quantized; None where they say nothing."""
    told = getattr(config, "quantization_config", None)
    if told is None:
        told = with_note(complete(source, revision), {}).get("quantization_config")
    return told if isinstance(told, dict) or told is None else told.to_dict()


def without_note(config: PreTrainedConfig) -> None:
    """Has transformers take the model for a plain one."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def load_fp8(
    loader: Any, stored: Stored, settings: dict[str, Any], *, keep: bool, experts: Any = None
) -> tuple[PreTrainedModel, Held]:
    """`loader.from_pretrained` of the model, with the scales applied, and what became of its numbers; `keep` leaves linear
    layers in FP8.

    Linear layers are loaded with the numbers as they stand, which every wider format holds exactly, and take their scales
    then. Numbers that the model fuses with others, as those of experts, are scaled before, or left to `experts`, the
    `quantization_config` that packs them, where all of them are experts'. Raises ModelError for numbers
    without a scale, with scales that do not cover them, or that the model has no place for.
    """
    formats, scales = _read(stored)
    with torch.device("meta"):
        shell = loader.from_config(stored.config)
    fused = [
        name for name in formats if type(_layer(shell, name)[2]) is not torch.nn.Linear and not _spare(shell, name)
    ]
    packs = experts is not None and bool(fused) and all(".experts." in name for name in fused)
    if packs:
        settings = {**settings, "quantization_config": experts}
    if fused and not packs:
        model = _with_scaled(type(shell), stored, settings, fused, scales)
    else:
        model, info = loader.from_pretrained(
            stored.source, config=stored.config, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            **settings,
        )  # fmt: skip
        _refuse_without_place(fused, info)
    layers = 0
    for name in formats.keys() - set(fused):
        parent, leaf, module = _layer(model, name)
        if module is None:
            continue
        scale, block = fitting(name, module.weight.shape, scales.get(name), stored.block)
        if keep:
            setattr(parent, leaf, Fp8Linear(module, module.weight.data.to(formats[name]), scale, block))
        else:
            weight = module.weight.data
            module.weight.data = dequantized(weight.to(formats[name]), scale.to(weight.device), block, weight.dtype)
        layers += 1
    if not formats:
        raise ModelError(
            f"model.name: {visible(stored.source)} says that it is stored in FP8 and holds no such numbers."
        )
    return model, Held(layers, keep, stored.block, len(fused), packs)


def _with_scaled(
    kind: Any, stored: Stored, settings: dict[str, Any], names: list[str], scales: dict[str, torch.Tensor]
) -> Any:
    """The model from its files' numbers, of which these are scaled already."""
    from safetensors import safe_open

    numbers: dict[str, torch.Tensor] = {}
    for file in _files(stored):
        with safe_open(file, "pt") as tensors:
            numbers |= {key: tensors.get_tensor(key) for key in tensors.keys() if _scaled_by(key) not in scales}  # noqa: SIM118
    for name in names:
        key = f"{name}.weight" if f"{name}.weight" in numbers else name  # all experts of a layer have no `.weight`
        numbers[key] = widened(name, numbers[key], scales.get(name), stored.block, settings["dtype"])
    own = {key: value for key, value in settings.items() if key != "revision"}
    model, info = kind.from_pretrained(None, config=stored.config, state_dict=numbers, output_loading_info=True, **own)
    _refuse_without_place(names, info)
    return model


def _refuse_without_place(names: list[str], info: Any) -> None:
    lost = sorted({each for name in names for each in (name, f"{name}.weight")} & set(info["unexpected_keys"]))
    if lost:
        raise ModelError(f"model.name: the model has no place for {visible(lost[0])}, which its files hold in FP8.")


def _spare(model: PreTrainedModel, name: str) -> bool:
    """Whether this is a head that the method does not have."""
    return name.rpartition(".")[2] == "lm_head" and _layer(model, name)[2] is None


class Fp8Linear(torch.nn.Linear):
    """A frozen linear layer whose weight stays in FP8: `x @ dequantized(weight, scale).T + bias`.

    `weight` (N, K) float8 and `weight_scale_inv` float32, one for each block. Gradients reach x alone. `compute_dtype` tells
    PEFT the format of an adapter beside it. Casts of the module leave both as they are: they would change the numbers.
    """

    def __init__(self, layer: torch.nn.Linear, numbers: torch.Tensor, scale: torch.Tensor, block: Block) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.compute_dtype = layer.weight.dtype
        self.weight = torch.nn.Parameter(numbers, requires_grad=False)
        self.weight_scale_inv: torch.Tensor
        self.register_buffer("weight_scale_inv", scale.to(numbers.device))
        self.block = block
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(input, self.weight, self.weight_scale_inv, *self.block)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Linear:
        dtype = self.weight.dtype
        self.weight.data = self.weight.data.view(torch.uint8)
        self.weight_scale_inv = self.weight_scale_inv.view(torch.int32)
        super()._apply(fn, recurse)
        self.weight.data = self.weight.data.view(dtype)
        self.weight_scale_inv = self.weight_scale_inv.view(torch.float32)
        return self


class _Product(torch.autograd.Function):
    """Keeps the FP8 numbers for the backward pass, not the wide ones, which are made again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, rows: int, columns: int
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.block = rows, columns
        return torch.nn.functional.linear(x, dequantized(weight, scale, ctx.block, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        return gradient @ dequantized(weight, scale, ctx.block, gradient.dtype), None, None, None, None


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """`weight.float() * scale`, each scale repeated over its block, rounded once to `dtype`.

    weight (N, K) float8; scale (ceil(N / rows), ceil(K / columns)) float32; blocks at the ends may be ragged.
    """
    rows, columns = block
    out = weight.to(dtype)
    by_row = scale.repeat_interleave(rows, 0)[: out.shape[0]]
    whole = out.shape[1] // columns
    if whole:
        out[:, : whole * columns].unflatten(1, (whole, columns)).mul_(by_row[:, :whole, None])
    if whole < by_row.shape[1]:
        out[:, whole * columns :].mul_(by_row[:, whole:])
    return out


def widened(
    name: str, numbers: torch.Tensor, scale: torch.Tensor | None, block: Block | None, dtype: torch.dtype
) -> torch.Tensor:
    """What a weight in FP8, or that of all experts [E, ...], stands for. Raises ModelError where its scales do not fit."""
    if numbers.dim() == 2:
        return dequantized(numbers, *fitting(name, numbers.shape, scale, block), dtype)
    of_each = scale is not None and scale.dim() > 0 and len(scale) == len(numbers)
    out = torch.empty(numbers.shape, dtype=dtype)
    for expert, part in enumerate(numbers):
        own = scale[expert] if scale is not None and of_each else scale
        out[expert] = dequantized(part, *fitting(name, part.shape, own, block), dtype)
    return out


def _read(stored: Stored) -> tuple[dict[str, torch.dtype], dict[str, torch.Tensor]]:
    """By the layer's name: the format of its FP8 weight, and its scales."""
    from safetensors import safe_open

    formats: dict[str, torch.dtype] = {}
    scales: dict[str, torch.Tensor] = {}
    for file in _files(stored):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a mapping
                if (name := _scaled_by(key)) is not None:
                    scales[name] = tensors.get_tensor(key)
                elif (dtype := _FORMATS.get(tensors.get_slice(key).get_dtype())) is not None:
                    formats[key.removesuffix(".weight")] = dtype
    return formats, {name: scale for name, scale in scales.items() if name in formats}


def _scaled_by(key: str) -> str | None:
    """The layer, or the weight of all experts, whose scales have this name; None for what is no name of scales."""
    suffix = next((ending for ending in _SUFFIXES if key.endswith(ending)), None)
    return None if suffix is None else key.removesuffix(suffix).removesuffix(".weight")


def _files(stored: Stored) -> list[Path]:
    """The files that transformers reads the weights from: one, or those that an index names; a folder may hold others."""
    folder = Path(stored.source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        wanted = ["model*.safetensors", "model.safetensors.index.json"]
        folder = Path(snapshot_download(stored.source, revision=stored.revision, allow_patterns=wanted))
    return weight_files(folder)


def _layer(model: PreTrainedModel, name: str) -> tuple[Any, str, Any]:
    """The module of this name with its parent; files of a model with a head name it from the head on, others do not."""
    prefix = f"{model.base_model_prefix}."
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        parent, _, leaf = candidate.rpartition(".")
        try:
            holder = model.get_submodule(parent)
        except AttributeError:
            continue
        if isinstance(module := getattr(holder, leaf, None), torch.nn.Module):
            return holder, leaf, module
    return None, name.rpartition(".")[2], None


def fitting(
    name: str, shape: torch.Size, scale: torch.Tensor | None, block: Block | None
) -> tuple[torch.Tensor, Block]:
    """The scales as a float32 matrix and the size of a block, or ModelError where they do not cover the weight."""
    high, wide = shape
    if scale is None:
        raise ModelError(f"model.name: {visible(name)} is stored in FP8 without a scale, so its numbers mean nothing.")
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1), (high, wide)
    if block is None and scale.numel() == high:
        return scale.reshape(high, 1), (1, wide)
    wanted = (-(-high // block[0]), -(-wide // block[1])) if block is not None else None
    if block is None or tuple(scale.shape) != wanted:
        raise ModelError(
            f"model.name: {visible(name)} has scales of shape {tuple(scale.shape)} for a weight of {high} x {wide}; "
            + (f"blocks of {block[0]} x {block[1]} want {wanted}." if block else "its config names no size of a block.")
        )
    return scale, block
