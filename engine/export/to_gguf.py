"""A model folder as one GGUF file, and that file read back: every weight against its source, tokens, template, stop tokens.

Where llama.cpp's Python package is installed, llama.cpp opens the file too and is the judge: its ids and its logits.

Weights are mapped by the `gguf` package's own names. What llama.cpp computes otherwise than transformers for a family (the
order of rotated pairs, norms counted from one, scales that it takes from the size) is changed here or refused by name.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from engine import model_files
from engine.errors import ModelError, WorkbenchError, visible
from engine.export import llama_cpp, parity
from engine.export.folder import Model
from engine.export.places import K_QUANTS, QUANTS
from engine.export.tokens_of_gguf import Vocabulary, joined, vocabulary

Report = Callable[[str, int, int], None]
FAMILIES = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
}  # fmt: skip
"""llama.cpp's architecture of each `model_type`."""
ACTIVATIONS = {"GEMMA2": "gelu_pytorch_tanh", "GEMMA3": "gelu_pytorch_tanh"}
LARGEST_F16 = 65504.0
ROUNDING = {
    "Q2_K": 0.6, "Q3_K": 0.32, "Q4_0": 0.2, "Q4_K": 0.16, "IQ4_XS": 0.16, "IQ4_NL": 0.16, "Q5_0": 0.1, "Q5_1": 0.1,
    "Q5_K": 0.08, "Q6_K": 0.04,
}  # fmt: skip
"""How far a weight may be from its source, as a share of its size (root mean square): two to three times what llama.cpp loses of
normal numbers, 0.30 in Q2_K, 0.15 in Q3_K, 0.07 in Q4_K, 0.036 in Q5_K, 0.018 in Q6_K."""


def refuse_early(quant: str) -> None:
    """Raises WorkbenchError for a format that is not made here, and where the `gguf` package is missing."""
    if quant in K_QUANTS:
        llama_cpp.refuse_without_quantizer(quant)
    elif quant not in QUANTS:
        known = ", ".join((*QUANTS, *K_QUANTS))
        raise WorkbenchError(f"gguf: {visible(quant)} is no number format of a GGUF.", f"Take one of {known}.")
    if importlib.util.find_spec("gguf") is None:
        raise WorkbenchError("gguf: the package that writes GGUF files is not installed.", "Run `pip install gguf`.")


def architecture(config: Any) -> str:
    """llama.cpp's name of the architecture. Raises ModelError for one that is not written, or that it computes otherwise."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ModelError(
            f"gguf: a model of type {visible(kind)} is not written as GGUF here, only {', '.join(FAMILIES)}.",
            "Export --to safetensors and convert that folder with llama.cpp's convert_hf_to_gguf.py.",
        )
    name = FAMILIES[kind]
    for what, refused in _differs(config, name):
        if refused:
            raise ModelError(
                f"gguf: llama.cpp computes {what} otherwise than this model.",
                "Export --to safetensors, which vLLM and transformers read.",
            )
    return name


def _differs(config: Any, name: str) -> Iterator[tuple[str, bool]]:
    head, layers = _head_dim(config), config.num_hidden_layers
    yield "the activation", config.to_dict().get("hidden_act", config.to_dict().get("hidden_activation")) not in (
        ACTIVATIONS.get(name, "silu"), None
    )  # fmt: skip
    yield "sliding windows", name in ("QWEN2", "QWEN3") and bool(getattr(config, "use_sliding_window", False))
    yield "partly rotated heads", getattr(config, "partial_rotary_factor", 1.0) not in (None, 1.0)
    if name in ("GEMMA2", "GEMMA3"):
        whole = {"GEMMA2": 2, "GEMMA3": 6}[name]
        wanted = ["full_attention" if (at + 1) % whole == 0 else "sliding_attention" for at in range(layers)]
        yield "the order of sliding and full layers", list(config.layer_types) != wanted
        largest = {"GEMMA2": 46, "GEMMA3": 62}[name]
        scale = config.hidden_size / config.num_attention_heads if layers == largest else head
        yield "the scale of attention (query_pre_attn_scalar)", config.query_pre_attn_scalar != scale
    if name == "GEMMA2":
        yield "soft caps", not config.attn_logit_softcapping or not config.final_logit_softcapping
    if name == "GEMMA3":
        sliding = config.rope_parameters["sliding_attention"]
        yield "soft caps", bool(config.final_logit_softcapping or config.attn_logit_softcapping)
        yield (
            "the rotation of sliding layers",
            (sliding["rope_theta"] != 10000.0 or sliding.get("rope_type") != "default"),
        )
    yield "partly rotated heads", _rope(config).get("partial_rotary_factor", 1.0) not in (None, 1.0)
    kind = _rope(config).get("rope_type", "default")
    yield f"rotation of type {kind}", kind not in ("default", "linear", *(("llama3",) if name == "LLAMA" else ()))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    found = dict(config.rope_parameters)
    return dict(found.get("full_attention", found))


def write(model: Model, folder: Path, file: Path, quant: str, report: Report) -> parity.Parity:
    """Writes the GGUF of a model folder and compares it. Raises ModelError, and ParityError where it differs."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    name = architecture(config)
    vocab = vocabulary(folder, model.tokenizer, config.vocab_size)
    _same_ids(vocab, model.tokenizer)
    if quant in K_QUANTS:
        with tempfile.TemporaryDirectory(prefix=f"{file.name}-", dir=file.parent) as room:
            plain = Path(room) / "plain.gguf"
            stored = {each.dtype for each in model_files.stored_weights(folder).values()}
            names = _write(model, folder, plain, "BF16" if stored == {"BF16"} else "F16", config, name, vocab, report)
            report(f"llama.cpp writes {quant}", 0, 1)
            llama_cpp.quantize(plain, file, quant)
    else:
        names = _write(model, folder, file, quant, config, name, vocab, report)
    report("Opening it again", 0, 1)
    found = _read_back(model, folder, file, names, config, name, vocab)
    return _judged(found, model, folder, file, quant, report) if llama_cpp.installed() else found


def _judged(found: parity.Parity, model: Model, folder: Path, file: Path, quant: str, report: Report) -> parity.Parity:
    """The comparison with llama.cpp's own ids and logits. Raises ParityError where they are not the model's."""
    report("llama.cpp opens it", 0, 1)
    prompts = [text for text in parity.rendered(model.tokenizer) if text]
    texts = [*parity.texts(model.tokenizer), *prompts]
    try:
        ids, theirs = llama_cpp.answers(file, texts, model.inputs)
    except WorkbenchError as problem:
        raise parity.differs("llama.cpp", f"it cannot be used ({problem.message})") from problem
    for text, made in zip(texts, ids, strict=True):
        wanted = model.tokenizer(text)["input_ids"]
        if made != wanted:
            raise parity.differs(
                "llama.cpp", f"{visible(text)[:60]!r} becomes other ids ({made[:8]} instead of {wanted[:8]})"
            )
    ours = [each[0] for each in parity.open_folder(model.config, folder, model.inputs)]
    return parity.judged_by_llama_cpp(found, ours, theirs, quant, len(prompts), len(texts) - len(prompts))


def _write(
    model: Model, folder: Path, file: Path, quant: str, config: Any, name: str, vocab: Vocabulary, report: Report
) -> dict[str, str]:
    """Writes the file in a format of `QUANTS`; its name of each weight."""
    import gguf

    arch = getattr(gguf.MODEL_ARCH, name)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(model.source.run.id)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{quant}"))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _sizes(writer, config, name)
    _tokens(writer, vocab, model)
    stored = model_files.stored_weights(folder)
    names = _names(gguf.get_tensor_name_map(arch, config.num_hidden_layers), stored)
    factors = _llama3_factors(config)
    kinds = {theirs: _kind(gguf, stored[ours].shape, quant) for ours, theirs in names.items()}
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for ours, theirs in names.items():
        shape = gguf.quants.quant_shape_to_byte_shape(stored[ours].shape, kinds[theirs])
        writer.add_tensor_info(theirs, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=kinds[theirs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for done, (ours, value) in enumerate(_weights(folder, names)):
        changed = _as_llama_cpp(config, name, ours, value)
        if kinds[names[ours]].name == "F16" and float(np.abs(changed).max(initial=0)) > LARGEST_F16:
            raise ModelError(f"gguf: {visible(ours)} has numbers beyond those of F16.", "Export with --quant BF16.")
        writer.write_tensor_data(np.ascontiguousarray(gguf.quants.quantize(changed, kinds[names[ours]])).view(np.uint8))
        report("Writing the GGUF", done + 1, len(names))
    writer.close()
    return names


def _same_ids(vocab: Vocabulary, tokenizer: Any) -> None:
    for text in parity.PROBES if vocab.model == "llama" else ():
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        if joined(vocab, text) != wanted:
            raise ModelError(
                f"tokenizer.json: llama.cpp would join {visible(text)[:40]!r} to other ids.",
                "Take the model along as safetensors (--to safetensors).",
            )


def _sizes(writer: Any, config: Any, name: str) -> None:
    rope, head = _rope(config), _head_dim(config)
    window = getattr(config, "sliding_window", None)
    length = config.max_position_embeddings
    # llama.cpp has no windows for this family: within one window both attend alike.
    writer.add_context_length(min(length, window) if config.model_type == "mistral" and window else length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    if rope.get("rope_type") == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if name in ("GEMMA2", "GEMMA3", "PHI3"):
        writer.add_sliding_window(int(window or 0))
    if name == "PHI3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if name == "GEMMA2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _tokens(writer: Any, vocab: Vocabulary, model: Any) -> None:
    tokenizer, stops = model.tokenizer, list(model.stops)
    writer.add_tokenizer_model(vocab.model)
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.scores:
        writer.add_token_scores(vocab.scores)
        writer.add_add_space_prefix(vocab.space_prefix)
    if vocab.merges:
        writer.add_token_merges(vocab.merges)
    own = tokenizer.eos_token_id if tokenizer.eos_token_id in stops else stops[0] if stops else None
    others = [each for each in stops if each != own]
    if len(others) > 2:
        raise ModelError(f"gguf: a file names three stop tokens at most, and this model has {len(stops)}.")
    slots = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, number in zip(slots, [*([] if own is None else [own]), *others], strict=False):
        add(number)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id), (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):  # fmt: skip
        if number is not None:
            add(number)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    template = parity.own_template(tokenizer)[0]
    if template:
        writer.add_chat_template(template)


def _names(known: Any, stored: dict[str, Any]) -> dict[str, str]:
    """llama.cpp's name of each weight. Raises ModelError for one that has none there."""
    found = {}
    for ours in stored:
        theirs = known.get_name(ours, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ModelError(
                f"gguf: llama.cpp has no place for the weight {visible(ours)} in this architecture.",
                "Export --to safetensors, which vLLM and transformers read.",
            )
        found[ours] = theirs
    return found


def _kind(gguf: Any, shape: tuple[int, ...], quant: str) -> Any:
    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return kinds.F32
    return kinds.F16 if quant == "Q8_0" and shape[-1] % 32 else kinds[quant]


def _weights(folder: Path, names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Each weight in float32, in the order of `names`."""
    places = {name: file for file in model_files.weight_files(folder) for name in model_files.header(file)}
    for name in names:
        with safe_open(places[name], "pt") as file:
            yield name, file.get_tensor(name).to(torch.float32).numpy()


def _heads(config: Any, arch: str, name: str) -> int:
    """Heads whose rotated pairs llama.cpp has side by side, where transformers has halves; 0 for other weights."""
    if arch != "LLAMA":
        return 0
    part = name.rsplit(".", 2)[-2]
    return {"q_proj": int(config.num_attention_heads), "k_proj": int(config.num_key_value_heads)}.get(part, 0)


def _from_one(arch: str, name: str) -> bool:
    """Whether the weight is a norm that transformers counts from zero and llama.cpp from one."""
    return arch in ("GEMMA2", "GEMMA3") and name.endswith("norm.weight")


def _as_llama_cpp(config: Any, arch: str, name: str, value: Any) -> Any:
    if heads := _heads(config, arch, name):
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
    return value + np.float32(1) if _from_one(arch, name) else value


def _as_transformers(config: Any, arch: str, name: str, value: Any) -> Any:
    """Written for reading back, apart from the way there."""
    if heads := _heads(config, arch, name):
        rows = value.shape[0] // heads
        order = [head * rows + pair * 2 + half for head in range(heads) for half in (0, 1) for pair in range(rows // 2)]
        return value[order]
    return value - np.float32(1) if _from_one(arch, name) else value


def _llama3_factors(config: Any) -> Any:
    """By how much each rotation is slowed (arXiv:2407.21783), as llama.cpp reads it; None for other rotations."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    head, old = _head_dim(config), rope["original_max_position_embeddings"]
    lengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head, 2, dtype=np.float64) / head)
    share = (old / lengths - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    share = np.clip(share, 0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)


def _read_back(
    model: Model, folder: Path, file: Path, names: dict[str, str], config: Any, arch: str, vocab: Vocabulary
) -> parity.Parity:
    """Every weight against its source, then what the file says of tokens, template and stop tokens."""
    import gguf

    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if lost := set(names.values()) - tensors.keys():
        raise parity.differs("gguf", f"it lacks {sorted(lost)[0]}")
    for ours, value in _weights(folder, names):
        tensor = tensors[names[ours]]
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(value.shape)
        kind = tensor.tensor_type.name
        if not _is_rounding(kind, value, np.abs(_as_transformers(config, arch, ours, read) - value)):
            raise parity.differs("gguf", f"the weight {visible(ours)} is further from its source than rounding")

    def said(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    tokenizer = model.tokenizer
    wanted = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), len(vocab.tokens)))))
    for number, (token, found) in enumerate(zip(wanted, said("tokenizer.ggml.tokens"), strict=False)):
        if token is not None and str(token) != found and str(token).replace("\u2581", " ") != found:
            raise parity.differs("gguf", f"token {number} is {found!r} instead of {token!r}")
    if (said("tokenizer.chat_template") or None) != (parity.own_template(tokenizer)[0] or None):
        raise parity.differs("gguf", "it has another chat template")
    ends = [said(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = [each for each in ends if each is not None]
    if sorted(found) != sorted(model.stops):
        raise parity.differs("gguf", f"its stop tokens are {found} instead of {model.stops}")
    stops = [str(each) for each in tokenizer.convert_ids_to_tokens(sorted(model.stops))]
    probes = len(parity.PROBES) if vocab.model == "llama" else 0
    formats = Counter(tensors[theirs].tensor_type.name for theirs in names.values())
    return parity.Parity("gguf", 0, probes, stops, weights=len(names), formats=dict(formats))


def _is_rounding(kind: str, value: Any, error: Any) -> bool:
    """Whether a weight is no further from its source than its number format rounds."""
    if kind in ROUNDING:
        return bool(np.square(error).mean() <= ROUNDING[kind] ** 2 * np.square(value).mean() + 1e-12)
    return bool((error - _allowed(kind, value)).max(initial=0) <= 0)


def _allowed(kind: str, value: Any) -> Any:
    """How far a number may be from its source: half a step of its format."""
    size = np.abs(value)
    if kind == "Q8_0":
        blocks = size.reshape(-1, 32).max(axis=1, keepdims=True)
        step = blocks * (0.5 / 127 * 1.01 + 2.0**-11) + 2.0**-18
        return np.broadcast_to(step, (blocks.shape[0], 32)).reshape(value.shape)
    if kind == "F32":
        return (size + 1) * 2.0**-22
    return size * (2.0**-11 if kind == "F16" else 2.0**-8) + (2.0**-25 if kind == "F16" else 0)
