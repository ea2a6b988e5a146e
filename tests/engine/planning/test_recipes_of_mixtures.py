"""Recipes of mixtures of experts fit the card that their title names, in the memory that it says."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import Facts
from engine.config.recipes import recipe_mapping, recipes
from engine.facts.model_shape import model_facts
from engine.hardware import parse_machine
from engine.planning.auto import resolved
from engine.planning.memory_model import FIT, device_bytes, memory
from engine.rules import read

QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248_320, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3-30b-a3b": (QWEN3, 30_532_122_624),
    "qwen3-30b-a3b-24gb": (QWEN3, 30_532_122_624),
    "qwen3.5-35b-a3b": (QWEN3_5, 34_660_610_688),
    "olmoe": (
        {
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50_304,
        },
        6_919_161_856,
    ),
    "mixtral": (
        {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14_336, "num_local_experts": 8,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000,
        },
        46_702_792_704,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "vocab_size": 201_088,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        20_914_757_184,
    ),
    "moonlight-16b-a3b": (
        {
            "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11_264, "moe_intermediate_size": 1408,
            "n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163_840,
        },
        15_960_108_544,
    ),
}  # fmt: skip
"""The published shape, and how many parameters it has."""


def test_every_recipe_of_a_mixture_is_looked_at() -> None:
    assert SHAPES.keys() == {each.name for each in recipes() if "target_parameters" in each.text}


@pytest.mark.parametrize("name", SHAPES)
def test_a_mixture_fits_the_card_of_its_recipe(name: str, tmp_path: Path) -> None:
    shape, parameters = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **shape}))
    title = next(each.title for each in recipes() if each.name == name)
    said = re.search(r"one (24|80) GB card.*about (\d+) GiB", title)
    assert said is not None
    machine = parse_machine({"80": "1xH100-80GB", "24": "1xRTX4090-24GB"}[said[1]])
    known = model_facts(str(tmp_path))
    assert known is not None
    assert known.parameters == parameters
    facts = Facts(model=replace(known, flaw=""), machine=machine)  # but for the weights, which are not here
    mapping = recipe_mapping(name)
    mapping["model"]["name"] = str(tmp_path)
    found = read(mapping, facts)
    assert [each.message for each in found.findings if each.severity == "error"] == []
    config = resolved(found.config, facts)
    need, room = memory(config, facts, "full"), device_bytes(config, facts)
    assert need is not None
    assert room is not None
    assert sum(need.values()) <= FIT * room
    assert int(said[2]) == pytest.approx(sum(need.values()) / 2**30, abs=0.75)


@pytest.mark.parametrize("name", SHAPES)
def test_speed_and_memory_that_a_recipe_says_were_measured(name: str) -> None:
    """Each pair stands in benchmarks/results.csv as a step of this shape; a recipe without one says so."""
    text = next(each.text for each in recipes() if each.name == name).partition("\nversion")[0].replace("\n# ", " ")
    works = {
        "qwen3-30b-a3b": "step_30b_a3b_lora",
        "qwen3-30b-a3b-24gb": "step_30b_a3b_lora",
        "gpt-oss-20b": "step_gptoss_20b_lora",
        **{each: f"recipe {each}" for each in ("olmoe", "mixtral", "moonlight-16b-a3b", "qwen3.5-35b-a3b")},
    }
    with Path("benchmarks/results.csv").open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["work"] == works.get(name) and row["shape"].startswith("4x2048")
        ]
    measured = {(4 * 2048 / float(row["ms"]) * 1000, float(row["peak_mib"]) / 1024) for row in rows}
    said = re.findall(r"([\d,]+) tokens/s in ([\d.]+) GiB", text)
    twice = "qwen3-30b-a3b-24gb", "olmoe", "mixtral", "moonlight-16b-a3b"
    assert len(said) == (2 if name in twice else name in works)
    assert bool(said) != ("not measured on a card" in text)
    for speed, size in said:
        near = [
            abs(each - float(speed.replace(",", ""))) < 5 and abs(room - float(size)) < 0.06 for each, room in measured
        ]
        assert any(near), (speed, size)


PLAIN = {"use_cut_ce": True, "torch_compile": False, "fused_experts": True}
MEASURED: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "8 layers": ("qwen3-30b-a3b", 8, "step_moe_8_layers", {}),
    "8 layers, nothing again": ("qwen3-30b-a3b", 8, "step_moe_8_layers", {"memory": {"gradient_checkpointing": False}}),
    "48 layers": ("qwen3-30b-a3b", 48, "step_30b_a3b_lora", {}),
    "48 layers, NF4": ("qwen3-30b-a3b-24gb", 48, "step_30b_a3b_lora", {}),
    "gpt-oss": ("gpt-oss-20b", 24, "step_gptoss_20b_lora", {}),
}
"""By a name: whose shape and settings, of how many layers, the work in results.csv and what was set otherwise."""
ARMS = {
    "8 layers": "cut, fused, lora, experts", "8 layers, nothing again": "cut, all auto",
    "48 layers": "cut, fused, lora, experts", "48 layers, NF4": "nf4, fused, lora, experts", "gpt-oss": "cut, experts, flex",
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_what_a_card_measured(name: str, tmp_path: Path) -> None:
    """Within 10 %, the driver's own share counted, which the allocator's peak in results.csv is without."""
    recipe, layers, work, otherwise = MEASURED[name]
    shape = {"tie_word_embeddings": False, **SHAPES[recipe][0], "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    known = model_facts(str(tmp_path))
    assert known is not None
    facts = Facts(model=replace(known, flaw=""), machine=parse_machine("1xH100-80GB"))
    mapping = recipe_mapping(recipe)
    mapping["model"]["name"] = str(tmp_path)
    mapping["adapter"] |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    mapping["data"] |= {"packing": True, "max_length": 2048}
    mapping["optim"] |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    mapping["memory"] = {"gradient_checkpointing": True, **otherwise.get("memory", {})}
    mapping["kernels"] = (
        PLAIN if "quantization" not in mapping["model"] else {"use_cut_ce": True, "torch_compile": False}
    )
    config = resolved(read(mapping, facts).config, facts)
    need = memory(config, facts, config.memory.gradient_checkpointing)
    assert need is not None
    with Path("benchmarks/results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["work"], row["impl"]) == (work, ARMS[name])]
    measured = [float(row["peak_mib"]) * 2**20 for row in rows if row["shape"].startswith("4x2048")]
    assert measured
    assert sum(need.values()) == pytest.approx(measured[-1], rel=0.1)


def test_a_mixture_of_30b_in_16_bits_is_shared_out_over_two_cards(tmp_path: Path) -> None:
    shape, _ = SHAPES["qwen3-30b-a3b"]
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **shape}))
    known = model_facts(str(tmp_path))
    assert known is not None
    facts = Facts(model=replace(known, flaw=""), machine=parse_machine("2xH100-80GB"))
    mapping = recipe_mapping("qwen3-30b-a3b")
    mapping["model"] |= {"name": str(tmp_path), "quantization": "none"}
    mapping["run"] = {**mapping.get("run", {}), "devices": 2}
    mapping["data"]["max_length"], mapping["optim"]["per_device_train_batch_size"] = 16_384, 2
    found = read(mapping, facts)
    assert [each.message for each in found.findings if each.severity == "error"] == []
    config = resolved(found.config, facts)
    assert config.distributed.strategy == "fsdp2"
    need = memory(config, facts, "full")
    assert need is not None
    half, layer = 30.53e9, 2 * 0.61e9  # bytes of 16 bits: a share, and a layer whose experts are put together
    # Its head is let go of before a layer takes more than it (20 of its layers, shorter rows: 17.2 GiB measured, 17.1 told).
    assert need["weights"] == pytest.approx(half + 2 * layer, rel=0.02)
