"""A model's size is known from its files alone, to the parameter, and broken files never break the reading."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from engine.facts.model_shape import ELSEWHERE, OF_A_RUN, model_facts

EXPERTS: dict[str, object] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 2,
    "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
LATENT: dict[str, object] = {"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6}
GATED: dict[str, object] = {
    "num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen3_moe/stepped": {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "decoder_sparse_step": 2,
    },
    "qwen2_moe/named": {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0, 2],
    },
    "qwen3_next/named": {**GATED, "num_hidden_layers": 5, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    "deepseek_v3/unsaid": {**EXPERTS, **LATENT, "first_k_dense_replace": 3, "num_hidden_layers": 5, "q_lora_rank": 20},
    "glm4_moe/unsaid": {**EXPERTS, "first_k_dense_replace": 1, "head_dim": 24},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "deepseek_v2": {**EXPERTS, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {**EXPERTS, **LATENT, "q_lora_rank": 20, "attention_bias": True},
    "glm4_moe": {**EXPERTS, "head_dim": 24, "use_qk_norm": True, "attention_bias": True},
    "minimax_m2": {"num_local_experts": 4, "head_dim": 24},
    "qwen3_next": {**GATED, "num_hidden_layers": 5},
    "qwen3_5_moe_text": {**GATED, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "gpt2": {},
    "olmo": {},
    "olmo2": {},
    "olmoe": {"num_experts": 4},
    "granite": {},
    "smollm3": {"pad_token_id": 0},
}


def built(out: Path) -> dict[str, tuple[int, int | None, list[int]]]:
    """By the name of the folder that its config was saved into: a model's parameters, those of LoRA on all of it, and which of its
    layers have experts."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    found: dict[str, tuple[int, int | None, list[int]]] = {}
    for name, extra in FAMILIES.items():
        kind, _, variant = name.partition("/")
        for tied in (True, False):
            shape = {
                "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied, "bos_token_id": 1,
                "eos_token_id": 2, **extra,
            }  # fmt: skip
            if kind == "gpt2":
                shape = {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4}
            config = AutoConfig.for_model(kind, **shape)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            model.tie_weights()
            folder = f"{kind}{variant}-{tied}"
            config.save_pretrained(out / folder)
            if variant == "unsaid":
                written = json.loads((out / folder / "config.json").read_text())
                del written["first_k_dense_replace"]
                (out / folder / "config.json").write_text(json.dumps(written))
            count, lora = sum(p.numel() for p in model.parameters()), None
            if "experts" not in str(extra) and kind != "gpt2":
                with torch.device("meta"):
                    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
                lora = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
            mixed = [int(at.split(".")[-3]) for at, _ in model.named_modules() if at.endswith(".experts")]
            found[folder] = (count, lora, mixed)
    return found


def test_counts_are_those_of_the_built_models(tmp_path: Path) -> None:
    """Parameters of each family, tied and untied, and of LoRA on all linear layers; the layers that have experts."""
    from engine.config.facts import Facts
    from engine.facts.counts import parameters
    from engine.rules import read

    for folder, (count, lora, mixed) in built(tmp_path).items():
        name = str(tmp_path / folder)
        facts = model_facts(name)
        assert facts is not None
        assert facts.parameters == count, folder
        assert bool(facts.experts_per_token) == bool(facts.experts), folder
        assert list(facts.with_experts or ()) == mixed, folder
        if lora is not None:
            config = read({"model": {"name": name}, "adapter": {"kind": "lora", "r": 4}}).config
            counted = parameters(config, Facts(model=facts))
            assert counted is not None
            assert counted.trained == lora, folder


def test_layers_with_experts_of_a_family_that_is_not_known_are_those_of_its_files() -> None:
    from engine.facts.stored_linears import layers_with_experts
    from engine.model_files import Tensor

    names = (
        "model.layers.0.mlp.up_proj",
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.4.ffn.experts.17.w1",
    )
    ahead = ("model.layers.6.mlp.experts.0.w1", "mtp.layers.1.mlp.experts.3.up_proj")
    stored = {f"{name}.weight": Tensor("BF16", (8, 8)) for name in (*names, *ahead)}
    assert layers_with_experts(stored, 6) == (2, 4)


def test_real_weights_are_counted_by_their_headers(shared_data: Path) -> None:
    folder = shared_data / "weights" / "tinystories-llama-260k"
    facts = model_facts(str(folder))
    assert facts is not None
    assert facts.parameters is not None
    size = (folder / "model.safetensors").stat().st_size
    assert facts.parameters in (pytest.approx(size / 4, rel=0.02), pytest.approx(size / 2, rel=0.02))
    assert facts.model_type == "llama"


def write(folder: Path, name: str, content: str | bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no config.json"),
        ("{", "its config.json is not JSON"),
        ("[]", "not a JSON object"),
        (b"\xff\xfe", "its config.json is not JSON"),
        ("[" * 100_000, "its config.json nests more than 32"),
    ],
    ids=("nothing", "cut", "a list", "bytes", "deep"),
)
def test_a_folder_that_is_no_model_says_what_is_missing(
    content: str | bytes | None, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    if content is not None:
        write(folder, "config.json", content)
    facts = model_facts(str(folder))
    assert facts is not None
    assert words in facts.missing


def test_a_folder_with_an_adapter_alone_is_called_that(tmp_path: Path) -> None:
    write(tmp_path / "m", "adapter_config.json", "{}")
    facts = model_facts(str(tmp_path / "m"))
    assert facts is not None
    assert "an adapter and not the model below it" in facts.missing
    assert facts.base == ""
    write(tmp_path / "m", "adapter_config.json", '{"base_model_name_or_path": "someone/model"}')
    named = model_facts(str(tmp_path / "m"))
    assert named is not None
    assert named.base == "someone/model"


def test_a_run_in_a_models_place_is_called_that_and_its_newest_checkpoint_is_known(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-60", "checkpoint-x", ".writing-checkpoint-80"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    facts = model_facts(f"{tmp_path}/")
    assert facts is not None
    assert facts.missing == OF_A_RUN
    assert facts.checkpoint == f"{tmp_path}/checkpoints/checkpoint-60"


def test_weights_stored_in_fp8_are_known_by_their_config(tmp_path: Path) -> None:
    for method, words in (({"quant_method": "fp8"}, "fp8"), (None, ""), ("fp8", ""), ({}, "")):
        write(tmp_path / "m", "config.json", json.dumps({"model_type": "qwen3", "quantization_config": method}))
        facts = model_facts(str(tmp_path / "m"))
        assert facts is not None
        assert facts.stored == words


def test_odd_numbers_and_headers_are_unknown_rather_than_wrong(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": -4,
        "num_hidden_layers": True,
        "vocab_size": "many",
        "num_attention_heads": 1e9,
    }
    write(tmp_path / "m", "config.json", json.dumps(shape))
    for header in (b"", b"\xff" * 8, struct.pack("<Q", 5) + b"[1,2]", struct.pack("<Q", 2) + b"{}x"):
        write(tmp_path / "m", "model.safetensors", header)
        facts = model_facts(str(tmp_path / "m"))
        assert facts is not None
        assert not facts.parameters
        assert facts.hidden_size is None
        assert facts.layers is None


def test_names_without_files_are_remote_or_missing(tmp_path: Path) -> None:
    assert model_facts("") is None
    assert model_facts("some/model").remote  # type: ignore[union-attr]
    assert model_facts("./nowhere").missing  # type: ignore[union-attr]
    assert model_facts("not a name").missing  # type: ignore[union-attr]
    assert model_facts("../../etc").missing  # type: ignore[union-attr]
    known = model_facts("Qwen/Qwen3-0.6B")
    assert known is not None
    assert known.parameters == 596_049_920
    assert known.remote


def test_a_folder_where_one_stands_is_no_model_of_a_config_that_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run, which works in its own folder, would ask the hub for that name."""
    (tmp_path / "runs").mkdir()
    write(tmp_path / "runs" / "x", "config.json", "{}")
    monkeypatch.chdir(tmp_path)
    facts = model_facts("runs/x")
    assert facts is not None
    assert facts.missing == ELSEWHERE
    assert model_facts("./runs/x").folder  # type: ignore[union-attr]
    assert model_facts(str(tmp_path / "runs" / "x")).folder  # type: ignore[union-attr]


def test_a_snapshot_in_the_hub_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "a" * 40
    cache = tmp_path / "models--org--thing"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    snapshot = cache / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 7}))
    (snapshot / "tokenizer_config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    facts = model_facts("org/thing")
    assert facts is not None
    assert (facts.vocab_size, facts.remote, facts.chat_template) == (7, False, False)
    assert model_facts("org/thing", "other").remote  # type: ignore[union-attr]
    assert model_facts("org/thing", commit).vocab_size == 7  # type: ignore[union-attr]


def test_a_misspelt_built_in_name_is_not_taken_for_one_that_a_hub_has() -> None:
    assert model_facts("builtin/tinny") is None
