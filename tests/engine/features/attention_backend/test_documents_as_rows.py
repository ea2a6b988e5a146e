"""Packed rows kept apart where a model would forget it: layers that carry a state, and masks made without positions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelError
from engine.features.attention_backend import MASKED_HERE, NOT_APART, STATES_SERVED
from engine.features.attention_backend import apply as attention_backend
from engine.features.built import Built
from tests.engine.features.attention_backend.test_documents import config

BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATE: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
PERIODS = {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", "AfmoeConfig", {"num_dense_layers": 2}),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**STATE, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**STATE, "mamba_d_ssm": 32, "mamba_n_heads": 4}),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", {"state_size": 8}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {**STATE, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    ),
    "jamba": ("JambaForCausalLM", "JambaConfig", {**PERIODS, "num_experts": 1, "mamba_dt_rank": 4}),
    "kimi_linear": (
        "KimiLinearForCausalLM", "KimiLinearConfig",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig", {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 8}),
    "mamba2": (
        "Mamba2ForCausalLM", "Mamba2Config",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM", "NemotronHConfig",
        {
            "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
            "hybrid_override_pattern": "M*",
        },
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", LINEAR),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", LINEAR),
    "qwen3_next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {"lru_width": 32}),
    "zamba2": (
        "Zamba2ForCausalLM", "Zamba2Config",
        {
            "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 8, "hybrid_layer_ids": [1],
            "layers_block_type": ["mamba", "hybrid"],
        },
    ),
}  # fmt: skip
BEFORE, OTHER, OURS, BEHIND = [5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [21, 22, 23, 24], [31, 32, 33]


WIDER: dict[str, Any] = {
    "hidden_size": 128, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_head_dim": 32,
    "mamba_d_head": 32, "mamba_d_state": 16, "state_size": 16, "ssm_state_size": 16, "mamba_head_dim": 32, "mamba_headdim": 32,
    "mamba_d_ssm": 128, "lru_width": 128,
}  # fmt: skip
"""What the kernels of fla and mamba_ssm take at the least, for each setting that a family has."""


def made(family: str, *, wide: bool = False) -> Any:
    torch.manual_seed(0)
    name, kind, more = FAMILIES[family]
    settings = {**BASE, **more}
    if wide:
        settings |= {key: value for key, value in WIDER.items() if key in settings}
        if family == "mamba2":
            settings["head_dim"] = 32
    return getattr(transformers, name)(getattr(transformers, kind)(**settings)).train()


def batch(*packs: list[list[int]]) -> dict[str, torch.Tensor]:
    """Packs of documents of which `OURS` alone is learned."""
    from engine.data.collate import LanguageCollator

    rows = []
    for documents in packs:
        labels = [token if each is OURS else -100 for each in documents for token in each]
        ids = [token for each in documents for token in each]
        rows.append({"input_ids": ids, "labels": labels, "seq_lengths": list(map(len, documents))})
    return LanguageCollator(0)(rows)


def gradients(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_of_a_document_does_not_depend_on_its_neighbours(family: str) -> None:
    model = made(family)
    assert model.config.get_text_config().model_type == family
    packs = batch([BEFORE, OURS, BEHIND], [BEHIND, BEFORE])
    changed = batch([OTHER, OURS, BEHIND], [BEHIND, BEFORE])
    alone = gradients(model, {"input_ids": torch.tensor([OURS]), "labels": torch.tensor([OURS])})
    leaked = gradients(model, packs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    applied = attention_backend.prepare(config(), Built(model))
    assert applied is not None
    found, other = gradients(model, packs), gradients(model, changed)
    worst = max(float((found[name] - each).abs().max()) for name, each in alone.items())
    size = max(float(each.abs().max()) for each in alone.values())
    assert worst < 1e-5 * size
    assert all(torch.allclose(found[name], other[name], rtol=0, atol=1e-6 * size) for name in alone)
    applied.undo()
    model.gradient_checkpointing_disable()
    after = gradients(model, packs)
    assert all(torch.equal(after[name], each) for name, each in leaked.items())
    assert max(float((leaked[name] - each).abs().max()) for name, each in alone.items()) > 100 * worst


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", sorted(STATES_SERVED))
def test_packs_are_kept_apart_by_the_kernels_of_a_card(family: str) -> None:
    """Those of fla, causal_conv1d and mamba_ssm where they are installed, which transformers takes by itself; torch's else."""
    model = made(family, wide=True).cuda()
    packs = batch([BEFORE, OURS, BEHIND], [BEHIND, BEFORE])
    changed = batch([OTHER, OURS, BEHIND], [BEHIND, BEFORE])
    lone = {"input_ids": torch.tensor([OURS]), "labels": torch.tensor([OURS])}
    on_card = [{name: each.cuda() for name, each in given.items()} for given in (lone, packs, changed)]
    alone, leaked = gradients(model, on_card[0]), gradients(model, on_card[1])
    applied = attention_backend.prepare(config(), Built(model))
    assert applied is not None
    found, other = gradients(model, on_card[1]), gradients(model, on_card[2])
    size = max(float(each.abs().max()) for each in alone.values())
    worst, between, apart = (
        max(float((one[name] - two[name]).abs().max()) for name in alone) / size
        for one, two in ((found, alone), (found, other), (leaked, alone))
    )
    told = f"{family}: alone {worst:.1e}, other neighbours {between:.1e}, leaking {apart:.1e}"
    assert worst < 2e-2, told  # products of such kernels round to TF32
    assert between < 1e-3, told
    assert apart > 10 * between, told


def test_every_family_that_is_served_is_tried() -> None:
    assert set(FAMILIES) == STATES_SERVED | MASKED_HERE


def test_a_model_that_cannot_keep_rows_apart_is_refused_by_its_type() -> None:
    model = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            vocab_size=61,
            word_embed_proj_dim=32,
        )
    )
    with pytest.raises(ModelError, match="models of type opt do not tell the rows of a pack apart"):
        attention_backend.prepare(config(), Built(model))
    assert attention_backend.prepare(config(apart=False), Built(model)) is None
    model.config.model_type = "something_new"
    model._is_stateful = True
    with pytest.raises(ModelError, match="something_new"):
        attention_backend.prepare(config(), Built(model))


def test_no_family_of_transformers_makes_its_mask_without_positions_unknown_to_us() -> None:
    """By their sources: what is found here for the first time after an update leaks until it is listed."""
    known, models = STATES_SERVED | MASKED_HERE | NOT_APART, Path(transformers.__file__).parent / "models"
    unknown = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = kind.removesuffix("_text").replace("-", "_")
        source = models / folder / f"modeling_{folder}.py"
        if kind in known or not source.is_file():
            continue
        text = source.read_text("utf-8")
        calls = re.findall(r"create_causal_mask\(\n(.*?)\n\s*\)|mask_kwargs = \{(.*?)\}", text, re.DOTALL)
        forgets = any("position_ids" not in (call or mapping) and "mask_kwargs" not in call for call, mapping in calls)
        if "_is_stateful = True" in text or forgets:
            unknown.append(kind)
    # Their language models have types of their own, which are listed; the others write sound.
    assert set(unknown) <= {"qwen3_5", "qwen3_5_moe", "qwen4_exp", "musicgen", "musicgen_melody"}
