"""What an adapter's settings do to the weights that are trained, on a model and on a mixture of experts."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.config.adapter import Lora, NoAdapter
from engine.config.facts import Facts
from engine.config.method import METHODS
from engine.errors import ModelError
from engine.facts.counts import parameters
from engine.facts.model_shape import model_facts
from engine.facts.unfrozen import trained_by_name
from engine.models.adapters import add_adapter
from engine.rules import read
from tests.engine.features.conftest import tiny_model
from tests.engine.features.families import FAMILIES, SHAPE, made
from tests.engine.rules.rule_cases.model import MIXTURE
from tests.engine.trainers.conftest import CONVERSATIONS, lines, source, train  # noqa: F401  runs in this process

IDS = torch.arange(2 * 12).reshape(2, 12) % 128


def lora(model=None, dtype="float32", **settings):
    config = SimpleNamespace(
        adapter=Lora.model_construct(**{"r": 4, "lora_alpha": 8, **settings}),
        model=SimpleNamespace(dtype=dtype, train_vision="all"),
        method=METHODS["sft"].model_construct(),
    )
    return add_adapter(tiny_model() if model is None else model, config)


def moe():
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=128, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(shape)


def moved(model, steps=3):
    """Names of the weights that training moves."""
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    return {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}


def leaves(model):
    return {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (r".*\.1\.mlp\.(up|down)_proj", {"up_proj", "down_proj"}),
    ],
)
def test_targets_by_word_list_and_expression(targets, expected):
    model = lora(target_modules=targets)
    assert leaves(model) == expected
    names = moved(model)
    assert names
    assert all("lora_" in name for name in names)
    if isinstance(targets, str) and targets != "all-linear":
        assert all(".1.mlp." in name for name in names)


def test_experts_of_three_dimensions_get_an_adapter_by_their_names():
    base = moe()
    plain = base(IDS).logits
    model = lora(base, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    torch.testing.assert_close(model(IDS).logits, plain)
    names = moved(model)
    assert len(names) == 2 * 2 * 2  # layers, weights, A and B
    assert all("lora_" in name and ".experts." in name for name in names)
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS).logits, plain)
    assert not torch.allclose(model(IDS).logits, plain, atol=1e-3)


def test_dora_starts_as_the_model_and_trains_lengths():
    base = tiny_model()
    plain = base(IDS).logits
    model = lora(base, use_dora=True)
    torch.testing.assert_close(model(IDS).logits, plain, rtol=1e-4, atol=1e-5)
    lengths = {name for name, _ in model.named_parameters() if "lora_magnitude_vector" in name}
    assert len(lengths) == 14
    assert lengths <= moved(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_usual_rate_moves_the_lengths_of_dora_in_every_format(dtype):
    model = lora(tiny_model().to(getattr(torch, dtype)), dtype=dtype, use_dora=True)
    lengths = [weight for name, weight in model.named_parameters() if "lora_magnitude_vector" in name]
    before = [weight.clone() for weight in lengths]
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert len(lengths) == 14
    for weight, start in zip(lengths, before, strict=True):
        assert (weight != start).float().mean() > 0.9
    assert model(IDS).logits.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("stabilised", [False, True])
def test_rslora_scales_by_the_square_root_of_the_rank(stabilised):
    base = tiny_model()
    model = lora(base, use_rslora=stabilised, target_modules=["q_proj"], r=16, lora_alpha=32)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(3, 32)
    added = x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
    scale = 32 / math.sqrt(16) if stabilised else 32 / 16
    torch.testing.assert_close(layer(x), layer.base_layer(x) + scale * added)


def test_modules_to_save_are_trained_whole_and_the_base_stays():
    names = moved(lora(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert "base_model.model.lm_head.modules_to_save.default.weight" in names
    assert "base_model.model.lm_head.original_module.weight" not in names


@pytest.mark.parametrize(("in_float32", "expected"), [(False, torch.bfloat16), (True, torch.float32)])
def test_adapters_beside_bfloat16_are_bfloat16_unless_float32_is_asked_for(in_float32, expected):
    model = lora(tiny_model().to(torch.bfloat16), dtype="bfloat16", autocast_adapter_dtype=in_float32)
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {expected}
    assert all("lora_" in name for name in moved(model))


def test_only_weights_named_by_an_expression_are_trained():
    def frozen_but(*patterns):
        adapter = NoAdapter.model_construct(unfrozen_parameters=list(patterns))
        return add_adapter(tiny_model(), SimpleNamespace(adapter=adapter, model=SimpleNamespace(train_vision="all")))

    model = frozen_but(r"model\.layers\.1\.", "lm_head")
    asked = {n for n, _ in model.named_parameters() if n.startswith(("model.layers.1.", "lm_head"))}
    assert moved(model) == asked
    assert all(weight.grad is None for name, weight in model.named_parameters() if name not in asked)
    with pytest.raises(ModelError, match="matches no weight of the model"):
        frozen_but("lm_head", "decoder.layers")


def test_the_estimate_counts_the_weights_that_are_named():
    facts = model_facts("Qwen/Qwen3-0.6B")
    layer = trained_by_name(facts, [r"model\.layers\.27\."])
    # q and o 1024 x 2048, k and v 1024 x 1024, three of the MLP 1024 x 3072, and two norms
    assert layer == 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 2 * 1024
    assert trained_by_name(facts, [r"model\.layers\.2[0-7]\."]) == 8 * layer
    assert trained_by_name(facts, ["lm_head"]) == 0  # tied to the embeddings
    assert trained_by_name(MIXTURE.model, [r"model\.layers\.0\.mlp\.experts"]) is None


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe"])
def test_all_linear_leaves_experts_and_router_to_target_parameters_in_every_family(kind):
    base = made(kind) if kind in FAMILIES else other_experts(kind)
    adapted = {name.rsplit(".lora_", 1)[0] for name, _ in lora(base).named_parameters() if "lora_" in name}
    assert adapted
    assert not [name for name in adapted if re.search(r"mlp\.(experts|gate)\b", name)]
    # what a mixture of experts cannot have beside experts is not in the way
    assert leaves(lora(other_experts(kind) if kind not in FAMILIES else made(kind), use_dora=True, lora_dropout=0.1))


def other_experts(kind):
    """One of the families that the kernels are not named for."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    if kind == "olmoe":
        return OlmoeForCausalLM(OlmoeConfig(**{**SHAPE, **experts, "eos_token_id": 1}))
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**{**SHAPE, **experts, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24})
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"])
@pytest.mark.parametrize("names", [["mlp.experts.down_proj"], ["mlp.experts.gate_up_proj", "experts.down_proj"]])
def test_the_estimate_counts_adapters_of_experts(tmp_path, kind, names):
    base = made(kind) if kind in FAMILIES else other_experts(kind)
    base.config.save_pretrained(tmp_path)
    adapter = {"kind": "lora", "r": 4, "target_modules": ["q_proj"], "target_parameters": names}
    config = read({"model": {"name": str(tmp_path)}, "adapter": adapter}).config
    counted = parameters(config, Facts(model=model_facts(str(tmp_path))))
    model = lora(base, target_modules=["q_proj"], target_parameters=names)
    assert counted.adapter == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    shapes = sorted(tuple(weight.shape) for weight in model.parameters() if weight.requires_grad)
    assert sorted((rows, columns) for rows, columns, count in counted.matrices for _ in range(count)) == shapes


def test_a_target_that_is_not_there_is_told_beside_names_alone():
    with pytest.raises(ModelError, match="no module 'lm_haed'") as caught:
        lora(moe(), target_modules=["q_proj", "lm_haed"])
    with pytest.raises(ModelError, match="matches no module") as other:
        lora(moe(), target_modules=r".*\.nothing")
    assert not re.search(r"\b\d+\b", caught.value.hint + other.value.hint.partition(";")[0])


def test_what_peft_cannot_adapt_and_an_adapter_on_the_head_are_one_sentence():
    with pytest.raises(ModelError, match="PEFT has no such adapter for this model: Target module"):
        lora(moe(), target_modules=["input_layernorm"])
    for targets in (["q_proj", "lm_head"], r".*(q_proj|lm_head)"):
        with pytest.raises(ModelError, match="'lm_head' is the head") as caught:
            lora(target_modules=targets)
        assert "modules_to_save: [lm_head]" in caught.value.hint


def test_weights_and_modules_that_are_not_there_are_named():
    with pytest.raises(ModelError, match=r"no weight 'mlp\.experts\.up'"):
        lora(moe(), target_modules=[], target_parameters=["mlp.experts.up"])
    with pytest.raises(
        ModelError, match=r"target_parameters: .q_norm.weight. has 1 dimension, and an adapter needs 2 or 3"
    ):
        lora(moe(), target_modules=[], target_parameters=["q_norm.weight"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adapter.kind": "lora", "adapter.use_dora": True}, "28 with DoRA's lengths"),
        ({"adapter.kind": "lora", "adapter.use_rslora": True, "adapter.r": 16}, "scaled by 8"),
        ({"adapter.kind": "none", "adapter.unfrozen_parameters": [r"model\.layers\.3\."]}, "11 of 46 weights"),
    ],
)
def test_the_receipt_says_what_is_trained_and_how(train, source, settings, words):  # noqa: F811
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1})
    said = " ".join(entry["detail"] for entry in lines(run, "receipt")[0]["entries"])
    assert words in said


@pytest.mark.parametrize(
    ("settings", "message", "way_out"),
    [
        ({"modules_to_save": ["lm_haed"]}, "modules_to_save: the model has no module 'lm_haed'", "lm_head"),
        ({"bias": "all"}, "bias: all trains bias vectors, and the model has none", "Leave it out"),
        ({"bias": "lora_only"}, "bias: lora_only trains bias vectors, and the model's layers", "Leave it out"),
        (
            {"target_modules": [], "target_parameters": ["mlp.gate_proj.weight"]},
            "'mlp.gate_proj.weight' is the weight of a linear layer",
            "Name 'gate_proj' in adapter.target_modules",
        ),
    ],
)
def test_what_would_train_nothing_is_refused_by_name(settings, message, way_out):
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        lora(**{"target_modules": ["q_proj"], **settings})
    assert way_out in caught.value.hint


@pytest.mark.parametrize(("bias", "trained"), [("all", {"q_proj", "k_proj", "v_proj"}), ("lora_only", {"q_proj"})])
def test_biases_are_trained_as_asked(bias, trained):
    torch.manual_seed(0)
    shape = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    names = moved(lora(Qwen2ForCausalLM(shape), target_modules=["q_proj"], bias=bias))
    assert {
        name.removesuffix(".base_layer.bias").removesuffix(".bias").rsplit(".", 1)[-1]
        for name in names
        if "bias" in name
    } == trained
