"""Loading a model with its packed weights: left out by transformers, and filled in afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.config.kinds import Head
from engine.errors import ModelError, visible
from engine.facts.stored import PACKED, stored_as
from engine.models.packed_experts import refuse_unserved
from engine.models.stored_fp8 import note_of, without_note
from engine.models.stored_packed.entries import ENDS, Entries, folder_of
from engine.models.stored_packed.experts import joined, joined_dequantized
from engine.models.stored_packed.linear import PackedLinear
from engine.models.strict_load import load_strictly

_BY = "workbench_stored_packed"


@dataclass(frozen=True)
class StoredPacked:
    """How a model's files hold it: its config without the note on quantization, that note, and the folder."""

    config: PreTrainedConfig
    note: Mapping[str, Any]
    source: str
    revision: str | None

    @property
    def method(self) -> str:
        """`quant_method` of the note."""
        return str(self.note["quant_method"])


@dataclass
class HeldPacked:
    """What became of the packed numbers, for the receipt."""

    method: str
    kept: bool
    layers: int = 0
    experts: int = 0
    """Weights of experts of all layers that stay packed."""
    widened: int = 0
    """Weights that were widened once: all of them, or heads and what `model.quantize_moe_experts` leaves."""
    packed_bytes: int = 0


def stored_packed(source: str, revision: str | None) -> StoredPacked | None:
    """How the model is stored, or None where it is not packed so. Raises OSError or ValueError for a config not to be had."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    note = note_of(config, source, revision)
    if note is None or stored_as(note) not in PACKED:
        return None
    without_note(config)
    return StoredPacked(config, note, source, revision)


@dataclass
class _Places:
    """Where the packed weights of the files belong in a model."""

    layers: dict[str, str] = field(default_factory=dict)
    """A layer's path in the model, by its name in the files."""
    plain: dict[str, str] = field(default_factory=dict)
    """A weight's path in the model, by its layer's name in the files, where the model has no linear layer, as of routers: it is
    widened."""
    joined: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = field(default_factory=dict)
    """By the path of a weight that joins several: its conversion, and the names in the files of each of its sources."""
    zero_biases: set[str] = field(default_factory=set)
    """Biases of zeros beside some of them, by their names in the files and in the model."""

    def others(self) -> Iterator[str]:
        """Names in the files of what is joined or widened at once."""
        yield from self.plain
        yield from (name for _, sources in self.joined.values() for names in sources.values() for name in names)


class _Later(QuantizationConfigMixin):
    """Has `from_pretrained` leave out the weights that are filled in afterwards."""

    quant_method: Any

    def __init__(self, places: _Places) -> None:
        self.quant_method = _BY
        self.places = places


@register_quantizer(_BY)
class _LeavesOut(HfQuantizer):
    """Does what `_Later` says."""

    quantization_config: _Later
    requires_calibration = False
    is_trainable = True

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **more: Any) -> None:
        for path in self.quantization_config.places.layers.values():
            layer = model.get_submodule(path)
            assert isinstance(layer, torch.nn.Linear)
            _put(model, path, PackedLinear(layer))
        places = self.quantization_config.places
        names = {*(f"{name}.weight" for name in (*places.layers, *places.others())), *places.zero_biases}
        patterns = {rf"\.({'|'.join(ENDS)})$", *(rf"^{re.escape(name)}$" for name in names)}
        self._known = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(self._known or ()), *patterns}
        for name in (*self.quantization_config.places.joined, *self.quantization_config.places.plain.values()):
            owner, _, leaf = name.rpartition(".")
            module: Any = model.get_submodule(owner)
            module.register_parameter(leaf, None)
            module._is_hf_initialized = True  # a model's own beginning would write to it

    def postprocess_model(self, model: PreTrainedModel, **more: Any) -> None:
        model._keys_to_ignore_on_load_unexpected = self._known
        self.remove_quantization_config(model)


def load_packed(
    loader: Any, stored: StoredPacked, settings: dict[str, Any], head: Head, *, keep: bool, experts: bool = False
) -> tuple[PreTrainedModel, HeldPacked]:
    """The model with its packed weights, and what became of them; `keep` leaves linear layers packed, and `experts` those of
    a mixture.

    Raises ModelError for packed numbers that do not fit the model or each other, and for weights that are missing.
    """
    with closing(Entries(folder_of(stored.source, stored.revision), stored.note)) as entries:
        return _filled(loader, stored, entries, settings, head, keep=keep, experts=experts)


def _filled(
    loader: Any,
    stored: StoredPacked,
    entries: Entries,
    settings: dict[str, Any],
    head: Head,
    *,
    keep: bool,
    experts: bool,
) -> tuple[PreTrainedModel, HeldPacked]:
    with torch.device("meta"):
        shell = loader.from_config(stored.config, dtype=settings["dtype"])
    places = _placed(entries, shell)
    if not places.layers and not places.joined:
        raise ModelError(
            f"model.name: {visible(stored.source)} says that it is stored by {stored.method} and holds no such numbers."
        )
    own = {**settings, "config": stored.config, "quantization_config": _Later(places)}
    model = load_strictly(loader, stored.source, head, **own)
    told = settings.get("device_map")
    device = told[""] if isinstance(told, dict) and "" in told else torch.device("cpu")
    held = HeldPacked(stored.method, keep)
    outputs = model.get_output_embeddings()
    for name, path in places.layers.items():
        module: Any = model.get_submodule(path)
        module.fill(entries.parts(name, device, (module.out_features, module.in_features)))
        _refuse_added_bias(entries, name, module)
        if keep and module is not outputs:
            held.layers, held.packed_bytes = held.layers + 1, held.packed_bytes + module.packed_bytes
            continue
        _put(model, path, _plain(module, settings["dtype"]))
        held.widened += 1
    for name, path in places.plain.items():
        owner, _, leaf = path.rpartition(".")
        like = shell.get_parameter(path)
        wide = entries.dequantize(name, like.dtype, device)
        if wide.shape != like.shape:
            has, needs = (" x ".join(map(str, shape)) for shape in (wide.shape, like.shape))
            raise ModelError(f"model.name: {visible(name)} is packed as {has}, and {needs} is wanted.")
        model.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(wide))
        held.widened += 1
    for name, (converter, sources) in places.joined.items():
        owner, _, leaf = name.rpartition(".")
        like = shell.get_parameter(name)
        if keep and experts:
            refuse_unserved(shell.get_submodule(owner), name)
            packed = joined(entries, name, converter, sources, like, device)
            held.experts, held.packed_bytes = held.experts + 1, held.packed_bytes + packed.packed_bytes
            weight = torch.nn.Parameter(packed, requires_grad=False)
        else:
            weight = torch.nn.Parameter(joined_dequantized(entries, name, converter, sources, like, model, device))
            held.widened += 1
        model.get_submodule(owner).register_parameter(leaf, weight)
    model.tie_weights()
    return model, held


def _plain(module: PackedLinear, dtype: torch.dtype) -> torch.nn.Linear:
    made = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    made.weight, made.bias = torch.nn.Parameter(module.dequantize(dtype)), module.bias
    return made.train(module.training)


def _put(model: PreTrainedModel, path: str, layer: torch.nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def _refuse_added_bias(entries: Entries, name: str, module: PackedLinear) -> None:
    """Older tools write a bias of zeros for each layer; one that is not zero belongs to another model."""
    bias = entries.bias(name) if module.bias is None else None
    if bias is not None and bool(bias.any()):
        raise ModelError(f"model.name: {visible(name)} has a bias in the files, for which the model has no place.")


def _placed(entries: Entries, shell: PreTrainedModel) -> _Places:
    """Where each packed weight belongs, by transformers' own names and conversions. Raises ModelError for those without a place."""
    mapping = get_model_conversion_mapping(shell)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_source = {source: each for each in converters for source in each.source_patterns}
    state, found = shell.state_dict(), _Places()
    ignored = [*(shell._keys_to_ignore_on_load_unexpected or ())]
    for name in entries:
        key = f"{name}.weight"
        target, source = rename_source_key(key, renamings, converters, shell.base_model_prefix, state)
        if name in entries.zero_biases:
            bias = f"{name}.bias"
            inside, _ = rename_source_key(bias, renamings, converters, shell.base_model_prefix, state)
            found.zero_biases |= {bias, inside}
        if any(re.search(pattern, key) for pattern in ignored) or (name == "lm_head" and target not in state):
            continue
        path = target.removesuffix(".weight")
        module = _module(shell, path)
        if target not in state:
            raise ModelError(f"model.name: the model has no place for the packed {visible(name)}.")
        if source is None and type(module) is not torch.nn.Linear and state[target].dim() != 2:
            raise ModelError(
                f"model.name: {visible(name)} is packed, and a {type(module).__name__} holds no matrix of that name.",
                "Take the model that it was made from, and model.quantization: nf4 holds it in as few bits.",
            )
        if source is None:
            linear = type(module) is torch.nn.Linear
            (found.layers if linear else found.plain)[name] = path if linear else target
            continue
        converter = by_source[source]
        if len(converter.target_patterns) > 1:
            raise ModelError(
                f"model.name: transformers takes {visible(name)} apart, which cannot be done while it is packed.",
                "Take the model that it was made from, and model.quantization: nf4 holds it in as few bits.",
            )
        found.joined.setdefault(target, (converter, {}))[1].setdefault(source, []).append(name)
    return found


def _module(model: torch.nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
