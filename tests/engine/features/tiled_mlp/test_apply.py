"""Feed-forward blocks in tiles: found by name, tried before the first step, refused where a tile would answer otherwise."""

from __future__ import annotations

from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.errors import ModelError
from engine.features.built import Built
from engine.features.fp8_base.layers import compute_in_fp8, rounded_rows
from engine.features.gradient_checkpointing.tiers import use_tier
from engine.features.tiled_mlp.apply import prepare
from engine.models.load import keep_differentiable
from engine.models.stored_fp8 import Fp8Linear
from engine.rules import read
from tests.engine.features.conftest import tiny_model
from tests.engine.features.families import made

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
}  # fmt: skip


def config(tokens=16, **memory):
    reading = read(
        {
            "model": {"name": "builtin/tiny"},
            "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64},
            "memory": {"tiled_mlp": True, "tiled_mlp_tokens": tokens, **memory},
        }
    )
    assert not [finding for finding in reading.findings if finding.severity == "error"]
    return reading.config


def experts(**changes):
    torch.manual_seed(0)
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **shape, **changes))
    model.set_experts_implementation("eager")  # the only one in float64
    return model


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, n_positions=64))


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [tiny_model, experts, gpt2])
def test_a_whole_model_learns_the_same_and_is_taken_back(kind):
    model = kind().double().eval()  # no dropout: the tiles would draw other numbers than the whole
    ids = torch.arange(45).reshape(3, 15) % 128
    loss, wanted = gradients(model, ids)
    done = prepare(config(), Built(model))
    ours, found = gradients(model, ids)
    assert ours == pytest.approx(loss, rel=1e-12)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=name)
    assert (done.count, done.effective) == (2, "16 tokens a tile")
    assert "256 tokens makes 16 tiles" in done.detail  # 4 rows of 64
    done.undo()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(("changes", "spared"), [({}, True), ({"use_dora": True}, False)], ids=["lora", "dora"])
def test_the_last_product_is_left_out_where_no_gradient_needs_it(changes, spared):
    targets = ["gate_proj", "down_proj"]
    model = get_peft_model(tiny_model().double(), LoraConfig(r=4, target_modules=targets, **changes))
    torch.manual_seed(1)
    for name, weight in model.double().named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.arange(48).reshape(2, 24) % 128
    _, wanted = gradients(model, ids)
    done = prepare(config(), Built(model))
    assert ("last product is not computed again" in done.detail) is spared
    _, found = gradients(model, ids)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_gated_block_in_closed_form_draws_and_learns_the_same(monkeypatch, dropout):
    settings = {"r": 4, "target_modules": "all-linear", "lora_dropout": dropout}
    model = get_peft_model(tiny_model(layers=1), LoraConfig(**settings)).train()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    block, found = model.get_base_model().model.layers[0].mlp, []
    for closed in (True, False):
        with monkeypatch.context() as patch:
            if not closed:
                patch.setattr("engine.features.tiled_mlp.apply.gated_form", lambda block: None)
            done = prepare(config(), Built(model))
        assert ("1 with gradients in closed form" in done.detail) is closed
        torch.manual_seed(2)
        x = torch.randn(1, 32, 32, requires_grad=True)
        block.zero_grad()
        out = block(x)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None)])
        done.undo()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(found[0]) == 2 + 6


def test_adapters_of_experts_by_parameter_and_frozen_bases_learn_the_same():
    settings = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    model = get_peft_model(experts().double(), LoraConfig(**settings), autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.arange(48).reshape(2, 24) % 128
    _, wanted = gradients(model, ids)
    done = prepare(config(), Built(model))
    _, found = gradients(model, ids)
    assert any("experts" in name for name in wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=name)
    done.undo()


@pytest.mark.parametrize(
    ("named", "tier", "family"),
    [
        # Each pair of two of them by default.
        pytest.param(
            named, tier, family, id=f"{'an adapter by name' if named else 'all weights'}-{tier}-{family}",
            marks=pytest.mark.slow if (row + column + len(named)) % 2 else (),
        )
        for named in ([], ["mlp.experts.down_proj"])
        for row, tier in enumerate((None, "selective", "full"))
        for column, family in enumerate(("qwen3_moe", "mixtral", "qwen3_5_moe"))
    ],
)  # fmt: skip
def test_a_loss_that_looks_at_the_routers_hears_all_tokens(family, tier, named):
    base = made(family, output_router_logits=True, router_aux_loss_coef=10.0)
    base.set_experts_implementation("eager")
    model = base.double()
    if named:
        settings = LoraConfig(r=2, target_modules=[], target_parameters=named)
        model = get_peft_model(base, settings, autocast_adapter_dtype=False)
    ids = torch.arange(48).reshape(2, 24) % 61
    wanted, plain = gradients(model, ids)
    if tier:
        if tier != "full":
            use_tier(base, tier)
        base.gradient_checkpointing_enable({"use_reentrant": False})
    done = prepare(config(), Built(base))
    loss, found = gradients(model, ids)
    assert loss == pytest.approx(wanted, rel=1e-12)
    assert "routers are asked once more" in done.detail
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
    with torch.no_grad():
        assert model(ids, labels=ids).loss.item() == pytest.approx(wanted, rel=1e-12)
    done.undo()


def in_four_bits(model):
    bnb = pytest.importorskip("bitsandbytes")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            plain = getattr(layer.mlp, name)
            out = bnb.nn.Linear4bit(plain.in_features, plain.out_features, bias=False, quant_type="nf4")
            out.weight = bnb.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4", module=out)
            setattr(layer.mlp, name, out.to("cpu"))
    keep_differentiable(model)


def as_stored_in_fp8(model):
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            plain = getattr(layer.mlp, name)
            numbers, scale = rounded_rows(plain.weight.data)
            setattr(layer.mlp, name, Fp8Linear(plain, numbers, scale, (1, plain.in_features)))


@pytest.mark.parametrize("target", [["q_proj"], "all-linear"], ids=["attention alone", "all"])
@pytest.mark.parametrize("quantize", [in_four_bits, as_stored_in_fp8, partial(compute_in_fp8, least=0)])
def test_blocks_whose_weights_are_held_in_few_bits_learn_the_same(quantize, target):
    """None of such a block's weights may be of the model's own format."""
    base = tiny_model().bfloat16().requires_grad_(False)
    quantize(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=target), autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.arange(48).reshape(2, 24) % 128
    loss, wanted = gradients(model, ids)
    done = prepare(config(), Built(base))
    ours, found = gradients(model, ids)
    assert "2 with gradients in closed form" in done.detail or not isinstance(quantize, FunctionType)
    assert ours == pytest.approx(loss, rel=2e-3)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_what_tiles_cannot_serve_is_named():
    with pytest.raises(ModelError, match="GptOssMLP returns 2 values"):
        prepare(config(), Built(GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))))
    unknown = experts(output_router_logits=True)
    unknown._can_record_outputs = unknown.model._can_record_outputs = {}
    with pytest.raises(ModelError, match="output_router_logits"):
        prepare(config(), Built(unknown))
    opt = OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    with pytest.raises(ModelError, match="no feed-forward block was found"):
        prepare(config(), Built(OPTForCausalLM(opt)))


def test_a_block_that_looks_at_other_tokens_is_found_out():
    class Mixing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x) + x.mean(dim=(0, 1))

    model = tiny_model()
    model.model.layers[1].mlp = Mixing()
    with pytest.raises(ModelError, match="Mixing answers otherwise when it is asked tile by tile"):
        prepare(config(), Built(model))
    assert all("forward" not in vars(module) for module in model.modules())


def test_nothing_happens_where_it_was_not_asked_for():
    assert prepare(SimpleNamespace(memory=SimpleNamespace(tiled_mlp=False)), Built(tiny_model())) is None
