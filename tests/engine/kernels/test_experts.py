"""Experts in plain torch: the block that transformers computes, PEFT's factors, and what is refused."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.experts import ExpertLoRA, Gate, expert_mlp, expert_mlp_reference, launch
from engine.kernels.experts.module import experts_forward, gate_of, unserved
from engine.kernels.tuner import Limits


def block(experts=3, hidden=6, width=4, tokens=5, top_k=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (tokens, hidden), (experts, 2 * width, hidden), (experts, hidden, width)
    x, gate_up, down = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    weights, ids = torch.rand(tokens, experts, generator=generator, dtype=dtype).topk(top_k, -1)
    return x, ids, weights, gate_up, down


def test_an_experts_block_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = pytest.importorskip("transformers").Qwen3MoeConfig(hidden_size=6, moe_intermediate_size=4, num_experts=3)
    config._experts_implementation = "eager"
    x, ids, weights, gate_up, down = block()
    theirs = modeling.Qwen3MoeExperts(config).double()
    theirs.gate_up_proj.data, theirs.down_proj.data = gate_up, down
    torch.testing.assert_close(expert_mlp(x, ids, weights, gate_up, down), theirs(x, ids, weights))


def test_gpt_oss_experts_are_transposed_interleaved_and_biased():
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = pytest.importorskip("transformers").GptOssConfig(hidden_size=6, intermediate_size=4, num_local_experts=3)
    config._experts_implementation = "eager"
    x, ids, weights, gate_up, down = block()
    theirs = modeling.GptOssExperts(config).double()
    biases = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    theirs.gate_up_proj.data, theirs.down_proj.data = gate_up.transpose(1, 2) * 5, down.transpose(1, 2)
    theirs.gate_up_proj_bias.data, theirs.down_proj_bias.data = biases
    ours = expert_mlp(
        x, ids, weights, gate_up * 5, down, gate_up_bias=biases[0], down_bias=biases[1],
        gate=Gate("clamped_swiglu", interleaved=True, limit=theirs.limit, alpha=theirs.alpha),
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs(x, ids, weights))


@pytest.mark.parametrize("transposed", [False, True])
def test_factors_of_peft_give_the_weights_that_peft_folds(transposed):
    peft = pytest.importorskip("peft")
    module = torch.nn.Module()
    module.inner = torch.nn.Module()
    module.inner.is_transposed = transposed
    module.inner.weight = torch.nn.Parameter(
        torch.randn(3, 6, 8).transpose(1, 2) if not transposed else torch.randn(3, 6, 8)
    )
    module.forward = lambda x: x
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=[], target_parameters=["inner.weight"], init_lora_weights=False
    )
    wrapper = peft.get_peft_model(module, config).base_model.model.inner
    delta = wrapper.get_delta_weight("default")
    a, b, scale = ExpertLoRA.from_peft(
        wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight, 3, wrapper.scaling["default"]
    )
    ours = scale * b @ a
    torch.testing.assert_close(ours.transpose(1, 2) if transposed else ours, delta)


def test_adapters_are_those_of_merged_weights_and_ids_of_no_expert_take_part_in_nothing():
    x, ids, weights, gate_up, down = block()
    loras = [
        ExpertLoRA(torch.randn(3, 2, w.shape[2], dtype=x.dtype), torch.randn(3, w.shape[1], 2, dtype=x.dtype), 0.5)
        for w in (gate_up, down)
    ]
    merged = [w + 0.5 * lora.b @ lora.a for w, lora in zip((gate_up, down), loras, strict=True)]
    found = expert_mlp(x, ids, weights, gate_up, down, gate_up_lora=loras[0], down_lora=loras[1])
    torch.testing.assert_close(found, expert_mlp(x, ids, weights, *merged))
    some = ids.clone()
    some[0, 0], some[1, 1] = -1, 3
    left_out = weights.clone()
    left_out[0, 0] = left_out[1, 1] = 0
    torch.testing.assert_close(
        expert_mlp(x, some, weights, gate_up, down), expert_mlp_reference(x, ids, left_out, gate_up, down)
    )


def test_the_result_has_the_inputs_format_and_products_that_of_the_weights():
    x, ids, weights, gate_up, down = block(dtype=torch.float32)
    found = expert_mlp(x, ids, weights, gate_up.bfloat16(), down.bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(5, 7)}, r"must get x \[T, H\].*got \(5, 7\)"),
        ({"ids": torch.zeros(4, 2).long()}, r"got .*\(4, 2\)"),
        ({"ids": torch.zeros(5, 2)}, "ids must be int64 or int32 on cpu; got torch.float32"),
        ({"down": torch.zeros(3, 6, 5)}, r"down \[E, H, I\]"),
        ({"down": torch.zeros(3, 6, 4, dtype=torch.float16)}, "down must be torch.float64 as gate_up is; got torch.float16"),
        ({"gate_up_bias": torch.zeros(3, 4)}, r"gate_up_bias must be \(3, 8\); got \(3, 4\)"),
        ({"down_lora": ExpertLoRA(torch.zeros(3, 2, 6), torch.zeros(3, 6, 2))}, r"down_lora must be A \[3, r, 4\]"),
        ({"down_lora": ExpertLoRA(torch.zeros(3, 300, 4), torch.zeros(3, 6, 300))}, "a rank of at most 256; got 300"),
        ({"gate": Gate("relu")}, "activation must be one of silu, gelu_tanh, gelu, clamped_swiglu; got 'relu'"),
        ({"gate_up": torch.zeros(3, 8, 6).int()}, "gate_up must be float64.*got int32"),
    ],
)  # fmt: skip
def test_what_experts_do_not_serve_is_refused(change, words):
    given = dict(zip(("x", "ids", "weights", "gate_up", "down"), block(), strict=True)) | change
    positional = [given.pop(name) for name in ("x", "ids", "weights", "gate_up", "down")]
    with pytest.raises(ValueError, match=words):
        expert_mlp(*positional, **given)


FAMILIES = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {"moe_intermediate_size": 4, "num_experts": 3}, "silu"),
    "mixtral": ("MixtralConfig", "MixtralExperts", {"intermediate_size": 4, "num_local_experts": 3}, "silu"),
    "olmoe": ("OlmoeConfig", "OlmoeExperts", {"intermediate_size": 4, "num_experts": 3}, "silu"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeExperts", {"moe_intermediate_size": 4, "n_routed_experts": 3}, "silu"),
    "minimax": ("MiniMaxConfig", "MiniMaxExperts", {"intermediate_size": 4, "num_local_experts": 3}, "silu"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeExperts", {"moe_intermediate_size": 4, "num_experts": 3}, "silu"),
    "gemma4": ("Gemma4TextConfig", "Gemma4TextExperts", {"moe_intermediate_size": 4, "num_experts": 3}, "gelu_tanh"),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", {"intermediate_size": 4, "num_local_experts": 3}, "clamped_swiglu"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_a_family_are_computed_as_their_module_does(family):
    pytest.importorskip("transformers")
    config_name, name, sizes, activation = FAMILIES[family]
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    experts_class = getattr(modeling, name, None)
    if experts_class is None:
        pytest.skip(f"{name} has another name in this version")
    config = getattr(pytest.importorskip("transformers"), config_name)(hidden_size=6, **sizes)
    config._experts_implementation = "eager"
    theirs = experts_class(config).double()
    for weight in theirs.parameters():
        weight.data.normal_()
    x, ids, weights, *_ = block()
    gate = gate_of(theirs)
    assert gate is not None
    assert (gate.activation, unserved(theirs)) == (activation, None)
    torch.testing.assert_close(experts_forward(theirs, x, ids, weights, gate=gate), theirs(x, ids, weights))


def test_experts_that_are_not_served_say_why():
    class Experts(torch.nn.Module):
        has_gate, is_concatenated = True, True

        def __init__(self):
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 8, 6))
            self.down_proj = torch.nn.Parameter(torch.zeros(3, 6, 4))

        def _apply_gate(self, both):
            gate, up = both.chunk(2, -1)
            return torch.relu(gate) * up

    experts = Experts()
    assert unserved(experts) == "its activation is none of silu, gelu_tanh, gelu, clamped_swiglu"
    experts.down_proj = torch.nn.Parameter(torch.zeros(3, 12, dtype=torch.uint8), requires_grad=False)
    assert unserved(experts) == "down_proj is not one tensor of all experts"
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 8, 3, dtype=torch.uint8), requires_grad=False)
    assert unserved(experts) == "gate_up_proj is packed in uint8"
    experts.has_gate = False
    assert unserved(experts) == "its experts have no gate"


@pytest.mark.parametrize("shared_kib", [227, 163, 99, 64])
def test_a_card_gets_tiles_that_it_has_room_for(monkeypatch, shared_kib):
    monkeypatch.setattr(launch, "limits_of", lambda device: Limits(shared_bytes=shared_kib << 10))
    for tiles in (launch.UP, launch.PRODUCT):
        launch.for_card.cache_clear()
        fitting = launch.for_card(tiles, torch.device("cuda"))
        assert fitting.candidates
        assert all(tiles.cost(tile).shared_bytes <= shared_kib << 10 for tile in fitting.candidates)
        assert fitting.candidates == tiles.candidates[-len(fitting.candidates) :]
    launch.for_card.cache_clear()
    assert launch.for_card(launch.UP, torch.device("cpu")) is launch.UP
