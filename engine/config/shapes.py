"""The shape of a model from the files that lie on this machine: `config.json` as JSON, safetensors headers, nothing run.

Counts come from the headers where the weights are here, else from the shape by the family's formula (Llama, Mistral,
Qwen2, Qwen3, Gemma, Phi-3, OLMo, their mixtures of experts, GPT-2). A family that is not known has unknown counts.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config.facts import ModelFacts

Shape = Mapping[str, Any]
_LARGEST_JSON = 64 * 1024 * 1024
# The built-in model's shape; held equal to the one it is built from by a test.
TINY: Shape = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
# Shapes of the models that recipes name, as published, so that they can be judged before they are downloaded:
# hidden, layers, heads, kv heads, MLP width, embeddings tied.
_QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
}


def _published(name: str) -> Shape | None:
    size = name.removeprefix("Qwen/Qwen3-").removesuffix("-Base")
    if not name.startswith("Qwen/Qwen3-") or size not in _QWEN3:
        return None
    hidden, layers, heads, kv_heads, wide, tied = _QWEN3[size]
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": wide,
        "vocab_size": 151_936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768 if name.endswith("-Base") else 40_960,
    }


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

# Families of the Llama kind: which vectors and biases they carry beside the matrices.
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "gemma3", "olmo2")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_FOUR_NORMS = ("gemma2", "gemma3_text", "gemma3")
_LIKE_LLAMA = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
    "gemma3_text", "phi3", "olmo", "olmo2", "olmoe", "granite", "smollm3",
}  # fmt: skip
_TIED_UNLESS_SAID = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"}


def look(name: str, revision: str | None = None) -> ModelFacts | None:
    """What is known of the model without loading it; nothing when the name says nothing at all."""
    if not name.strip() or "\0" in name:
        return None
    if name == "builtin/tiny":
        return _facts(name, TINY, None, template=True)
    if name.startswith("builtin/"):  # no hub has it; which ones there are is a rule's to say
        return None
    folder = _folder(name, revision)
    if folder is None:
        if name.startswith(("/", ".", "~")):
            return ModelFacts(name, missing="there is no such folder")
        if not _HUB_NAME.fullmatch(name) or ".." in name:
            return ModelFacts(name, missing="it is neither a folder here nor a name that a hub could have")
        shape = _published(name)
        return (
            replace(_facts(name, shape, None, template=None), remote=True) if shape else ModelFacts(name, remote=True)
        )
    config, problem = _json(folder / "config.json")
    if config is None:
        if (folder / "adapter_config.json").is_file():
            problem = "it holds an adapter and not the model below it: merge the two first (PEFT: merge_and_unload)"
        return ModelFacts(name, folder=str(folder), missing=problem)
    return _facts(name, config, folder, template=_has_template(folder))


def _folder(name: str, revision: str | None) -> Path | None:
    """The local folder of a path, or the newest snapshot of a hub name in the hub's cache."""
    place = Path(os.path.expanduser(name))
    try:
        if place.is_dir():
            return place
    except OSError:
        return None
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")) / f"models--{name.replace('/', '--')}"
    if not _HUB_NAME.fullmatch(name) or ".." in name or not cache.is_dir():
        return None
    wanted = revision or "main"
    try:
        commit = (cache / "refs" / wanted).read_text().strip() if not re.fullmatch(r"[0-9a-f]{40}", wanted) else wanted
    except (OSError, ValueError):
        return None
    snapshot = cache / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def _json(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The JSON object in a file, or a sentence why there is none."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            return None, f"its {path.name} is larger than any real one"
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, f"it holds no {path.name}"
    except (OSError, ValueError, RecursionError):
        return None, f"its {path.name} cannot be read as JSON"
    if not isinstance(found, dict):
        return None, f"its {path.name} is not a JSON object"
    return found, ""


def _has_template(folder: Path) -> bool | None:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config, _ = _json(folder / "tokenizer_config.json")
    return None if config is None else bool(config.get("chat_template"))


def _number(shape: Shape, *names: str) -> int | None:
    """The first of these entries that is a sensible count."""
    for name in names:
        value = shape.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40:
            return value
    return None


def _facts(name: str, config: Shape, folder: Path | None, template: bool | None) -> ModelFacts:
    text = config.get("text_config")
    shape: Shape = {**config, **text} if isinstance(text, dict) else config
    model_type = str(shape.get("model_type", ""))[:60]
    hidden, heads = _number(shape, "hidden_size", "n_embd"), _number(shape, "num_attention_heads", "n_head")
    experts = _number(shape, "num_experts", "num_local_experts", "n_routed_experts")
    facts: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": hidden,
        "layers": _number(shape, "num_hidden_layers", "n_layer"),
        "heads": heads,
        "kv_heads": _number(shape, "num_key_value_heads") or heads,
        "head_dim": _number(shape, "head_dim") or (hidden // heads if hidden and heads else None),
        "intermediate_size": _number(shape, "intermediate_size", "n_inner")
        or (4 * hidden if hidden and model_type == "gpt2" else None),
        "vocab_size": _number(shape, "vocab_size"),
        "max_length": _number(shape, "max_position_embeddings", "n_positions"),
        "experts": experts,
        "chat_template": template,
        "folder": str(folder) if folder else "",
        "stored": _stored(config),
    }
    bare = ModelFacts(name, **facts)
    linears = tuple(_linears(bare, shape))
    return ModelFacts(
        name,
        **facts,
        linears=linears,
        expert_weights=tuple(_expert_weights(bare, shape)) if linears else (),
        parameters=_headers(folder) or _formula(bare, shape, linears),
    )


def _stored(config: Shape) -> str:
    quantization = config.get("quantization_config")
    return str(quantization.get("quant_method", ""))[:60] if isinstance(quantization, Mapping) else ""


def _linears(model: ModelFacts, shape: Shape) -> Iterator[tuple[str, int, int, int]]:
    """Linear layers as `(name, in, out, how many)`, without the head; fused experts are no linear layers."""
    hidden, layers, wide = model.hidden_size, model.layers, model.intermediate_size
    if not (hidden and layers and model.heads and model.kv_heads and model.head_dim and wide):
        return
    if model.model_type == "gpt2":
        yield from (("c_attn", hidden, 3 * hidden, layers), ("attn.c_proj", hidden, hidden, layers))
        yield from (("c_fc", hidden, wide, layers), ("mlp.c_proj", wide, hidden, layers))
        return
    if model.model_type not in _LIKE_LLAMA:
        return
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if model.model_type == "phi3":
        yield from (("qkv_proj", hidden, queries + 2 * keys, layers), ("o_proj", queries, hidden, layers))
        yield from (("gate_up_proj", hidden, 2 * wide, layers), ("down_proj", wide, hidden, layers))
        return
    yield from (("q_proj", hidden, queries, layers), ("k_proj", hidden, keys, layers))
    yield from (("v_proj", hidden, keys, layers), ("o_proj", queries, hidden, layers))
    if model.experts:
        shared = _number(shape, "shared_expert_intermediate_size")
        if shared:
            yield from (("gate_proj", hidden, shared, layers), ("up_proj", hidden, shared, layers))
            yield ("down_proj", shared, hidden, layers)
        return
    yield from (("gate_proj", hidden, wide, layers), ("up_proj", hidden, wide, layers))
    yield ("down_proj", wide, hidden, layers)


def _expert_weights(model: ModelFacts, shape: Shape) -> Iterator[tuple[str, int, int, int]]:
    """What transformers holds the experts of a layer in, as `(name, in, out, how many)` for one expert."""
    wide = _number(shape, "moe_intermediate_size") or model.intermediate_size
    if model.experts and model.hidden_size and model.layers and wide:
        yield ("gate_up_proj", model.hidden_size, 2 * wide, model.layers)
        yield ("down_proj", wide, model.hidden_size, model.layers)


def _formula(model: ModelFacts, shape: Shape, linears: tuple[tuple[str, int, int, int], ...]) -> int | None:
    """Parameters by the family's formula; nothing where the family or the shape is not known."""
    hidden, layers, vocabulary = model.hidden_size, model.layers, model.vocab_size
    if not (linears and hidden and layers and vocabulary and model.heads and model.kv_heads and model.head_dim):
        return None
    matrices = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in linears)
    tied = shape.get("tie_word_embeddings", model.model_type in _TIED_UNLESS_SAID)
    total = matrices + vocabulary * hidden * (1 if tied else 2)
    if model.model_type == "gpt2":
        biases = sum(wide_out * count for _, _, wide_out, count in linears)
        return total + biases + layers * 4 * hidden + 2 * hidden + (model.max_length or 0) * hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    total += layers * hidden * (4 if model.model_type in _FOUR_NORMS else 2) + hidden
    if model.model_type in _QK_NORM:
        total += layers * (queries + keys if model.model_type == "olmo2" else 2 * model.head_dim)
    if model.model_type == "olmoe":
        total += layers * (queries + keys)
    if model.model_type in _QKV_BIAS:
        total += layers * (queries + 2 * keys)
    elif shape.get("attention_bias"):
        total += layers * (queries + 2 * keys + hidden)
    if model.experts:
        wide = _number(shape, "moe_intermediate_size") or model.intermediate_size or 0
        total += layers * (model.experts * 3 * hidden * wide + hidden * model.experts)
        if _number(shape, "shared_expert_intermediate_size"):
            total += layers * hidden
    if model.model_type == "olmo":
        total -= layers * hidden * 2 + hidden
    return total


def _headers(folder: Path | None) -> int | None:
    """Parameters by the headers of the safetensors files in a folder; nothing when some are not here."""
    if folder is None:
        return None
    index, _ = _json(folder / "model.safetensors.index.json")
    files = {folder / "model.safetensors"}
    if index is not None:
        weights = index.get("weight_map")
        if not isinstance(weights, dict):
            return None
        files = {folder / os.path.basename(str(file)) for file in weights.values()}
    total = 0
    for file in files:
        count = _header(file)
        if count is None:
            return None
        total += count
    return total


def _header(file: Path) -> int | None:
    """Elements of all tensors in one safetensors file; nothing for packed (quantized) or unreadable ones."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _LARGEST_JSON:
                return None
            header = json.loads(stream.read(size))
        total = 0
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            if tensor["dtype"] not in ("F32", "F16", "BF16", "F64"):
                return None
            count = 1
            for length in tensor["shape"]:
                count *= int(length)
            total += count
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return total
