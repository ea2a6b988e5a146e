"""What llama.cpp computes for each family that is written as GGUF: its sizes, where it has each weight and how it lies there.

What it computes otherwise than transformers (the order of rotated pairs, norms counted from one, scales that it takes from the
size) is changed here or refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.errors import ModelError, visible
from engine.model_files import Tensor

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig

FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]
FAMILIES = {
    "llama": "LLAMA", "mistral": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE",
    "gemma": "GEMMA", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3", "phi3": "PHI3", "olmo2": "OLMO2", "olmoe": "OLMOE",
    "granite": "GRANITE", "smollm3": "SMOLLM3", "gpt_oss": "GPT_OSS",
}  # fmt: skip
"""llama.cpp's architecture of each `model_type`."""
GEMMAS = ("GEMMA", "GEMMA2", "GEMMA3")
PAIRS_SIDE_BY_SIDE = ("LLAMA", "GRANITE", "SMOLLM3")
"""Those whose rotated pairs llama.cpp has side by side, where transformers has halves."""
WITH_BIASES = ("LLAMA", "QWEN2", "GRANITE", "GPT_OSS")
WITH_MLP_BIASES = ("LLAMA", "GRANITE")
HEAD_NEEDED = ("OLMO2", "OLMOE", "GPT_OSS")
"""Those of which llama.cpp opens no file without a head of its own, also where it is the embeddings."""
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"(?P<layer>model\.layers\.\d+\.).*\.experts\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_TOGETHER = re.compile(r"(?P<layer>model\.layers\.\d+\.mlp\.experts\.)(?P<part>gate_up_proj|down_proj)(?P<bias>_bias)?")
_OUTPUTS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""What gpt-oss's weights of all experts hold, by the outputs: gate, up, gate, up."""
CLAMP = 7.0
YARN_TURNS = (32.0, 1.0)
"""Where llama.cpp clamps gpt-oss's gates, and the rotations (`beta_fast`, `beta_slow`) between which its YaRN goes over: it reads
neither of a file."""


class Part(NamedTuple):
    """What a tensor of llama.cpp holds of a weight of the files."""

    name: str
    expert: int | None = None
    """Whose matrix it is, of a weight that has those of all experts."""
    outputs: slice = slice(None)
    """Which of the last dimension."""
    turned: bool = False
    """Whether the files have the matrix as [in, out]."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, by that of the weight of the files."""
        *others, last = whole if self.expert is None else whole[1:]
        made = (*others, len(range(last)[self.outputs]))
        return made[::-1] if self.turned else made


def architecture(config: PreTrainedConfig) -> str:
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
    if name == "GPT_OSS":
        _refuse_ramp(config)
    return name


def _refuse_ramp(config: PreTrainedConfig) -> None:
    """Raises ModelError for a YaRN whose ramp from kept to slowed rotations (arXiv:2309.00071) llama.cpp rounds to other ends."""
    rope = _rope(config)
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return
    length, base = rope["original_max_position_embeddings"], rope["rope_theta"]
    low, high = (head_dim(config) * math.log(length / (n * 2 * math.pi)) / (2 * math.log(base)) for n in YARN_TURNS)
    if max(low - math.floor(low), math.ceil(high) - high) > 1e-6:
        raise ModelError(
            f"gguf: llama.cpp rounds the ends of this model's rotation (YaRN's ramp from {low:.1f} to {high:.1f}, "
            f"`truncate: false`) to {math.floor(low)} and {math.ceil(high)}, so it would answer otherwise.",
            "Export --to safetensors, which vLLM and transformers read; llama.cpp's convert_hf_to_gguf.py makes a GGUF of that "
            "folder, with this difference.",
        )


def _differs(config: PreTrainedConfig, name: str) -> Iterator[tuple[str, bool]]:
    head, layers = head_dim(config), config.num_hidden_layers
    known = config.to_dict()
    yield "the activation", known.get("hidden_act", known.get("hidden_activation")) not in (
        "gelu_pytorch_tanh" if name in GEMMAS else "silu", None
    )  # fmt: skip
    yield "sliding windows", name.startswith(("QWEN", "SMOLLM3")) and bool(getattr(config, "use_sliding_window", False))
    yield "partly rotated heads", getattr(config, "partial_rotary_factor", 1.0) not in (None, 1.0)
    yield "biases of attention", name not in WITH_BIASES and bool(getattr(config, "attention_bias", False))
    yield "biases of the MLP", name not in WITH_MLP_BIASES and bool(getattr(config, "mlp_bias", False))
    if name in ("GEMMA2", "GEMMA3"):
        whole = {"GEMMA2": 2, "GEMMA3": 6}[name]
        wanted = ["full_attention" if (at + 1) % whole == 0 else "sliding_attention" for at in range(layers)]
        yield "the order of sliding and full layers", list(config.layer_types) != wanted
        largest = {"GEMMA2": 46, "GEMMA3": 62}[name]
        scale = config.hidden_size / config.num_attention_heads if layers == largest else head
        yield "the scale of attention (query_pre_attn_scalar)", config.query_pre_attn_scalar != scale
    if name in ("GEMMA", "GEMMA3"):
        yield "attention that looks ahead", bool(getattr(config, "use_bidirectional_attention", None))
    if name == "GEMMA2":
        yield "soft caps", not config.attn_logit_softcapping or not config.final_logit_softcapping
    if name == "GEMMA3":
        sliding = config.rope_parameters["sliding_attention"]
        yield "soft caps", bool(config.final_logit_softcapping or config.attn_logit_softcapping)
        yield (
            "the rotation of sliding layers",
            (sliding["rope_theta"] != 10000.0 or sliding.get("rope_type") != "default"),
        )
    if name == "SMOLLM3":
        rotated = [int((at + 1) % 4 != 0) for at in range(layers)]
        yield "which layers rotate (no_rope_layers)", [int(each) for each in config.no_rope_layers] != rotated
    if name == "GRANITE":
        yield "the scale of attention (attention_multiplier)", not config.attention_multiplier
    if name == "GPT_OSS":
        order = [("sliding_attention", "full_attention")[at % 2] for at in range(layers)]
        yield "the order of sliding and full layers", list(config.layer_types) != order
        yield "where gates are clamped (swiglu_limit)", getattr(config, "swiglu_limit", CLAMP) != CLAMP
        yield "attention without biases", not config.attention_bias
        rope = _rope(config)
        factors = ("attention_factor", "mscale", "mscale_all_dim")
        yield "the scale of rotated heads", any(rope.get(each) is not None for each in factors)
        turns = zip(("beta_fast", "beta_slow"), YARN_TURNS, strict=True)
        yield "YaRN (beta_fast, beta_slow)", any((rope.get(name) or known) != known for name, known in turns)
    if name == "QWEN3MOE":
        dense = bool(config.mlp_only_layers) or config.decoder_sparse_step != 1
        yield "layers without experts", dense
    if name in ("QWEN3MOE", "OLMOE"):
        yield "the shares of experts (norm_topk_prob)", bool(config.norm_topk_prob) != (name == "QWEN3MOE")
    if name in ("OLMO2", "OLMOE", "PHI3"):
        yield "heads of this size (head_dim)", head * config.num_attention_heads != config.hidden_size
    if name == "OLMOE":
        yield "keys of fewer heads", config.num_key_value_heads != config.num_attention_heads
    yield "queries and keys that are clipped", getattr(config, "clip_qkv", None) is not None
    yield "partly rotated heads", _rope(config).get("partial_rotary_factor", 1.0) not in (None, 1.0)
    kind = _rope(config).get("rope_type", "default")
    more = {"LLAMA": "llama3", "GPT_OSS": "yarn"}.get(name)
    yield f"rotation of type {kind}", kind not in ("default", "linear", more)


def head_dim(config: PreTrainedConfig) -> int:
    """The size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    found = dict(config.rope_parameters)
    return dict(found.get("full_attention", found))


def experts(config: PreTrainedConfig) -> int:
    """How many experts a layer has, 0 where it is none."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def write_sizes(writer: GGUFWriter, config: PreTrainedConfig, name: str) -> None:
    """What llama.cpp asks of the model's shape."""
    rope, head = _rope(config), head_dim(config)
    window = getattr(config, "sliding_window", None)
    length = config.max_position_embeddings
    # llama.cpp has no windows for this family: within one window both attend alike.
    within = config.model_type in ("mistral", "mixtral") and window
    writer.add_context_length(min(length, window) if within else length)
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
    if rope.get("rope_type") == "yarn":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts(config):
        writer.add_expert_count(experts(config))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if name == "QWEN3MOE":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "GPT_OSS":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if name in ("GEMMA2", "GEMMA3", "PHI3", "GPT_OSS"):
        writer.add_sliding_window(int(window or 0))
    if name == "PHI3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if name == "GEMMA2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "GRANITE":
        writer.add_attention_scale(float(config.attention_multiplier))
        writer.add_embedding_scale(float(config.embedding_multiplier))
        writer.add_residual_scale(float(config.residual_multiplier))
        writer.add_logit_scale(float(config.logits_scaling))


def tensors(config: PreTrainedConfig, arch: str, stored: dict[str, Tensor]) -> dict[str, list[Part]]:
    """llama.cpp's tensors, each with what it holds of the weights of the files: one, or those of all experts in their order.

    Raises ModelError for a weight that has no place there.
    """
    import gguf

    known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), config.num_hidden_layers)
    found: dict[str, list[Part]] = {}
    apart: dict[str, dict[int, str]] = {}
    for ours in stored:
        if arch == "GPT_OSS" and (together := _TOGETHER.fullmatch(ours)):
            for part, outputs in _OUTPUTS[together["part"]].items():
                theirs = known.get_name(f"{together['layer']}{part}")
                if together["bias"]:
                    found[f"{theirs}.bias"] = [Part(ours, outputs=outputs)]
                else:
                    every = range(stored[ours].shape[0])
                    found[f"{theirs}.weight"] = [Part(ours, number, outputs, turned=True) for number in every]
            continue
        expert = _EXPERT.fullmatch(ours) if experts(config) else None
        if expert is None:
            name = f"{ours}.weight" if ours.endswith(".sinks") else ours
        else:
            part = expert["part"]
            name = f"{expert['layer']}mlp.experts.{_PARTS.get(part, part)}.weight"
        theirs = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None or (expert is None and (len(stored[ours].shape) > 2 or theirs in found)):
            raise ModelError(
                f"gguf: llama.cpp has no place for the weight {visible(ours)} in this architecture.",
                "Export --to safetensors, which vLLM and transformers read.",
            )
        if expert is None:
            found[theirs] = [Part(ours)]
        else:
            apart.setdefault(theirs, {})[int(expert["number"])] = ours
    for theirs, each in apart.items():
        if sorted(each) != list(range(experts(config))):
            raise ModelError(
                f"gguf: the model's files have {len(each)} of {experts(config)} experts for {visible(theirs)}."
            )
        found[theirs] = [Part(each[number]) for number in range(experts(config))]
    if arch in HEAD_NEEDED and HEAD not in stored:
        found["output.weight"] = [Part(EMBEDDINGS)]
    return found


def is_stack(tensor: str) -> bool:
    """Whether the tensor holds the weights of all experts, the expert first."""
    return tensor.endswith("_exps.weight")


def stays_float32(tensor: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp has the tensor in float32 in every format: norms, biases, and the router, which decides by little."""
    return len(shape) == 1 or not tensor.endswith(".weight") or tensor.endswith("ffn_gate_inp.weight")


def _heads(config: PreTrainedConfig, arch: str, name: str) -> int:
    """Heads of a weight whose rotated pairs are to be laid side by side; 0 for other weights."""
    if arch not in PAIRS_SIDE_BY_SIDE:
        return 0
    part = name.rsplit(".", 2)[-2]
    return {"q_proj": int(config.num_attention_heads), "k_proj": int(config.num_key_value_heads)}.get(part, 0)


def _from_one(arch: str, name: str) -> bool:
    """Whether the weight is a norm that transformers counts from zero and llama.cpp from one."""
    return arch in GEMMAS and name.endswith("norm.weight")


def as_llama_cpp(config: PreTrainedConfig, arch: str, name: str, value: FloatArray) -> FloatArray:
    """The numbers of a weight of the files as llama.cpp has them."""
    if heads := _heads(config, arch, name):
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
    return value + np.float32(1) if _from_one(arch, name) else value


def as_transformers(config: PreTrainedConfig, arch: str, name: str, value: FloatArray) -> FloatArray:
    """Written for reading back, apart from the way there."""
    if heads := _heads(config, arch, name):
        rows = value.shape[0] // heads
        order = [head * rows + pair * 2 + half for head in range(heads) for half in (0, 1) for pair in range(rows // 2)]
        return value[order]
    return value - np.float32(1) if _from_one(arch, name) else value


def llama3_factors(config: PreTrainedConfig) -> FloatArray | None:
    """By how much each rotation is slowed (arXiv:2407.21783), as llama.cpp reads it; None for other rotations."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    head, old = head_dim(config), rope["original_max_position_embeddings"]
    lengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head, 2, dtype=np.float64) / head)
    share = (old / lengths - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    share = np.clip(share, 0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)
