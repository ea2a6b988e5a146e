"""Models and processing classes from a config: local folders, hub ids and the built-in ones.

Refuses code from model folders and weights that are pickles: only safetensors are read. What the model was asked for and
what it became (attention, numbers stored in FP8) comes beside it for the receipt; nothing is decided silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError

from engine import model_files
from engine.config.architectures import loaders_of
from engine.config.facts import Facts, ModelFacts
from engine.config.kinds import BUILTIN_MODELS, LABELS, loader_of
from engine.config.rule import raise_first
from engine.config.tree import RunConfig
from engine.errors import ModelError, first_line, redact, visible
from engine.facts.stored import refuse_without_note, stored_as, with_note
from engine.features.packed_experts import EXPERTS_ALONE, kind_of
from engine.hub import commit_of, reaching_hub
from engine.rules.model import (
    stored_weights_are_of_a_known_format,
    stored_weights_take_no_second_format,
    weights_stored_in_fp8_take_plain_lora,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from engine.models.adapter_folder import Begun
    from engine.models.stored_fp8 import Held
    from engine.models.stored_packed.loading import HeldPacked

UNREADABLE = (*model_files.UNREADABLE, SafetensorError)


def model_folder(config: RunConfig) -> str:
    """Where the weights are read from: a folder for a built-in model, otherwise the name itself."""
    if config.model.name not in BUILTIN_MODELS:
        return config.model.name
    from engine.builtin import tiny, tiny_vl

    return str(tiny_vl.folder() if config.model.name == tiny_vl.NAME else tiny.folder(config.model.tokenizer))


def wanted_revision(config: RunConfig) -> str | None:
    """The revision of the model that is asked for; a built-in one has none."""
    return None if config.model.name in BUILTIN_MODELS else config.model.revision


def load_processing_class(config: RunConfig) -> Any:
    """The tokenizer, or the processor where the model has one. Raises ModelError naming what cannot be loaded."""
    from transformers import AutoTokenizer

    source = config.model.tokenizer or model_folder(config)
    wanted = wanted_revision(config) if config.model.tokenizer is None else None
    try:
        with reaching_hub(source):
            revision = commit_of(source, wanted)
            folder = model_files.checked(source, revision)
            model_files.refuse_without_tokens(folder)
            if any((folder / name).is_file() for name in model_files.PROCESSORS):
                from engine.models.processors import load_processor

                return load_processor(config, source, folder, revision)
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except UNREADABLE as problem:
        raise _cannot_load("tokenizer", source, problem) from problem


@dataclass(frozen=True)
class Loaded:
    """A model as it was loaded, with what the receipt tells of that."""

    model: PreTrainedModel
    attention_reason: str = ""
    """Why its attention is another than was asked for; empty where it is that."""
    stored_fp8: Held | None = None
    """What became of numbers that its files hold in FP8."""
    stored_packed: HeldPacked | None = None
    """What became of numbers that its files hold as GPTQ, AWQ or compressed-tensors packs them."""
    stored_mxfp4: bool = False
    """Whether its files hold experts in MXFP4."""
    adapter: Begun | None = None
    """What an adapter that is trained further began as; None for a new one, and for one that a checkpoint brings."""
    without_kernels: str = ""
    """Why an installed flash-linear-attention does not compute its layers; empty where it does, or none is installed."""


def load_pretrained(config: RunConfig, device: torch.device | None = None) -> Loaded:
    """The model in its number format with the head that the method needs, a new one where it brings none; on the CPU
    unless `device` is given, which weights are then read onto one after the other, or it is quantized for a GPU. It computes
    with torch's own attention, or with `eager` where it has no form of that.

    Raises ModelError when it cannot be found or read, when it would run code of its own, and when it brings no
    safetensors weights.
    """
    source = model_folder(config)
    with reaching_hub(source):
        return _model(config, source, device)


def _model(config: RunConfig, source: str, device: torch.device | None) -> Loaded:
    import torch
    import transformers

    from engine.models.attention_direction import refuse_the_wrong_direction
    from engine.models.capped_scores import keep_capped_scores
    from engine.models.expert_shards import part_of
    from engine.models.state_kernels import kernels_that_serve

    head = config.method.head
    revision = commit_of(source, wanted_revision(config))
    try:
        folder = model_files.complete(source, revision)
    except UNREADABLE as problem:
        raise _cannot_load("model", source, problem) from problem
    told = with_note(folder, model_files.read_json(folder / "config.json"))
    held = ModelFacts(config.model.name, stored=stored_as(told.get("quantization_config")))
    raise_first(stored_weights_are_of_a_known_format(config, Facts(model=held)))
    refuse_without_note(folder, told, model_files.stored_weights(folder))
    served = loaders_of(str(told.get("model_type", "")))
    loader = getattr(transformers, loader_of(head, served))
    attention = config.model.attention if config.model.attention in ("sdpa", "eager") else None
    if attention is None and model_files.names_attention(folder):
        attention = "sdpa"  # what a folder's config chooses is not asked: some names mean kernels of the hub
    settings: dict[str, Any] = {
        "dtype": getattr(torch, config.model.dtype),
        "attn_implementation": attention,
        "revision": revision,
    }
    try:
        settings |= weight_settings(config, source, revision)
        if "quantization_config" in settings and torch.cuda.is_available():
            settings["device_map"] = {"": torch.cuda.current_device()}
        elif device is not None and "quantization_config" not in settings:
            settings["device_map"] = {"": device}
        with kernels_that_serve(str(told.get("model_type", ""))) as without:
            loaded = replace(_with_attention(config, source, loader, settings), without_kernels=without)
    except UNREADABLE as problem:
        raise _cannot_load("model", source, problem) from problem
    model = loaded.model
    if keep_capped_scores(model):
        loaded = _without_fused(loaded)
    divided = part_of(config) is not None
    if divided or (device is not None and "quantization_config" not in settings):
        # It is a plain model on one device: with a map of devices the trainer and PEFT would take it for one on several.
        vars(model).pop("hf_device_map", None)
    refuse_the_wrong_direction(config, model)
    keep_differentiable(model)
    name_experts(model.config.get_text_config())
    if model.base_model is model and isinstance(getattr(model, "model", None), transformers.PreTrainedModel):
        # Llama 4's language model names its layers otherwise than its class says.
        model.base_model_prefix = "model"
    if head == "steps" and isinstance(dropout := getattr(model, "dropout", None), torch.nn.Dropout):
        # transformers drops a tenth of what a new head of tokens reads, unasked.
        dropout.p = 0.0
    return loaded


def _with_attention(config: RunConfig, source: str, loader: Any, settings: dict[str, Any]) -> Loaded:
    """The model with torch's fused attention, or with `eager` where it has no form of that."""
    try:
        return _with_weights(config, source, loader, settings)
    except ValueError as problem:
        if "does not support an attention implementation through torch.nn.functional" not in str(problem):
            raise
        return _without_fused(_with_weights(config, source, loader, {**settings, "attn_implementation": "eager"}))


def _with_weights(config: RunConfig, source: str, loader: Any, settings: dict[str, Any]) -> Loaded:
    """The model with its weights from the files, and with the head that the method puts on top."""
    from engine.models.stored_fp8 import load_fp8, stored_fp8
    from engine.models.stored_packed.loading import load_packed, stored_packed
    from engine.models.strict_load import load_strictly

    head = config.method.head
    labels = LABELS.get(head, {})
    packed = stored_packed(source, settings["revision"])
    if packed is not None:
        _refuse_a_second_format(config, packed.method)
        packed.config.update(labels)
        keep, experts = config.adapter.kind == "lora", bool(kind_of(config, packed.method))
        packed_model, kept = load_packed(loader, packed, settings, head, keep=keep, experts=experts)
        return Loaded(packed_model, stored_packed=kept)
    stored = stored_fp8(source, settings["revision"])
    if stored is None:
        if "config" in settings:
            settings["config"].update(labels)
            known = Facts(model=ModelFacts(config.model.name, stored="mxfp4"))
            raise_first(stored_weights_take_no_second_format(config, known))
            return Loaded(load_strictly(loader, source, head, **settings), stored_mxfp4=True)
        return Loaded(load_strictly(loader, source, head, **settings, **labels))
    _refuse_a_second_format(config, "fp8")
    stored.config.update(labels)
    from engine.models.expert_shards import part_of
    from engine.models.packed_experts import ExpertsAlone

    own = part_of(config) or (0, 1)
    packs = ExpertsAlone("keep", "fp8", stored.block, own) if kind_of(config, "fp8") else None
    model, held = load_fp8(loader, stored, settings, keep=config.adapter.kind == "lora", experts=packs)
    return Loaded(model, stored_fp8=held)


def _refuse_a_second_format(config: RunConfig, stored: str) -> None:
    """Raises ModelError where weights that the files hold in a format of fewer bits do not serve this config."""
    known = Facts(model=ModelFacts(config.model.name, stored=stored))
    for check in (stored_weights_take_no_second_format, weights_stored_in_fp8_take_plain_lora):
        raise_first(check(config, known))


def weight_settings(config: RunConfig, source: str, revision: str | None) -> dict[str, Any]:
    """What `from_pretrained` is told of how weights are held: a `quantization_config` where one is needed, also where a process
    reads some experts alone, and the `config` of a model whose files hold experts in MXFP4, which stay so under an adapter and
    are widened once without."""
    from engine.models.expert_shards import part_of
    from engine.models.packed_experts import ExpertsAlone, stored_mxfp4

    stored = stored_mxfp4(source, revision)
    part = part_of(config)
    if stored is not None:
        todo = ExpertsAlone("keep" if kind_of(config, "mxfp4") else "widen", part=part or (0, 1))
        return {"config": stored, "quantization_config": todo}
    if part is not None and not kind_of(config):
        return {"quantization_config": ExpertsAlone("divide", part=part)}
    asked = quantization_config(config)
    return {} if asked is None else {"quantization_config": asked}


def _without_fused(loaded: Loaded) -> Loaded:
    name = type(loaded.model).__name__
    return replace(loaded, attention_reason=f"sdpa does not serve here: transformers has none for {name}")


def quantization_config(config: RunConfig) -> Any:
    """What transformers quantizes by for `model.quantization`, or None where it has no part in it; bitsandbytes' 4-bit weights
    are quantized twice (arXiv:2305.14314)."""
    import torch
    from transformers import BitsAndBytesConfig

    from engine.models.expert_shards import part_of

    kind, part = config.model.quantization, part_of(config) or (0, 1)
    if kind in ("none", "fp8"):
        return None
    if kind in EXPERTS_ALONE:
        from engine.models.packed_experts import ExpertsAlone

        return ExpertsAlone("pack", kind, part=part) if config.model.quantize_moe_experts else None
    # A new head is trained whole, so it stays as it is.
    whole = None if config.method.head == "vocabulary" else ["score", "lm_head"]
    if kind == "int8":
        asked = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=whole)
    else:
        asked = BitsAndBytesConfig(
            llm_int8_skip_modules=whole,
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, config.model.dtype),
            # fully_shard cuts floating-point weights alone: the same bytes, read as such.
            **({"bnb_4bit_quant_storage": config.model.dtype} if config.distributed.strategy == "fsdp2" else {}),
        )
    if not config.model.quantize_moe_experts:
        return asked
    from engine.models.packed_experts import with_experts

    return with_experts(asked, part)


def _cannot_load(what: str, source: str, problem: Exception) -> ModelError:
    name = visible(redact(source))
    first = visible(redact(first_line(problem)))[:300]
    if isinstance(problem, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        first = "the hub was not reached, and its cache on this machine does not have it"
    elif not isinstance(problem, (OSError, ValueError)):
        first = f"{type(problem).__name__}: {first}"
    if (lacking := re.search(r"for this kind of AutoModel: (\w+)", str(problem))) is not None:
        return ModelError(
            f"model.name: the installed transformers has no {lacking[1]} for models such as {name}, as this method needs.",
            "Choose another model, or another method.",
        )
    if isinstance(problem, ImportError) and "torchvision" in str(problem).lower():
        return ModelError(
            f"model.name: the processor of {name} reads images by torchvision, which is not installed.",
            "Install it beside the torch that is here (pip install torchvision), or take another model.",
        )
    if Path(source).is_dir():
        return ModelError(
            f"model.name: the {what} in {name} cannot be loaded: {first.rstrip('.')}.",
            "If its files were cut on the way, copy or download them again.",
        )
    if source.startswith((".", "/", "~")):
        return ModelError(f"model.name: there is no folder {name}.", "Check the path.")
    return ModelError(
        f"model.name: the {what} {name} is neither a folder here nor to be had from the hub: {first.rstrip('.')}.",
        "Check the name and the network, or download it on another machine and give the folder; paths begin at the config's folder.",
    )


_SWITCH = "support_avx512bf16_for_cpu"


def keep_differentiable(model: torch.nn.Module) -> None:
    """Leaves the four bits of this model's layers in the one layout whose products have gradients.

    On a processor that multiplies bfloat16 by itself, bitsandbytes 0.50 lays a layer's four bits out anew at its first call
    outside training, for good, and what it then multiplies with has no gradient: after one look at held-out rows or one sample
    the layers below would learn from the adapters' paths alone. Each layer's own instance is told not to.
    """
    for module in model.modules():
        if hasattr(module, _SWITCH):
            setattr(module, _SWITCH, False)


_OWN_NAMES = ("n_routed_experts", "num_local_experts")
"""The first may stand for the second in a config, and one name is followed once."""


def name_experts(config: PretrainedConfig) -> None:
    """Has the config of a language model answer to `num_experts`, where it counts its experts by another name alone.

    Losses that balance routers ask every mixture by that name: TRL's head reads it, and transformers maps it to a family's own
    in most configs, but not in GraniteMoE's and Phi-3.5-MoE's. The config gets a class with that name beside its own; what is
    written of it stays as it is.
    """
    if hasattr(config, "num_experts"):
        return
    own = next((name for name in _OWN_NAMES if isinstance(getattr(config, name, None), int)), None)
    if own is not None:
        kind = type(config)
        named = {"attribute_map": {**kind.attribute_map, "num_experts": own}, "__module__": kind.__module__}
        config.__class__ = type(kind.__name__, (kind,), named)
