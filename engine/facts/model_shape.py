"""The shape of a model from the files that lie on this machine: `config.json` as JSON, safetensors headers, nothing run.

Counts come from the headers where the weights are here, else from the shape by the family's formula (Llama, Mistral,
Qwen2, Qwen3, Gemma, Phi-3, OLMo, their mixtures of experts, gpt-oss, GPT-2, and those of `engine.facts.mixtures`). A family that
is not known has unknown counts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import model_files
from engine.config.architectures import loaders_of, needs_torchvision
from engine.config.facts import ModelFacts, TokenizerFacts, VisionFacts
from engine.errors import ModelError, visible
from engine.facts import mixtures, stored_linears
from engine.facts.stored import PACKED, growth, packed_size, refuse_without_note, stored_as, with_note
from engine.model_files import Tensor

Shape = Mapping[str, Any]
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
# And that of the one that sees: its language model, its vision tower, and how many weights all its parts have.
TINY_VL: Shape = {
    "model_type": "idefics3",
    "scale_factor": 1,
    "vision_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "vocab_size": 345,
    },
}
TINY_VL_PARAMETERS = 266_048
# Its linear layers that see, and those from there to the language model: name, inputs, outputs, how many.
TINY_VL_TOWER = (
    ("fc1", 64, 128, 2), ("fc2", 128, 64, 2), ("k_proj", 64, 64, 2), ("out_proj", 64, 64, 2), ("q_proj", 64, 64, 2),
    ("v_proj", 64, 64, 2),
)  # fmt: skip
TINY_VL_PROJECTOR = (("proj", 64, 64, 1),)
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
    "gemma3_text", "gpt_oss", "phi3", "olmo", "olmo2", "olmoe", "granite", "smollm3",
}  # fmt: skip
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
_EMBEDDING = "embed_tokens.weight"
_TIED_UNLESS_SAID = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"}


PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
"""Sizes of transformers' PixtralVisionConfig, which a config.json on the hub leaves out."""


OF_A_RUN = "it is a run, and its models are its checkpoints"
_STEP = re.compile(r"checkpoint-(\d{1,18})")
ELSEWHERE = "there is such a folder where you stand, and none beside the config, where its paths begin"
"""Of a model that a person means by a folder which its run would not find."""


def model_facts(name: str, revision: str | None = None) -> ModelFacts | None:
    """What is known of the model without loading it; nothing when the name says nothing at all."""
    if not name.strip() or "\0" in name:
        return None
    if name == "builtin/tiny":
        return replace(_facts(name, TINY, None, template=True), processor=False)
    if name == "builtin/tiny-vl":
        facts = _facts(name, TINY_VL, None, template=True)
        facts = replace(facts, tower=TINY_VL_TOWER, projector=TINY_VL_PROJECTOR, parameters=TINY_VL_PARAMETERS)
        return replace(facts, processor=True, by_torchvision=False, keeps_shape=False)
    if name.startswith("builtin/"):  # no hub has it; which ones there are is a rule's to say
        return None
    folder = _folder(name, revision)
    if folder is None:
        if name.startswith(("/", ".", "~")):
            return ModelFacts(name, missing=model_files.NO_FOLDER)
        if _stands_here(name):
            return ModelFacts(name, missing=ELSEWHERE)
        if not _HUB_NAME.fullmatch(name) or ".." in name:
            return ModelFacts(name, missing="it is neither a folder here nor a name that a hub could have")
        shape = _published(name)
        return (
            replace(_facts(name, shape, None, template=None), remote=True) if shape else ModelFacts(name, remote=True)
        )
    config, problem = _json(folder / "config.json")
    if config is None:
        return _no_model(name, folder, problem)
    return _facts(name, with_note(folder, config), folder, template=_has_template(folder), own=_is_own(name))


def _no_model(name: str, folder: Path, problem: str) -> ModelFacts:
    """What a folder is in which there is no model: an adapter, a run, or nothing that is known."""
    facts = ModelFacts(name, folder=str(folder), missing=problem)
    if (folder / model_files.ADAPTER).is_file():
        below = (_json(folder / model_files.ADAPTER)[0] or {}).get("base_model_name_or_path")
        what = "it holds an adapter and not the model below it"
        return replace(facts, missing=what, base=below if isinstance(below, str) else "")
    steps = [match for path in (folder / "checkpoints").glob("checkpoint-*") if (match := _STEP.fullmatch(path.name))]
    if steps:
        newest = max(steps, key=lambda match: int(match[1]))[0]
        return replace(facts, missing=OF_A_RUN, checkpoint=f"{name.rstrip('/')}/checkpoints/{newest}")
    return facts


def tokenizer_facts(name: str, revision: str | None = None) -> TokenizerFacts | None:
    """What is known of the tokenizer without loading it; nothing where its files are not on this machine."""
    if not name.strip() or "\0" in name or name.startswith("builtin/") or (folder := _folder(name, revision)) is None:
        return None
    try:
        model_files.refuse_what_it_names(folder)
        if _is_own(name):
            model_files.refuse_without_tokens(folder)
    except ModelError as problem:
        return TokenizerFacts(name, flaw=problem.full_message)
    base, tokens = model_files.largest_tokens(folder) or (None, None)
    return TokenizerFacts(name, tokens=tokens, base=base)


def _is_own(name: str) -> bool:
    """Whether it is a folder of the person's, which is complete or broken; a snapshot of the hub may be still on its way."""
    return Path(os.path.expanduser(name)).is_dir()


def _stands_here(name: str) -> bool:
    """Whether a name that is no path of the config's, and not in the hub's cache, is a folder below where one stands."""
    try:
        return Path(name).is_dir()
    except OSError:
        return False


def _folder(name: str, revision: str | None) -> Path | None:
    """The local folder of a path, or the newest snapshot of a hub name in the hub's cache."""
    place = Path(os.path.expanduser(name))
    try:
        # Another name is one of the hub: a run, which works in a folder of its own, would not find it below this one.
        if (place.is_absolute() or name.startswith(".")) and place.is_dir():
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
    if not path.exists():
        return None, f"it holds no {path.name}"
    try:
        document = model_files.read_json(path)
    except ModelError as problem:
        reason = problem.message.rpartition(f"{path.name}: ")[2].rstrip(".")
        return None, f"its {path.name} {reason}"
    if not isinstance(document, dict):
        return None, f"its {path.name} is not a JSON object"
    return document, ""


def _has_template(folder: Path) -> bool | None:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config, _ = _json(folder / "tokenizer_config.json")
    if config is None:
        # A tokenizer without settings of its own has no template; one that is not here is not known.
        return False if (folder / "tokenizer.json").is_file() else None
    return bool(config.get("chat_template"))


def _number(shape: Shape, *names: str) -> int | None:
    """The first of these entries that is a sensible count."""
    for name in names:
        value = shape.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40:
            return value
    return None


def _image_facts(folder: Path | None) -> dict[str, bool | None]:
    """What the model's files say of how its images are read."""
    if folder is None:
        return {}
    try:
        reader, kind = model_files.image_processor(folder), model_files.processor_class(folder)
    except ModelError:
        return {}
    return {
        "by_torchvision": needs_torchvision(kind, reader),
        "keeps_shape": reader in model_files.KEEP_SHAPE if reader else None,
    }


def _vision(config: Shape) -> VisionFacts | None:
    """The vision tower by the names that families give its sizes."""
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return None
    if pixtral := tower.get("model_type") == "pixtral":
        tower = {**PIXTRAL, **tower}
    hidden = _number(tower, "embed_dim", "hidden_size")
    layers = _number(tower, "depth", "num_hidden_layers")
    patches = _patches(config, tower)
    if not (hidden and layers and patches):
        return None
    wide = _number(tower, "intermediate_size") or (_number(tower, "mlp_ratio") or 4) * hidden
    merges = _number(tower, "spatial_merge_size") is not None
    gated = pixtral or "silu" in str(tower.get("hidden_act"))
    return VisionFacts(hidden, layers, wide, gated, pixtral or merges, patches)


def _patches(config: Shape, tower: Shape) -> int | None:
    """Patches of an image that become one token; nothing where no known name says it."""
    if side := _number(tower, "spatial_merge_size") or _number(
        config, "spatial_merge_size", "scale_factor", "downsample_factor"
    ):
        return side * side
    image, patch, tokens = (
        _number(tower, "image_size"),
        _number(tower, "patch_size"),
        _number(config, "mm_tokens_per_image"),
    )
    if image and patch and tokens:
        return max(1, (image // patch) ** 2 // tokens)
    if config.get("model_type") == "llava":
        return 1
    share = config.get("downsample_ratio")
    return round(1 / share**2) if isinstance(share, float) and 0 < share <= 1 else None


def _facts(name: str, config: Shape, folder: Path | None, template: bool | None, own: bool = False) -> ModelFacts:
    text = config.get("text_config")
    shape: Shape = {**config, **text} if isinstance(text, dict) else config
    model_type = str(shape.get("model_type", ""))[:60]
    hidden, heads = _number(shape, "hidden_size", "n_embd"), _number(shape, "num_attention_heads", "n_head")
    experts = _number(shape, "num_experts", "num_local_experts", "n_routed_experts")
    if model_type == "nemotron_h" and not _has_mixtures(shape):
        experts = None  # its config counts experts also where no layer has any
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
        "experts_per_token": _number(shape, *_TOP_K) if experts else None,
        "chat_template": template,
        "processor": any((folder / file).is_file() for file in model_files.PROCESSORS) if folder else None,
        **_image_facts(folder),
        "folder": str(folder) if folder else "",
        "stored": stored_as(config.get("quantization_config")),
        "stored_size": packed_size(config.get("quantization_config")),
        "vision": _vision(config),
    }
    stored, flaw = _stored_weights(folder, own, config)
    if experts:
        facts["with_experts"] = _with_experts(model_type, shape, facts["layers"] or 0, stored)
    bare = ModelFacts(name, **facts)
    linears = tuple(_linears(bare, shape))
    held: tuple[tuple[str, int, int, int], ...] = ()
    if not linears and stored and not facts["stored"]:
        held = stored_linears.linears(stored, experts or 0)
    seen = isinstance(config.get("vision_config"), Mapping)
    sees = stored_linears.that_see(stored) if stored and seen and not facts["stored"] else ((), ())
    fused = tuple(_expert_weights(bare, shape)) if linears or held else ()
    if held and stored is not None and not stored_linears.agrees(fused, experts or 0, stored):
        fused = ()
    known = replace(
        bare,
        linears=linears or held,
        tower=sees[0],
        projector=sees[1],
        expert_weights=fused,
        # Of a model that sees, the formula counts the language model alone.
        parameters=_counted(stored) or (_formula(bare, shape, linears) if shape is config else None),
        flaw=flaw,
        loaders=loaders_of(str(config.get("model_type", ""))),
    )
    if stored and known.stored in PACKED:
        return replace(known, stored_size=_packed_size(known, stored, config["quantization_config"]))
    if not stored or facts["stored"] or shape is not config:
        return known
    return _with_weights(known, shape, stored)


def _with_experts(kind: str, shape: Shape, layers: int, stored: Mapping[str, Tensor] | None) -> tuple[int, ...]:
    """The numbers of the layers that have experts: of a family that is known by its config.json, of others by their files."""
    by_config = kind in mixtures.KNOWN or kind in _LIKE_LLAMA
    if stored and not by_config and (found := stored_linears.layers_with_experts(stored, layers)):
        return found
    return mixtures.layers_with_experts(kind, shape, layers)


def _with_weights(known: ModelFacts, shape: Shape, stored: Mapping[str, Tensor]) -> ModelFacts:
    """What the names and shapes of the stored weights say beside the config."""
    tied = shape.get("tie_word_embeddings", known.model_type in _TIED_UNLESS_SAID)
    headless = known.model_type in _LIKE_LLAMA and not tied
    return replace(
        known,
        flaw=known.flaw or _unlike(known, stored),
        headless=headless and not any(key.endswith("lm_head.weight") for key in stored),
        biases=any(key.endswith("bias") for key in stored),
        modules=None if known.experts else frozenset(_modules(stored)),
    )


def _has_mixtures(shape: Shape) -> bool:
    """Whether a hybrid's list of layers names a mixture of experts: by words, or by a letter each as files have it."""
    return "moe" in (shape.get("layers_block_type") or ()) or "E" in str(shape.get("hybrid_override_pattern") or "")


def _stored_weights(folder: Path | None, own: bool, config: Shape) -> tuple[dict[str, Tensor] | None, str]:
    """The weights by the headers of a folder's files, and why the files would not be loaded."""
    if folder is None:
        return None, ""
    try:
        model_files.refuse_what_it_names(folder)
    except ModelError as problem:
        return None, problem.full_message
    try:
        stored = model_files.stored_weights(folder)
    except ModelError as problem:
        return None, problem.full_message if own else ""
    try:
        refuse_without_note(folder, config, stored)
    except ModelError as problem:
        return stored, problem.full_message
    return stored, ""


def _packed_size(model: ModelFacts, stored: Mapping[str, Tensor], note: Any) -> float:
    """Bytes of a number of the layers by the headers, what was left out of quantizing among them."""
    numbers = sum(into * out * count for _, into, out, count in model.linears)
    numbers += sum(into * out * count * (model.experts or 0) for _, into, out, count in model.expert_weights)
    held = sum(
        math.prod(each.shape) * _bits(each.dtype) / 8 * growth(name, stored, note)
        for name, each in stored.items()
        if "layers." in name and not stored_linears.sees(name)
    )
    return held / numbers if numbers and held else model.stored_size


def _bits(dtype: str) -> int:
    """Bits of a number of this format, such as I32, BF16 or F8_E4M3."""
    return int(next(iter(re.findall(r"[0-9]+", dtype)), 8))


def _counted(stored: Mapping[str, Tensor] | None) -> int | None:
    """Numbers in all of these weights; nothing for packed (quantized) ones."""
    if not stored or any(tensor.dtype not in ("F32", "F16", "BF16", "F64") for tensor in stored.values()):
        return None
    return sum(math.prod(tensor.shape) for tensor in stored.values())


def _modules(stored: Iterable[str]) -> Iterator[str]:
    """The paths of all modules above these weights."""
    for name in stored:
        while name := name.rpartition(".")[0]:
            yield name


def _unlike(model: ModelFacts, stored: Mapping[str, Tensor]) -> str:
    """A sentence on the first weight of a known family that the files lack or hold in another shape; empty for none."""
    by_end = {name[max(name.find("layers."), 0) :]: (name, tensor) for name, tensor in stored.items()}
    embedding = next(((name, each) for name, each in stored.items() if name.endswith(_EMBEDDING)), None)
    if model.model_type not in _LIKE_LLAMA or not model.linears:
        return ""
    wanted = {f"model.{_EMBEDDING}": (embedding, (model.vocab_size, model.hidden_size))}
    for number in range(model.layers or 0):
        for name, wide, high, _ in model.linears:
            if model.experts and name not in _OF_ATTENTION:
                continue
            part = "self_attn" if name in (*_OF_ATTENTION, "qkv_proj") else "mlp"
            end = f"layers.{number}.{part}.{name}.weight"
            wanted[f"model.{end}"] = (by_end.get(end), (high, wide))
    lost = [name for name, (stored_shape, _) in wanted.items() if stored_shape is None]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        return f"its files hold no {lost[0]}{more}, so it would start from random numbers. Take a folder with the whole model."
    for stored_shape, shape in wanted.values():
        if stored_shape is not None and None not in shape and stored_shape[1].shape != shape:
            held, want = (" x ".join(map(str, each)) for each in (stored_shape[1].shape, shape))
            return f"its {visible(stored_shape[0])} has the shape {held}, and its config.json wants {want}. Mend its config.json."
    return ""


def _linears(model: ModelFacts, shape: Shape) -> Iterator[tuple[str, int, int, int]]:
    """Linear layers as `(name, in, out, how many)`, without the head; fused experts are no linear layers."""
    hidden, layers = model.hidden_size, model.layers
    wide = model.intermediate_size or _number(shape, "moe_intermediate_size")
    if not (hidden and layers and model.heads and model.kv_heads and model.head_dim and wide):
        return
    if model.model_type == "gpt2":
        yield from (("c_attn", hidden, 3 * hidden, layers), ("attn.c_proj", hidden, hidden, layers))
        yield from (("c_fc", hidden, wide, layers), ("mlp.c_proj", wide, hidden, layers))
        return
    if model.model_type in mixtures.KNOWN and model.experts:
        yield from mixtures.linears(model.model_type, shape, hidden, layers)
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
    mixed = len(model.with_experts or ())
    shared = _number(shape, "shared_expert_intermediate_size")
    if mixed and shared:
        yield from (("gate_proj", hidden, shared, mixed), ("up_proj", hidden, shared, mixed))
        yield from (("down_proj", shared, hidden, mixed), ("shared_expert_gate", hidden, 1, mixed))
    if dense := layers - mixed:
        yield from (("gate_proj", hidden, wide, dense), ("up_proj", hidden, wide, dense))
        yield ("down_proj", wide, hidden, dense)


def _expert_weights(model: ModelFacts, shape: Shape) -> Iterator[tuple[str, int, int, int]]:
    """What transformers holds the experts of a layer in, as `(name, in, out, how many)` for one expert."""
    wide = _number(shape, "moe_intermediate_size") or model.intermediate_size
    if model.experts and model.hidden_size and model.layers and wide:
        layers = len(model.with_experts or ())
        yield ("gate_up_proj", model.hidden_size, 2 * wide, layers)
        yield ("down_proj", wide, model.hidden_size, layers)


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
    if model.model_type in mixtures.KNOWN:
        total += mixtures.vectors(model.model_type, shape, hidden, layers)
        wide = _number(shape, "moe_intermediate_size") or model.intermediate_size or 0
        return total + len(model.with_experts or ()) * (model.experts or 0) * 3 * hidden * wide
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    total += layers * hidden * (4 if model.model_type in _FOUR_NORMS else 2) + hidden
    if model.model_type in _QK_NORM:
        total += layers * (queries + keys if model.model_type == "olmo2" else 2 * model.head_dim)
    if model.model_type == "olmoe":
        total += layers * (queries + keys)
    if model.model_type in _QKV_BIAS:
        total += layers * (queries + 2 * keys)
    elif shape.get("attention_bias", model.model_type == "gpt_oss"):
        total += layers * (queries + 2 * keys + hidden)
    if model.experts:
        wide = _number(shape, "moe_intermediate_size") or model.intermediate_size or 0
        total += len(model.with_experts or ()) * (model.experts * 3 * hidden * wide + hidden * model.experts)
    if model.model_type == "gpt_oss":  # biases of experts and routers, and a sink for each head
        total += layers * ((model.experts or 0) * (2 * (model.intermediate_size or 0) + hidden + 1) + model.heads)
    if model.model_type == "olmo":
        total -= layers * hidden * 2 + hidden
    return total
