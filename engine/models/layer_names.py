"""Layers of mixtures whose names PEFT takes for experts: they get the adapter that they are named for, and files say so.

In some 25 families (DeepSeek-V2 and V3, GLM-4.5, Qwen3-Next, ERNIE 4.5 and others) experts were layers in transformers 4 and
are one weight since. There PEFT 0.21 turns the targets `gate_proj`, `up_proj` and `down_proj`, `all-linear` too, into
adapters on that weight, so that old adapters load; layers of shared experts and of dense blocks, which have these names still,
would have none. Here a target is the layer of that name, and experts have an adapter where `target_parameters` names them.

PEFT reads an adapter by the same rule. So its config names such a layer by its weight in `target_parameters`, which has the
same numbers under the same keys of the file; dropout, which PEFT has not beside those and which no reader needs, is 0 there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper

from engine.facts.stored_linears import MAMBA

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AS_NAMED = "layers as they are named"
"""A model type for which PEFT knows no other names."""


@contextlib.contextmanager
def as_named(model: torch.nn.Module) -> Iterator[None]:
    """While an adapter is added, PEFT takes names of layers as they are."""
    config = getattr(model, "config", None)
    if not named_as_experts(model):
        yield
        return
    own = config.__dict__.get("model_type")
    config.__dict__["model_type"] = _AS_NAMED
    try:
        yield
    finally:
        if own is None:
            del config.__dict__["model_type"]
        else:
            config.__dict__["model_type"] = own


def no_plain_layers(model: torch.nn.Module) -> frozenset[str]:
    """Paths of linear layers that no adapter acts on or that no adapter can stand beside: routers that are one and answer
    with more than a product (Phi-3.5-MoE), weights that a block reads without calling the layer (Gemma 3n's AltUp), and what
    PEFT refuses beside Mamba's kernels, which read that layer's weight too (Falcon-H1, Nemotron-H)."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    return frozenset(
        name
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear)
        and (
            type(each).__module__.startswith("transformers.models.")
            or (kind in MAMBA and name.rpartition(".")[2] == "out_proj")
            or re.search(r"\.altup\.(correction|prediction)_coefs$", name) is not None
        )
    )


def named_as_experts(model: torch.nn.Module) -> frozenset[str]:
    """Ends of names that PEFT takes for experts of this model's family; none where it takes layers for layers."""
    from peft.utils import transformers_weight_conversion as theirs

    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    pattern = theirs._MODEL_TO_CONVERSION_PATTERN.get(kind)
    if pattern is None or pattern not in theirs._MOE_FUSED_TARGETS:
        return frozenset()
    return frozenset(theirs._MOE_TARGET_MODULE_MAPPING.get(pattern, ()))


def name_for_files(adapted: PeftModel) -> None:
    """Changes the adapter's config, which is saved with it, so that PEFT opens the adapter on the layers that have it."""
    base = adapted.get_base_model()
    ends, config = named_as_experts(base), adapted.peft_config["default"]
    assert isinstance(config, LoraConfig)
    layers = [
        name
        for name, each in base.named_modules()
        if isinstance(each, LoraLayer) and not isinstance(each, ParamWrapper)
    ]
    if not any(name.rpartition(".")[2] in ends for name in layers):
        return
    named = _shortest(layers, [name for name, _ in base.named_modules()])
    weights = {f"{name}.weight" for name in named if name.rpartition(".")[2] in ends}
    config.target_modules = sorted(name for name in named if name.rpartition(".")[2] not in ends)
    config.target_parameters = sorted({*(config.target_parameters or ()), *weights})
    config.lora_dropout = 0.0


def open_adapter(model: PreTrainedModel | PeftModel, folder: str, name: str, **more: Any) -> PeftModel:
    """`PeftModel.from_pretrained`, or `load_adapter` beside those that `model` has, with an adapter beside each layer that is
    named by its weight: weights of four bits have no other form."""
    config = LoraConfig.from_pretrained(folder)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    kept = [target for target in config.target_parameters or () if not _is_layer(base, target)]
    if len(kept) == len(config.target_parameters or ()):
        if isinstance(model, PeftModel):
            model.load_adapter(folder, name, **more)
            return model
        return PeftModel.from_pretrained(model, folder, adapter_name=name, **more)
    layers = {target.removesuffix(".weight") for target in config.target_parameters or () if target not in kept}
    config.target_modules = {*(config.target_modules or ()), *layers}
    config.target_parameters, config.inference_mode = kept or None, True
    with as_named(base):
        if not isinstance(model, PeftModel):
            return PeftModel.from_pretrained(model, folder, adapter_name=name, config=config, **more)
        model.add_adapter(name, config)
    model.load_adapter(folder, name, **more)
    return model


def _is_layer(model: torch.nn.Module, target: str) -> bool:
    path, _, last = target.rpartition(".")
    if last != "weight" or path.rpartition(".")[2] not in named_as_experts(model):
        return False
    return any(
        name == path or name.endswith(f".{path}")
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear | LoraLayer)
    )


def _shortest(layers: list[str], every: list[str]) -> set[str]:
    """These layers by what follows a block's number, where all that end so are among them; else by their whole names."""
    found: set[str] = set()
    for name in layers:
        end = re.split(r"\.\d+\.", name)[-1]
        alike = [other for other in every if other == end or other.endswith(f".{end}")]
        found.add(end if end.count(".") and set(alike) <= set(layers) else name)
    return found
