"""What the value of one of Axolotl's keys means here, and which method a file of its asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.bridge.keys import (
    NO_DEFAULT,
    OFF,
    SAME_HERE,
    Answer,
    File,
    Key,
    Part,
    changed,
    flag,
    mapped,
    needless,
    unsupported,
)
from engine.bridge.sharding import ring_of
from engine.bridge.trainer_keys import LIGER, REPOSITORY
from engine.config.renames import TEMPLATES, is_off, sentence_for
from engine.hub import is_repository

PAIRS = ("dpo", "ipo", "simpo", "orpo", "reward")
KINDS = ("dpo", "ipo", "simpo", "orpo", "kto", "grpo", "gdpo")
_RING = "GPUs that divide rows attend in a ring of torch's own attention."
_OWN_TEMPLATE = "Axolotl's templates have names of their own: the tokenizer's own template stands here."


def method_of(file: File) -> str:
    """The method that the file asks for."""
    if file.get("rl") in KINDS:
        return str(file.get("rl"))
    if file.on("reward_model"):
        return "reward"
    if file.on("process_reward_model"):
        return "prm"
    entries = file.get("datasets", file.get("pretraining_dataset"))
    first = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], Mapping) else {}
    return (
        "pretrain"
        if file.get("pretraining_dataset") or first.get("type") in ("completion", "pretrain", "multimodal_pretrain")
        else "sft"
    )


def template(value: Any, file: File) -> Answer:
    word = str(value)
    if word in ("tokenizer_default",) or word.startswith("tokenizer_default_fallback_"):
        return needless("The tokenizer's own template is taken here too.")
    if word == "jinja":
        return needless("chat_template_jinja names it.")
    if word in TEMPLATES:
        return mapped({"model.chat_template": word})
    return changed({"model.chat_template": None}, _OWN_TEMPLATE)


def jinja(value: Any, file: File) -> Answer:
    if isinstance(value, str) and value.lower().endswith((".jinja", ".j2")):
        return mapped({"model.chat_template": file.place(value)})
    return unsupported("Write the template into a file of its own; model.chat_template takes a Jinja file.")


def adapter(value: Any, file: File) -> Answer:
    if value in ("lora", "qlora"):
        return mapped({"adapter.kind": "lora"})
    return needless(OFF) if is_off(value) else unsupported("Adapters here are LoRA.")


def four_bits(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless(OFF)
    kwargs = file.get("bnb_config_kwargs")
    kind = kwargs.get("bnb_4bit_quant_type", "nf4") if isinstance(kwargs, Mapping) else "nf4"
    return mapped({"model.quantization": kind})


def bnb(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping):
        return unsupported("model.quantization names how the base weights are held.")
    own = {"bnb_4bit_quant_type": needless("model.quantization says it, as load_in_4bit does.")}
    same_here = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    return [
        (
            str(key),
            item,
            own.get(str(key)) or (needless(SAME_HERE) if same_here.get(str(key)) == item else unsupported(QUANTIZED)),
        )
        for key, item in value.items()
    ]


def quantizer(value: Any, file: File) -> Answer:
    """gpt-oss's own format, which Axolotl widens where `dequantize` says so."""
    if is_off(value):
        return needless(OFF)
    if value != "Mxfp4Config":
        return unsupported(QUANTIZED)
    if file.get("model_quantization_config_kwargs") == {"dequantize": True}:
        return mapped({"model.quantize_moe_experts": False}, "Experts that files hold in MXFP4 are widened.")
    return needless("Files that hold experts in MXFP4 are taken as they are.")


def quantizer_kwargs(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless(OFF)
    known = file.get("model_quantization_config") == "Mxfp4Config" and value in (
        {"dequantize": True},
        {"dequantize": False},
    )
    return needless("Said with model_quantization_config.") if known else unsupported(QUANTIZED)


QUANTIZED = "model.quantization takes nf4, fp4, int8, fp8, mxfp4 or nvfp4; files that hold experts in MXFP4 are taken as they are."


def bf16(value: Any, file: File) -> Answer:
    if value in (True, "auto", "full", "true"):
        return mapped({"model.dtype": "bfloat16"})
    return needless(OFF) if is_off(value) else unsupported("model.dtype says in which numbers a run computes.")


def targets(value: Any, file: File) -> Answer:
    if file.on("lora_target_linear"):
        more = [name for name in value if name == "lm_head"] if isinstance(value, list) else []
        if not more:
            return needless("lora_target_linear names all linear layers, these among them.")
    if isinstance(value, str) and value.strip().replace("_", "").isalnum():
        return mapped({"adapter.target_modules": [value]})
    return mapped({"adapter.target_modules": value})


def packing(value: Any, file: File) -> Answer:
    if is_off(value):
        return mapped({"data.packing": False}) if value is False else needless(OFF)
    if ring_of(file) > 1:
        return changed({}, "Rows that GPUs divide are not packed: each is padded to the longest of its batch.")
    apart = file.get("pretrain_multipack_attn", True) if file.get("pretraining_dataset") else True
    return mapped({"data.packing": True, "data.packing_cross_doc_attn_mask": bool(apart)})


def eval_packing(value: Any, file: File) -> Answer:
    if value == file.get("sample_packing", False):
        return needless("Held-out rows are packed as the others are, here too.")
    return unsupported("Held-out rows are packed as data.packing says of all rows.")


def checkpointing(value: Any, file: File) -> Answer:
    if value in ("offload", "offload_disk"):
        where = "disk" if value == "offload_disk" else "cpu"
        return mapped({"memory.gradient_checkpointing": True, "memory.activation_offloading": where})
    return mapped({"memory.gradient_checkpointing": value})


def offloading(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless(OFF)
    return mapped({"memory.activation_offloading": "disk" if value == "disk" else "cpu"})


def warmup(value: Any, file: File) -> Answer:
    if file.mapping.get("warmup_steps"):
        return needless("warmup_steps says it, and counts before it.")
    if isinstance(value, (int, float)) and 0 < value <= NO_WARMUP:
        return mapped({"optim.warmup_steps": 0.0}, "So small a share is no step.")
    return mapped({"optim.warmup_steps": value}) if value else needless("A share of 0 counts as none given there.")


NO_WARMUP = 1e-9
"""A share that is no step: none at all stands for Axolotl's own 3 %."""
_OWN_WARMUP = "3 %"


def warmup_default(file: File) -> Any:
    return NO_DEFAULT if file.get("warmup_ratio") or file.mapping.get("warmup_steps") == 0 else _OWN_WARMUP


def warmup_steps(value: Any, file: File) -> Answer:
    if value == _OWN_WARMUP or (value == 0 and not file.get("warmup_ratio")):
        return changed(
            {"optim.warmup_steps": 0.03}, "Without a warm-up of the file it is 3 % of all steps there, at most 100."
        )
    return mapped({"optim.warmup_steps": value}) if value else needless("warmup_ratio says it.")


def too_long(value: Any, file: File) -> Answer:
    words = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    if method_of(file) == "pretrain":
        return changed(
            {"data.excess_length": "split"}, "Plain text that is too long is split, so that nothing of it is lost."
        )
    return mapped({"data.excess_length": words[value]}) if value in words else unsupported("")


def evals_per_epoch(value: Any, file: File) -> Answer:
    if is_off(value) or (is_off(file.get("val_set_size")) and not file.get("test_datasets")):
        return needless("No rows are held out.")
    return mapped({"run.evals_per_epoch": value})


def hub_model_id(value: Any, file: File) -> Answer:
    """It asks for uploads there, into a private repository."""
    if is_off(value):
        return needless(OFF)
    if not is_repository(str(value)):
        return unsupported(REPOSITORY)
    return mapped({"run.push_to_hub": True, "run.hub_model_id": value})


def hub_strategy(value: Any, file: File) -> Answer:
    if is_off(value) or is_off(file.get("hub_model_id")):
        return needless("It counts with hub_model_id.")
    return (
        mapped({"run.hub_strategy": value}) if is_repository(str(file.get("hub_model_id"))) else unsupported(REPOSITORY)
    )


def save_default(file: File) -> Any:
    asked = [key for key in ("save_steps", "saves_per_epoch") if file.get(key) is not None]
    return NO_DEFAULT if asked else "epoch"


def label_smoothing_of_pairs(value: Any, file: File) -> Answer:
    """A setting of DPO's alone, though other methods here have one of that name."""
    return mapped({"method.label_smoothing": value}) if method_of(file) == "dpo" else needless("It counts with rl dpo.")


def loss_types(value: Any, file: File) -> Answer:
    if isinstance(value, list) and len(value) == 1:
        return mapped({"method.loss_type": value[0]})
    return unsupported("method.loss_type takes one loss; method.rpo_alpha adds the likelihood of the chosen answer.")


def beta_default(file: File) -> Any:
    """TRL's own, which Axolotl trains with; other keys may say it."""
    has_beta = file.get("dpo_beta") is not None or file.get("orpo_alpha") is not None
    return 0.1 if not has_beta and method_of(file) in ("dpo", "ipo", "simpo", "orpo", "kto") else NO_DEFAULT


def reference(value: Any, file: File) -> Answer:
    return mapped({"method.reference": "precompute"}) if value is True else needless(OFF)


def attention(words: str) -> Key:
    return flag({"model.attention": words})


def flash_attention(value: Any, file: File) -> Answer | list[Part]:
    if not is_off(value) and ring_of(file) > 1:
        return changed({}, _RING)
    return attention("flash_attention_2").means(value, file)


def attn_implementation(value: Any, file: File) -> Answer:
    if "flash" in str(value) and ring_of(file) > 1:
        return changed({}, _RING)
    return mapped({"model.attention": value})


def lr_kwargs(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping) or not value:
        return needless(OFF)
    return [(str(key), item, mapped({"optim.lr_scheduler_kwargs": {key: item}})) for key, item in value.items()]


def optim_args(value: Any, file: File) -> Answer | list[Part]:
    if isinstance(value, Mapping):
        return [(str(key), item, mapped({"optim.optim_args": {key: item}})) for key, item in value.items()]
    return unsupported("optim.optim_args takes settings as `key: value`.")


def batch(value: Any, file: File) -> Answer:
    micro, devices = file.get("micro_batch_size"), 1
    if isinstance(value, int) and isinstance(micro, int) and micro > 0 and value % micro == 0:
        words = "It counts a whole step on one GPU; the accumulation follows from it."
        return changed({"optim.gradient_accumulation_steps": value // micro // devices}, words)
    return unsupported(sentence_for("batch_size"))


# Kernels

_PLUGINS = ("axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin")
"""Those of which keys of their own say what is asked for."""


def plugins(value: Any, file: File) -> Answer:
    """Code that Axolotl loads beside itself."""
    if isinstance(value, list) and value and all(name in _PLUGINS for name in value):
        return needless("Their own keys say what is asked for.")
    return needless(OFF) if is_off(value) else unsupported("")


def liger(file: File) -> Answer:
    """Liger's kernels in the parts that the file names, the others off as there."""
    gate = file.on("liger_glu_activation")
    parts = {"rms_norm": file.on("liger_rms_norm"), "rope": file.on("liger_rope"), "swiglu": gate, "geglu": gate}
    return mapped({"kernels.use_liger_kernel": True, "kernels.liger_kernel_config": parts}, LIGER)
