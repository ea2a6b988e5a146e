"""A model that computes with the weights of one layer in memory: each is read from its file when its layer begins.

Serves models of whose files it can be told where they hold each weight: whole, or a mixture's experts one by one, which are put
together here. A base that was quantized for training is rounded as it is read, by what held it then.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from engine import model_files
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.export.stored import Share, dequantized_weights, is_turned, packed_in, read_weight, shares, stored_name
from engine.features.packed_experts import EXPERTS_ALONE, packs
from engine.kernels.experts.packed import Packer
from engine.models.capped_scores import keep_capped_scores
from engine.models.packed_experts import PROJECTIONS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Read = Callable[[], torch.Tensor]
Numbers = Callable[[str], torch.Tensor]
"""Gives a weight of a folder in float32 by its name there, in place of what its files hold."""
PREFIX = "base_model.model."
READABLE = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
MODES = ("none", "nf4", "fp4", "int8", *EXPERTS_ALONE)
"""`model.quantization` that can be read so; the other is of a base stored in FP8."""


@dataclass
class Streamed:
    """A model without weights, and where each of them is read."""

    model: PreTrainedModel | PeftModel
    sources: dict[str, Read]
    """By name of the parameter or buffer."""
    report: Callable[[int, int], None] = lambda done, total: None
    """Called with bytes of weights that were computed with, of how many."""
    done: int = 0
    units: list[tuple[torch.nn.Module, list[tuple[torch.nn.Module, str, str]]]] = field(default_factory=list)
    """What is loaded at once: the module that begins to compute, and (owner, parameter, name) of what it needs."""
    together: bool = False
    """Whether a weight is put together of several of the files."""
    numbers_of_experts: int = 0
    """How many the largest weight of experts has."""
    change: Callable[[torch.nn.Module, Sequence[tuple[torch.nn.Module, str, str]]], None] | None = None
    """Called with what was loaded, before it computes."""

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each unit in float32."""
        known = dict(self.model.named_parameters(remove_duplicate=False))
        return [4 * sum(known[name].numel() for _, _, name in needed) for _, needed in self.units]

    @property
    def largest(self) -> int:
        """Bytes of the largest unit in float32."""
        return max(self.sizes, default=0)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block the model may be called."""
        hooks: list[Any] = []
        self.done, total = 0, sum(self.sizes)
        for _, needed in self.units:
            _set_aside(needed)
        for (unit, needed), size in zip(self.units, self.sizes, strict=True):
            hooks.append(unit.register_forward_pre_hook(lambda *_, u=unit, n=needed: self._load(u, n)))
            hooks.append(
                unit.register_forward_hook(
                    lambda *_, u=unit, n=needed, s=size: self._drop(u, n, s, total), always_call=True
                )
            )
        try:
            with torch.no_grad():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _load(self, unit: torch.nn.Module, needed: Sequence[tuple[torch.nn.Module, str, str]]) -> None:
        for owner, leaf, name in needed:
            read = self.sources.get(name)
            if read is not None:
                owner._parameters[leaf] = torch.nn.Parameter(read(), requires_grad=False)
        if self.change is not None:
            self.change(unit, needed)

    def _drop(
        self, unit: torch.nn.Module, needed: Sequence[tuple[torch.nn.Module, str, str]], size: int, total: int
    ) -> None:
        _set_aside(needed)
        if self.change is not None:  # what was merged went with the weights
            for module in unit.modules():
                merged: Any = getattr(module, "merged_adapters", [])
                merged.clear()
        self.done += size
        self.report(min(self.done, total), total)


def opened(
    folder: Path, loader: Any, shape: Any, config: RunConfig | None = None, numbers: Numbers | None = None
) -> Streamed | None:
    """The model whose files are in `folder`, described by `shape`; with a `config` as training held it beside an adapter, with
    `numbers` having those for its weights.

    None where its files hold weights otherwise than the model has them.
    """
    if (config is not None and config.model.quantization not in MODES) or packed_in(folder) is not None:
        return None  # what eight bits hold may look like a plain weight
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = loader.from_config(shape, dtype=torch.float32)
    model.tie_weights()
    model.eval()
    keep_capped_scores(model)
    rounded = config is not None and config.model.quantization != "none"
    if rounded and any(type(module).__name__ == "Conv1D" for module in model.modules()):
        return None  # whose weights transformers turns before they are quantized
    stored = model_files.stored_weights(folder)
    files = {name: file for file in model_files.weight_files(folder) for name in model_files.header(file)}
    wide = dequantized_weights(folder) if any(weight.ndim == 3 for weight in model.parameters()) else stored
    rounds = _rounding(config, model)
    sources: dict[str, Read] = {}
    together, largest = False, 0
    for names in _tied(model).values():
        value = model.get_parameter(names[0])
        known = [(each, stored_name(model, each, stored)) for each in names]
        held = [(each, there) for each, there in known if there in stored]
        if value.ndim == 3:
            largest = max(largest, value.numel())
        if value.ndim == 3 and not (held and stored[held[0][1]].shape == tuple(value.shape)):
            if (parts := _put_together(folder, files, model, names[0], wide, rounds(names[0]), numbers)) is None:
                return None
            sources |= dict.fromkeys(names, parts)
            together = True
            continue
        if not held:
            continue
        if not _alike(files, {there for _, there in held}):
            return None  # transformers leaves such weights apart, whatever the config says
        each, there = held[0]
        if stored[there].shape != tuple(value.shape) or stored[there].dtype not in READABLE:
            return None
        read = _reader(files[there], there, rounds(each)) if numbers is None else partial(numbers, there)
        sources |= dict.fromkeys(names, read)
    kept = model.state_dict()
    for name, value in model.named_buffers():
        if name not in kept:
            continue
        if name not in stored or stored[name].shape != tuple(value.shape) or stored[name].dtype not in READABLE:
            return None  # under another name, or in none: both sides would compute with what it begins as
        value.data = _reader(files[name], name)().to(value.dtype)
    return Streamed(model, sources, units=_units(model), together=together, numbers_of_experts=largest)


def complete(made: Streamed, *, new_head: bool = False) -> bool:
    """Whether each weight has a file that it is read from; a module that an adapter replaces whole needs none, and neither does
    a `new_head`, which comes with the adapter."""
    body = f"{made.model.base_model_prefix}." if new_head else ""
    needed = (name for _, each in made.units for _, _, name in each if name.startswith(body))
    return all(name in made.sources or ".original_module." in name for name in needed)


def adapted(made: Streamed, adapter: Path) -> Streamed:
    """The same with PEFT's layers around it. Raises ValueError for a weight of the adapter that has no place."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(made.model, str(adapter), low_cpu_mem_usage=True)
    model.eval()
    file = adapter / model_files.ADAPTER_WEIGHTS
    keys = set(model_files.header(file))
    left = set(keys)
    sources: dict[str, Read] = {}
    for name, value in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        key = _key(name, keys)
        base = name.removeprefix(PREFIX).replace(".base_layer", "").replace(".original_module", "")
        if key is not None:
            left.discard(key)
            sources[name] = _reader(file, key)
            if not isinstance(value, torch.nn.Parameter):
                value.data = sources[name]().to(value.dtype)
        elif base in made.sources:
            sources[name] = made.sources[base]
    if left:
        raise ValueError(f"{min(left)} has no place in the model")
    return Streamed(model, sources, made.report, units=_units(model))


def adapts_tied(made: Streamed, adapter: Path) -> bool:
    """Whether the adapter changes a weight that the model has at two places, of which merging would change both."""
    keys = model_files.header(adapter / model_files.ADAPTER_WEIGHTS)
    tied = (name for names in _tied(made.model).values() if len(names) > 1 for name in names)
    return any(key.startswith(f"{PREFIX}{name.rpartition('.')[0]}.lora_") for name in tied for key in keys)


def merging(whole: Streamed, format_of: Callable[[str], torch.dtype]) -> Streamed:
    """The same, each layer merged by PEFT's own layers as it is loaded, and its weights rounded to the format of their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    def change(unit: torch.nn.Module, needed: Sequence[tuple[torch.nn.Module, str, str]]) -> None:
        for module in unit.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge()
        for owner, leaf, name in needed:
            held = owner._parameters[leaf]
            if held is not None and ".lora_" not in name:
                plain = name.removeprefix(PREFIX)
                for part in (".base_layer", ".original_module", ".modules_to_save.default"):
                    plain = plain.replace(part, "")
                held.data = held.data.to(format_of(plain)).float()

    return replace(whole, change=change)


def _set_aside(needed: Sequence[tuple[torch.nn.Module, str, str]]) -> None:
    """Puts a number that is none in place of each weight, which takes no memory and lies where weights are read to: some models
    ask where a weight is before it is read, and move their inputs there (Llama 4, Idefics3)."""
    for owner, leaf, _ in needed:
        held = owner._parameters[leaf]
        assert held is not None
        none = torch.full((), math.nan if held.is_floating_point() else 0, dtype=held.dtype)
        owner._parameters[leaf] = torch.nn.Parameter(none.expand(held.shape), requires_grad=False)


def _key(name: str, keys: set[str]) -> str | None:
    """The name in the adapter's file of a parameter of the model with PEFT's layers."""
    plain = name.replace(".modules_to_save.default", "").replace(".default", "")
    return next((each for each in (plain, plain.removesuffix(".weight")) if each in keys), None)


def _reader(file: Path, name: str, after: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float) -> Read:
    def read() -> torch.Tensor:
        with safe_open(file, "pt") as weights:
            return after(weights.get_tensor(name))

    return read


def _put_together(
    folder: Path,
    files: dict[str, Path],
    model: PreTrainedModel,
    name: str,
    stored: dict[str, model_files.Tensor],
    after: Callable[[torch.Tensor], torch.Tensor],
    numbers: Numbers | None = None,
) -> Read | None:
    """Reads a weight of experts that the files hold in parts, or in MXFP4; None where that cannot be told."""
    shape, turned = tuple(model.get_parameter(name).shape), is_turned(model, name)
    try:
        parts = shares(model, name, stored)
    except ModelError:
        return None
    plain = {there: files.get(there) for there in parts}
    if any(stored[there].dtype not in READABLE for there in parts):
        return None

    def read() -> torch.Tensor:
        value = torch.empty(shape)
        straight = value.mT if turned else value
        for file, names in itertools.groupby(parts, plain.__getitem__):
            if numbers is not None or file is None:
                for there in names:
                    _fill(straight, parts[there], numbers(there) if numbers else read_weight(folder, there))
                continue
            with safe_open(file, "pt") as weights:
                for there in names:
                    _fill(straight, parts[there], weights.get_tensor(there))
        return after(value)

    return read


def _fill(straight: torch.Tensor, share: Share, value: torch.Tensor) -> None:
    """Puts a part of the files into a weight [E, out, in]."""
    part = value.mT if share.turned else value
    if share.expert is None:
        straight[:, share.rows] = part.float()
    else:
        straight[share.expert, share.rows] = part.float()


def _alike(files: dict[str, Path], names: set[str]) -> bool:
    """Whether these entries of the files are one and the same weight."""
    first, *others = (_reader(files[name], name, lambda value: value) for name in sorted(names))
    return all(torch.equal(first(), other()) for other in others)


def _tied(model: torch.nn.Module) -> dict[int, list[str]]:
    """Names of the parameters; those of one and the same together."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, value in model.named_parameters(remove_duplicate=False):
        found[id(value)].append(name)
    return found


def _units(model: PreTrainedModel | PeftModel) -> list[tuple[torch.nn.Module, list[tuple[torch.nn.Module, str, str]]]]:
    """The model's layers, as transformers keeps them on one device; what is outside of them by the module that holds it."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    apart = {*(getattr(plain, "_no_split_modules", None) or ())}
    units: dict[str, tuple[torch.nn.Module, list[tuple[torch.nn.Module, str, str]]]] = {}
    whole: list[str] = []
    for path, module in model.named_modules():
        if type(module).__name__ in apart or isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            whole.append(path)
        owner = min((each for each in whole if path == each or path.startswith(each + ".")), key=len, default=path)
        for leaf, value in module._parameters.items():
            if value is not None:
                entry = units.setdefault(owner, (model.get_submodule(owner), []))
                entry[1].append((module, leaf, f"{path}.{leaf}" if path else leaf))
    return list(units.values())


def _rounding(
    config: RunConfig | None, model: torch.nn.Module
) -> Callable[[str], Callable[[torch.Tensor], torch.Tensor]]:
    """How a weight is held by its name: as its file has it, or as training had it beside an adapter."""
    if config is None or config.model.quantization == "none":
        return lambda name: torch.Tensor.float
    kind, dtype = config.model.quantization, getattr(torch, config.model.dtype)
    names = quantized_weights(config, model)
    packed = {
        name
        for name, value in model.named_parameters()
        if packs(config) and value.ndim == 3 and ".experts." in name and name.endswith(PROJECTIONS)
    }

    def held(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        if name in packed:
            turned = kind in EXPERTS_ALONE and is_turned(model, name)
            return lambda value: _packed(value, kind, dtype, turned=turned)
        return (
            (lambda value: _quantized(value.to(dtype), kind))
            if name in names
            else (lambda value: value.to(dtype).float())
        )

    return held


def _packed(value: torch.Tensor, kind: str, dtype: torch.dtype, *, turned: bool) -> torch.Tensor:
    """What training holds of the weight of experts in few bits, in float32."""
    packer = Packer(len(value), kind, dtype, turned=turned)
    for expert in value:
        packer.add(expert)
    return packer.done().all_unpacked().float()


def quantized_weights(config: RunConfig, model: torch.nn.Module) -> set[str]:
    """The weights of `model` that bitsandbytes held in four or eight bits in training."""
    from engine.models.load import quantization_config

    settings = quantization_config(config)
    if settings is None or config.model.quantization in EXPERTS_ALONE:
        return set()
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = settings.llm_int8_skip_modules or get_keys_to_not_convert(model)
    return {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(path == each or path.endswith("." + each) for each in kept)
    }


def _quantized(value: torch.Tensor, kind: str) -> torch.Tensor:
    """What a layer of bitsandbytes holds of this weight, in float32."""
    import bitsandbytes as bnb

    if kind == "int8":
        held: Any = bnb.nn.Int8Params(value.contiguous(), requires_grad=False)
        held = held.to("cpu")
        assert held.SCB is not None, "bitsandbytes quantizes on the way to a device"
        return held.data.float() * (held.SCB.float() / 127).unsqueeze(1)
    packed: Any = bnb.nn.Params4bit(value.contiguous(), requires_grad=False, quant_type=kind, compress_statistics=True)
    packed = packed.to("cpu")
    wide: torch.Tensor = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
    return wide.float()


def outputs(made: Streamed, ids: Sequence[list[int]], *, together: bool = True) -> list[torch.Tensor]:
    """What the model's head gives for each text, in float32; `together`, each weight is read once for all of them."""
    if not together:
        return [outputs(made, [each])[0] for each in ids]
    longest = max(map(len, ids))
    tokens = torch.tensor([each + [0] * (longest - len(each)) for each in ids])
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids])
    with made.reading():
        found = made.model(input_ids=tokens, attention_mask=mask, use_cache=False)
    values = found.logits if "logits" in found else found.last_hidden_state
    if values.dim() < 3:
        return [value.float()[None] for value in values]
    return [value[: len(each)].float().clone()[None] for value, each in zip(values, ids, strict=True)]
