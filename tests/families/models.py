"""Tiny model folders of each family: its config class with small sizes, random weights, its chat template.

Texts are cut by minimind's tokenizer, to which the marks that the family's template writes are added. Templates are the
models' own where TRL has them in its files; the others are written here from the marks of their family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine import seeing
from tests.families import vision

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}  # fmt: skip
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 32}
SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}


@dataclass(frozen=True)
class Family:
    """How one is built: a config class with what differs from the common sizes, or a builder of its own."""

    title: str
    config: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    template: str | dict[str, str] | None = None
    """A file of TRL, or the marks of a template that is written here; none for a model that reads texts alone."""
    bos: str | None = None
    eos: str = "<|im_end|>"
    build: Callable[[Path, Path], Path] | None = None
    method: str = "sft"
    common: dict[str, Any] = field(default_factory=lambda: SMALL)
    ends: tuple[str, ...] = ()
    """What may stand after an answer, where that is more than `eos`."""
    open_ended: bool = False
    """Whether its template writes nothing behind an answer, which ends where the next turn begins."""

    @property
    def sees(self) -> bool:
        """Whether it reads images."""
        return self.build is not None

    @property
    def talks(self) -> bool:
        """Whether it has a chat template."""
        return self.sees or self.template is not None


def turns(user: str, assistant: str, end: str, bos: str = "", after: str = "", closed: str = "") -> dict[str, str]:
    """Marks of a template: what stands before a user's and an assistant's words, and behind them."""
    return {"user": user, "assistant": assistant, "end": end, "bos": bos, "after": after, "closed": closed or end}


LLAMA3 = "<|eot_id|>"
MISTRAL = turns("[INST] ", " ", "[/INST]", "<s>", closed="</s>")
LLAMA4 = turns(
    "<|header_start|>user<|header_end|>\n\n",
    "<|header_start|>assistant<|header_end|>\n\n",
    "<|eot|>",
    "<|begin_of_text|>",
)
GLM = turns("<|user|>\n", "<|assistant|>\n", "", "[gMASK]<sop>", closed="<|user|>")
OLMO = turns("<|user|>\n", "<|assistant|>\n", "\n", "<|endoftext|>", closed="<|endoftext|>")
GRANITE = turns(
    "<|start_of_role|>user<|end_of_role|>", "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"
)
CHATML = turns("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n")
EXAONE = turns("[|user|]\n", "[|assistant|]\n", "[|endofturn|]\n")
MINIMAX = turns(
    "<beginning_of_sentence>user name=User\n", "<beginning_of_sentence>ai name=Assistant\n", "<end_of_sentence>\n"
)
FALCON = turns("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n", "<|begin_of_text|>")


def _seen(name: str) -> Callable[[Path, Path], Path]:
    return seeing.FAMILIES[name]


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 3", "Llama", {}, "llama3_2", "<|begin_of_text|>", LLAMA3),
    "llama4": Family("Llama 4 (text)", "Llama4Text", {
        **HEADS, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1,
    }, LLAMA4, "<|begin_of_text|>", "<|eot|>"),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2", {}, "qwen2_5"),
    "qwen2_moe": Family("Qwen2-MoE", "Qwen2Moe", {**EXPERTS, **SHARED}, "qwen2_5"),
    "qwen3": Family("Qwen3", "Qwen3", {**HEADS, "tie_word_embeddings": True}, "qwen3"),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3Moe", {**HEADS, **EXPERTS, "norm_topk_prob": True}, "qwen3_instruct_2507"),
    "qwen3_next": Family("Qwen3-Next", "Qwen3Next", {**HEADS, **EXPERTS, **SHARED, **LINEAR}, "qwen3_instruct_2507"),
    "qwen3_5": Family("Qwen3.5 (text)", "Qwen3_5Text", {**HEADS, **LINEAR}, "qwen3_5_think"),
    "qwen3_5_moe": Family("Qwen3.5-MoE (text)", "Qwen3_5MoeText", {**HEADS, **EXPERTS, **SHARED, **LINEAR}, "qwen3_5_think"),
    "gemma2": Family("Gemma 2", "Gemma2", {**HEADS, "sliding_window": 32, "query_pre_attn_scalar": 16}, "gemma", "<bos>", "<end_of_turn>"),
    "gemma3_text": Family("Gemma 3 (text)", "Gemma3Text", {
        **HEADS, "sliding_window": 32, "num_hidden_layers": 6, "query_pre_attn_scalar": 16,
    }, "gemma3", "<bos>", "<end_of_turn>"),
    "gemma4": Family("Gemma 4 (text)", "Gemma4Text", {
        **HEADS, **SLIDING, "global_head_dim": 32, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
    }, "gemma4", "<bos>", "<turn|>"),
    "gemma4_moe": Family("Gemma 4 mixture (text)", "Gemma4Text", {
        **HEADS, **SLIDING, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    }, "gemma4", "<bos>", "<turn|>"),
    "mistral": Family("Mistral", "Mistral", {**HEADS, "sliding_window": None}, MISTRAL, "<s>", "</s>"),
    "ministral": Family("Ministral", "Ministral", {**HEADS, **SLIDING}, MISTRAL, "<s>", "</s>"),
    "ministral3": Family("Ministral 3 (text)", "Ministral3", HEADS, MISTRAL, "<s>", "</s>"),
    "mixtral": Family("Mixtral", "Mixtral", {**HEADS, **LOCAL}, MISTRAL, "<s>", "</s>"),
    "phi": Family("Phi-1.5, Phi-2", "Phi", {}, CHATML),
    "phi3": Family("Phi-3, Phi-4", "Phi3", {}, "phi3", None, "<|end|>"),
    "phimoe": Family("Phi-3.5-MoE", "Phimoe", LOCAL, "phi3_5", None, "<|end|>"),
    "glm4": Family("GLM-4", "Glm4", HEADS, GLM, None, "<|user|>"),
    "glm4_moe": Family("GLM-4.5, 4.6, 4.7", "Glm4Moe", {**HEADS, **ROUTED, "use_qk_norm": True}, "glm4moe", None, "<|user|>", open_ended=True),
    "glm4_moe_lite": Family("GLM-4.7-Flash", "Glm4MoeLite", {**ROUTED, **LATENT}, "glm4moe", None, "<|user|>", open_ended=True),
    "deepseek_v2": Family("DeepSeek-V2", "DeepseekV2", {**ROUTED, **LATENT, "topk_method": "group_limited_greedy"}, "deepseekv3",
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_v3": Family("DeepSeek-V3, R1", "DeepseekV3", {**ROUTED, **LATENT}, "deepseekv3",
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gpt_oss": Family("gpt-oss", "GptOss", {**HEADS, **LOCAL, **SLIDING}, "gptoss", None, "<|return|>"),
    "olmo": Family("OLMo", "Olmo", {}, OLMO, None, "<|endoftext|>"),
    "olmo2": Family("OLMo 2", "Olmo2", {}, OLMO, None, "<|endoftext|>"),
    "olmo3": Family("OLMo 3", "Olmo3", SLIDING, CHATML),
    "olmoe": Family("OLMoE", "Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}, OLMO, None, "<|endoftext|>"),
    "minimax": Family("MiniMax-Text-01", "MiniMax", {
        **HEADS, **LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 32,
    }, MINIMAX, None, "<end_of_sentence>"),
    "minimax_m2": Family("MiniMax-M2", "MiniMaxM2", {**HEADS, **LOCAL, "rotary_dim": 8}, MINIMAX, None, "<end_of_sentence>"),
    "granite": Family("Granite 3", "Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.1}, GRANITE, None, "<|end_of_text|>"),
    "granitemoe": Family("Granite 3 MoE", "GraniteMoe", {**LOCAL, "attention_multiplier": 0.1}, GRANITE, None, "<|end_of_text|>"),
    "granitemoehybrid": Family("Granite 4 hybrid", "GraniteMoeHybrid", {
        **LOCAL, **MAMBA, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"], "attention_multiplier": 0.1,
        "mamba_expand": 2,
    }, GRANITE, None, "<|end_of_text|>"),
    "smollm3": Family("SmolLM3", "SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, CHATML),
    "lfm2": Family("LFM2", "Lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96}, "lfm2", "<|startoftext|>"),
    "lfm2_moe": Family("LFM2-MoE", "Lfm2Moe", {
        **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
    }, "lfm2", "<|startoftext|>"),
    "nemotron_h": Family("Nemotron-H", "NemotronH", {
        **HEADS, "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32,
    }, "nemotron_3_nano", "<s>"),
    "falcon_h1": Family("Falcon-H1", "FalconH1", {**HEADS, **MAMBA, "mamba_d_ssm": 128}, FALCON, "<|begin_of_text|>"),
    "zamba2": Family("Zamba2", "Zamba2", {
        "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_d_state": 16, "n_mamba_heads": 8,
        "mamba_ngroups": 1, "chunk_size": 32, "num_key_value_heads": 4, "adapter_rank": 8, "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
    }, CHATML, "<s>"),
    "cohere": Family("Command R", "Cohere", {}, "cohere", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": Family("Command R7B, Command A", "Cohere2", {**HEADS, **SLIDING}, "cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>",
        ends=("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",)),
    "exaone4": Family("EXAONE 4", "Exaone4", SLIDING, EXAONE, None, "[|endofturn|]"),
    "gpt2": Family("GPT-2", "GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}, None, None, "<|endoftext|>", common={}),
    "qwen2_5_vl": Family("Qwen2.5-VL", build=_seen("qwen2_5_vl")),
    "qwen3_vl": Family("Qwen3-VL", build=_seen("qwen3_vl")),
    "gemma3": Family("Gemma 3", build=_seen("gemma3")),
    "glm4v": Family("GLM-4.1V", build=_seen("glm4v")),
    "smolvlm": Family("SmolVLM", build=_seen("smolvlm")),
    "idefics3": Family("Idefics3", build=_seen("idefics3")),
    "internvl": Family("InternVL 3", build=_seen("internvl")),
    "qwen3_vl_moe": Family("Qwen3-VL-MoE", build=vision.qwen3_vl_moe),
    "qwen3_5_vl": Family("Qwen3.5 (qwen3_5)", build=vision.qwen3_5),
    "gemma4_vl": Family("Gemma 4 (gemma4)", build=vision.gemma4),
    "glm46v": Family("GLM-4.6V-Flash", build=vision.glm46v),
    "glm4v_moe": Family("GLM-4.5V, GLM-4.6V", build=vision.glm4v_moe),
    "pixtral": Family("Pixtral (llava)", build=vision.pixtral),
    "mistral3": Family("Mistral Small 3.1, Ministral 3", build=vision.mistral3),
    "lfm2_vl": Family("LFM2-VL", build=vision.lfm2_vl),
    "bert": Family("BERT", "Bert", {}, method="embedding"),
    "modernbert": Family("ModernBERT", "ModernBert", {"global_attn_every_n_layers": 2, "local_attention": 32}, method="embedding"),
}  # fmt: skip
"""The acceptance list, by the model type that a folder's config names."""


def built(name: str, tokenizer: Path, target: Path) -> Path:
    """The folder of the family."""
    family = FAMILIES[name]
    if family.build is not None:
        return family.build(tokenizer, target)
    import torch
    import transformers

    words, text = tokenizer_of(family, tokenizer)
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    sizes = {**family.common, **family.shape, **ids, "vocab_size": len(words)}
    config = getattr(transformers, f"{family.config}Config")(**sizes)
    torch.manual_seed(0)
    loader = transformers.AutoModel if family.method == "embedding" else transformers.AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32)
    if family.method != "embedding":
        model.generation_config = transformers.GenerationConfig(**ids)
    for weight in model.parameters():
        # Norms of ones and biases of zeros would hide a weight that got lost.
        if weight.ndim == 1:
            weight.data = weight.data + 0.05 * torch.randn_like(weight)
    model.save_pretrained(target)
    words.save_pretrained(target)
    if text:
        (target / "chat_template.jinja").write_text(text)
    return target


def tokenizer_of(family: Family, folder: Path) -> tuple[Any, str]:
    """Minimind's tokenizer with the family's marks, and its template."""
    from transformers import AutoTokenizer

    words, text = AutoTokenizer.from_pretrained(folder), _template(family.template)
    marks = set(
        re.findall(r"<[|｜][^<>|｜\s'{}]+[|｜]>|<[|]?[A-Za-z_]+[|]?>|\[/?INST\]|</s>|\[\|\w+\|\]|\[gMASK\]", text)
    )
    thoughts = {
        mark for mark in marks if re.fullmatch(r"</?(think|tool\w*|arg\w*|function\w*|parameter\w*|tools)>", mark)
    }
    named = {mark for mark in (family.bos, family.eos) if mark}
    new = sorted((marks - thoughts | named) - words.get_vocab().keys())
    words.add_special_tokens({"extra_special_tokens": new}, replace_extra_special_tokens=False)
    words.eos_token, words.pad_token = family.eos, "<|endoftext|>"
    words.bos_token = family.bos
    words.chat_template = text or None
    return words, text


def _template(told: str | dict[str, str] | None) -> str:
    if told is None:
        return ""
    if isinstance(told, str):
        import trl

        return (Path(trl.__file__).parent / "chat_templates" / f"{told}.jinja").read_text()
    say = {name: json.dumps(text) for name, text in told.items()}
    return (
        f"{{{{- {say['bos']} -}}}}{{%- for message in messages -%}}"
        f"{{%- if message['role'] == 'assistant' -%}}{{{{- {say['assistant']} + message['content'] + {say['closed']} -}}}}"
        f"{{%- else -%}}{{{{- {say['user']} + message['content'] + {say['end']} -}}}}{{%- endif -%}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- {say['assistant']} -}}}}{{%- endif -%}}"
    )
