"""Models and processing classes from a config: local folders, hub ids and `builtin/tiny`.

Refuses code from model folders and weights that are pickles: only safetensors are read. What the model was asked for and
what it became (number format, attention) is left on the model for the receipt to read; nothing is decided silently.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.config.kinds import Head
from engine.config.method import METHODS
from engine.errors import ModelError, visible
from engine.hub import reaching_hub

LOADERS: dict[Head, str] = {
    "vocabulary": "AutoModelForCausalLM",
    "score": "AutoModelForSequenceClassification",
    "steps": "AutoModelForTokenClassification",
    "none": "AutoModel",
}
"""The transformers class for what a method puts on top of the model."""
DTYPES = ("bfloat16", "float16", "float32")
BUILTIN = "builtin/tiny"


def model_folder(config: Any) -> str:
    """Where the weights are read from: a folder for `builtin/tiny`, otherwise the name itself."""
    if config.model.name != BUILTIN:
        return config.model.name
    from engine.builtin import tiny

    return str(tiny.folder(config.model.tokenizer))


def load_processing_class(config: Any) -> Any:
    """The tokenizer, or the processor where the model has one. Raises ModelError naming what cannot be loaded."""
    from transformers import AutoProcessor, AutoTokenizer

    source = config.model.tokenizer or model_folder(config)
    refuse_foreign_code(source)
    folder = Path(source)
    has_processor = any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    loader = AutoProcessor if has_processor else AutoTokenizer
    revision = config.model.revision if config.model.tokenizer is None else None
    try:
        with reaching_hub(source):
            return loader.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise _cannot_load("tokenizer", source, problem) from problem


def load_model(config: Any) -> Any:
    """The model in its number format with the head that the method needs, a new one where it brings none; on the CPU
    unless it is quantized for a GPU.

    Raises ModelError when it cannot be found or read, when it would run code of its own, and when it brings no
    safetensors weights.
    """
    source = model_folder(config)
    with reaching_hub(source):
        return _model(config, source)


def _model(config: Any, source: str) -> Any:
    import torch
    import transformers

    from engine.models.attention import TRIED, settle, without_sdpa
    from engine.models.direction import refuse_the_wrong_direction
    from engine.models.four_bits import keep_differentiable
    from engine.models.fp8_base import refuse_what_has_no_fp8
    from engine.models.whole_tiles import at_stake, guard

    head = METHODS[config.method.kind].head
    loader = getattr(transformers, LOADERS[head])
    refuse_foreign_code(source)
    if config.model.quantization == "fp8":
        refuse_what_has_no_fp8(config)
    settings: dict[str, Any] = {
        "dtype": getattr(torch, config.model.dtype),
        "attn_implementation": None if config.model.attention in TRIED else config.model.attention,
        "revision": config.model.revision if config.model.name != BUILTIN else None,
    }
    if (quantization := quantization_config(config)) is not None:
        settings["quantization_config"] = quantization
        if torch.cuda.is_available():
            settings["device_map"] = {"": torch.cuda.current_device()}
    try:
        try:
            model = _with_weights(config, source, loader, settings)
        except ValueError as problem:
            if not without_sdpa(problem):
                raise
            model = _with_weights(config, source, loader, {**settings, "attn_implementation": "eager"})
            model.attention_reason = f"sdpa does not serve here: transformers has none for {type(model).__name__}"
    except (OSError, ValueError, ImportError) as problem:
        raise _cannot_load("model", source, problem) from problem
    refuse_the_wrong_direction(config, model)
    keep_differentiable(model)
    card = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    if config.model.attention in TRIED:
        settle(model, config.model.attention, card)
    if at_stake(model, card):
        guard(model)
    if head == "steps" and isinstance(getattr(model, "dropout", None), torch.nn.Dropout):
        # transformers drops a tenth of what a new head of tokens reads, unasked.
        model.dropout.p = 0.0
    if config.model.quantization == "fp8":
        _compute_in_fp8(model, config)
    return model


def _with_weights(config: Any, source: str, loader: Any, settings: dict[str, Any]) -> Any:
    """The model with its weights from the files, and with the head that the method puts on top."""
    from engine.models.stored_fp8 import load_fp8, stored_fp8
    from engine.models.whole import load_whole

    head = METHODS[config.method.kind].head
    labels = {"score": 1, "steps": 2}.get(head)
    stored = stored_fp8(source, settings["revision"])
    if stored is None:
        return load_whole(loader, source, head, **settings, **({} if labels is None else {"num_labels": labels}))
    _refuse_what_fp8_cannot(config)
    if labels is not None:
        stored.config.num_labels = labels
    return load_fp8(loader, stored, settings, keep=config.adapter.kind == "lora")


def _compute_in_fp8(model: Any, config: Any) -> None:
    """Rounds the layers on the card, where they stay unless they are to wait on the host."""
    import torch

    from engine.models.fp8_base import compute_in_fp8

    card = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    compute_in_fp8(model, card, stay=not config.memory.layer_offloading)


def _refuse_what_fp8_cannot(config: Any) -> None:
    """Raises ModelError for settings that would use the FP8 numbers of a layer without their scales."""
    if config.model.quantization != "none":
        raise ModelError(
            f"model.quantization: must be none for a model that is stored in FP8; got {config.model.quantization}.",
            "Its numbers have eight bits already.",
        )
    if config.adapter.kind == "lora" and config.adapter.use_dora:
        raise ModelError(
            "adapter.use_dora: must be false for a model that is stored in FP8.",
            "DoRA measures plain weights: take plain LoRA, or the model in bfloat16.",
        )


def quantization_config(config: Any) -> Any:
    """bitsandbytes' settings for `model.quantization`, or None where it has no part in it; 4-bit weights are quantized
    twice (arXiv:2305.14314)."""
    import torch
    from transformers import BitsAndBytesConfig

    kind = config.model.quantization
    if kind in ("none", "fp8"):
        return None
    # A new head is trained whole, so it stays as it is.
    whole = None if METHODS[config.method.kind].head == "vocabulary" else ["score", "lm_head"]
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=whole)
    return BitsAndBytesConfig(
        llm_int8_skip_modules=whole,
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.model.dtype),
    )


def refuse_foreign_code(source: str) -> None:
    """Raises ModelError if a local folder's JSON files ask for code to be run or hold fields only the library may set."""
    folder = Path(source)
    if not folder.is_dir():
        return
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text("utf-8"))
        except ValueError as problem:
            raise ModelError(f"{visible(str(path))}: is not JSON ({problem}).") from problem
        if (found := _foreign(content)) is not None:
            raise ModelError(
                f"{visible(str(path))}: holds `{visible(found)}`, which would run code that comes with the model.",
                "Such models are not loaded. Use a model that transformers itself supports.",
            )


def _foreign(content: Any) -> str | None:
    if isinstance(content, dict):
        for key, value in content.items():
            if key in ("auto_map", "trust_remote_code") and value:
                return str(key)
            if key.startswith("_") and key.endswith("_internal"):
                return str(key)
            if (found := _foreign(value)) is not None:
                return found
    elif isinstance(content, list):
        for value in content:
            if (found := _foreign(value)) is not None:
                return found
    return None


def _cannot_load(what: str, source: str, problem: Exception) -> ModelError:
    name = visible(source)
    first = visible(str(problem).strip().split("\n")[0])[:300]
    if (lacking := re.search(r"for this kind of AutoModel: (\w+)", str(problem))) is not None:
        return ModelError(
            f"model.name: the installed transformers has no {lacking[1]} for models such as {name}, as this method needs.",
            "Choose another model, or another method.",
        )
    if Path(source).is_dir():
        if what == "model" and not any(Path(source).glob("*.safetensors*")):
            return ModelError(
                f"model.name: the folder {name} holds no safetensors weights.",
                "Pickled weights (.bin, .pt) are not read, since they can run code. Convert them to safetensors first.",
            )
        return ModelError(f"model.name: the {what} in {name} cannot be loaded: {first}")
    if source.startswith((".", "/", "~")):
        return ModelError(f"model.name: there is no folder {name}.", "Check the path.")
    return ModelError(
        f"model.name: the {what} {name} is neither a folder here nor to be had from the hub: {first}",
        "Check the name and the network, or download it on another machine and give the folder.",
    )
