"""Adapters of mixtures are on the layers that are named, and PEFT opens them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoModelForCausalLM, DeepseekV3Config, PhimoeConfig

from engine.models.adapters import add_adapter
from engine.models.layer_names import _shortest, open_adapter
from engine.models.load import name_experts
from engine.planning.auto import resolved
from engine.rules import read

IDS = torch.arange(16)[None] + 3
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
OF_MLP = {"gate_proj", "up_proj", "down_proj"}


def deepseek() -> Any:
    config = DeepseekV3Config(
        **SMALL, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def adapted(model: Any, **adapter: Any) -> Any:
    mapping = {"model": {"name": "builtin/tiny", "dtype": "float32"}, "adapter": {"kind": "lora", "r": 4, **adapter}}
    found = add_adapter(model, resolved(read(mapping).config))
    for name, weight in found.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    return found.eval()


def layers(model: Any) -> set[str]:
    return {name for name, each in model.get_base_model().named_modules() if isinstance(each, LoraLayer)}


@pytest.mark.parametrize(
    "targets", ["all-linear", ["gate_proj", "up_proj", "down_proj"], r".*\.(gate|up|down)_proj", ["up_proj"]]
)
def test_layers_of_shared_experts_and_dense_blocks_have_the_adapter_and_plain_peft_opens_it(
    targets: Any, tmp_path: Path
) -> None:
    model = adapted(deepseek(), target_modules=targets, lora_dropout=0.1)
    found = layers(model)
    ends = {"up_proj"} if targets == ["up_proj"] else OF_MLP
    for block in ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts"):
        assert {name.rpartition(".")[2] for name in found if name.rpartition(".")[0] == block} == ends
    assert not [name for name in found if name.endswith(".experts")]
    assert model.get_base_model().config.model_type == "deepseek_v3"
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(deepseek(), tmp_path).eval()
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
    ours = open_adapter(deepseek(), str(tmp_path), "one")
    assert layers(ours) == found
    assert not [each for each in ours.modules() if isinstance(each, ParamWrapper)]
    torch.testing.assert_close(ours(IDS).logits, model(IDS).logits)
    beside = open_adapter(ours, str(tmp_path), "other")
    beside.set_adapter("other")
    torch.testing.assert_close(beside(IDS).logits, model(IDS).logits)


def test_peft_alone_puts_them_on_experts() -> None:
    """If this fails, PEFT takes layers for layers, and `layer_names` may go."""
    model = get_peft_model(deepseek(), LoraConfig(r=4, target_modules=sorted(OF_MLP)))
    assert layers(model) == {"model.layers.1.mlp.experts", "model.layers.1.mlp.experts.base_layer"}


def test_a_router_that_answers_with_more_than_a_product_has_no_adapter() -> None:
    config = PhimoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    model = adapted(AutoModelForCausalLM.from_config(config).eval())
    assert {name.rpartition(".")[2] for name in layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert torch.isfinite(model(IDS).logits).all()


def test_a_config_tells_how_many_experts_it_has_and_is_written_as_it_was() -> None:
    config = PhimoeConfig(**SMALL, num_local_experts=4)
    before = config.to_dict()
    assert not hasattr(config, "num_experts")
    name_experts(config)
    assert config.num_experts == 4
    assert config.to_dict() == before


def test_a_layer_of_one_block_alone_is_named_whole() -> None:
    every = [f"model.layers.{block}.mlp.{end}" for block in (0, 1) for end in ("up_proj", "down_proj")] + ["lm_head"]
    ups = [name for name in every if name.endswith("up_proj")]
    assert _shortest(ups, every) == {"mlp.up_proj"}
    assert _shortest(ups[1:], every) == {"model.layers.1.mlp.up_proj"}
    assert _shortest(["lm_head"], every) == {"lm_head"}
