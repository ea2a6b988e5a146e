"""Frozen layers computed in FP8: exact products of the rounded numbers both ways, half the room, adapters that learn."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from peft import LoraConfig, get_peft_model
from torch._dynamo.backends.common import aot_autograd
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.config.facts import Facts
from engine.config.method import METHODS
from engine.errors import ModelError
from engine.facts.model_shape import model_facts
from engine.features import fp8_base as fp8
from engine.features.compile.apply import _call, checkpoint_inside
from engine.features.compile.grouped import group
from engine.features.fp8_base.layers import Fp8BaseLinear, compute_in_fp8, rounded_rows
from engine.features.load import load_model
from engine.models.stored_fp8 import dequantized
from engine.planning.estimate import estimate
from engine.rules import read
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
LINEARS = 2 * 7
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def layer_of(rows=48, columns=64, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    plain = torch.nn.Linear(columns, rows, bias=bias).to(dtype)
    plain.weight.data *= torch.logspace(-3, 3, rows)[:, None]  # rows that one scale could not serve
    return plain, Fp8BaseLinear(plain, *rounded_rows(plain.weight.data))


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(dtype).requires_grad_(False)


def apart(ours, truth):
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()


def by_hand(x):
    """Each number rounded under its row's scale, in float64, one row at a time: the scale and what the numbers mean."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for number, row in enumerate(x.double()):
        exponent = 0
        while row.abs().max() / 2.0**exponent > 448:
            exponent += 1
        while row.abs().max() > 0 and row.abs().max() / 2.0 ** (exponent - 1) <= 448:
            exponent -= 1
        out[number] = (row / 2.0**exponent).to(torch.float8_e4m3fn).double() * 2.0**exponent
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_rounded_once_under_the_least_power_of_two_that_holds_it(dtype):
    torch.manual_seed(0)
    edges = torch.tensor([448.0, 448.5, 449.0, 447.9, 3.5, 1.75, 2**-120, 1e30])
    x = torch.cat([torch.randn(24, 40) * torch.logspace(-20, 20, 24)[:, None], edges[:, None] * torch.rand(8, 40)])
    x[-8:, 0] = edges
    x = x.to(dtype)
    numbers, scale = rounded_rows(x)
    assert numbers.dtype == torch.float8_e4m3fn
    assert torch.equal(numbers.double() * scale.double(), by_hand(x))
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))


def test_rows_of_nought_and_what_is_not_finite_stay_so():
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    numbers, scale = rounded_rows(x)
    assert torch.equal(numbers[0].float(), x[0])
    assert torch.isfinite(scale[0])
    assert not torch.isfinite(numbers[1].float() * scale[1]).all()
    assert not torch.isfinite(numbers[2].float() * scale[2]).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (1, 1, 64)])
def test_forward_and_input_gradient_are_the_products_of_the_rounded_numbers(shape, bias):
    _, ours = layer_of(bias=bias)
    x = torch.randn(shape, requires_grad=True)
    gradient = torch.randn(*shape[:-1], 48)
    out = ours(x)
    out.backward(gradient)
    meant = ours.weight.double() * ours.weight_scale_inv.double()
    truth = by_hand(x.detach().flatten(0, -2)) @ meant.t() + (ours.bias.double() if bias else 0)
    assert apart(out.flatten(0, -2), truth) <= 1e-6
    scaled = by_hand(gradient.flatten(0, -2).double() * ours.weight_scale_inv.double().t())
    assert apart(x.grad.flatten(0, -2), scaled @ ours.weight.double()) <= 1e-6
    assert ours.weight.grad is None


def test_a_layer_lies_within_four_percent_of_the_plain_one_each_way():
    plain, ours = layer_of(256, 512, dtype=torch.bfloat16)
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    found = []
    for layer in (ours, plain):
        x.requires_grad_().grad = None
        out = layer(x) - layer.bias
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
        found.append((out.detach(), x.grad))
    for mine, truth in zip(*found, strict=True):
        assert 0.01 < apart(mine, truth) < 0.04


def test_what_the_backward_pass_keeps_is_the_fp8_weight_alone():
    _, ours = layer_of()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours(torch.randn(32, 64, requires_grad=True))
    assert sorted((str(tensor.dtype), tuple(tensor.shape)) for tensor in kept) == [
        ("torch.float32", (48, 1)),
        ("torch.float8_e4m3fn", (48, 64)),
    ]


def test_casts_copies_and_adapters_leave_the_numbers():
    _, ours = layer_of(dtype=torch.bfloat16)
    before = ours.weight.clone().view(torch.uint8)
    for each in (copy.deepcopy(ours).float(), copy.deepcopy(ours).to(torch.float16), ours.cpu()):
        assert torch.equal(each.weight.view(torch.uint8), before)
        assert each.weight_scale_inv.dtype == torch.float32
    adapted = get_peft_model(
        torch.nn.Sequential(ours), LoraConfig(r=2, target_modules=["0"]), autocast_adapter_dtype=False
    )
    assert {weight.dtype for name, weight in adapted.named_parameters() if "lora_" in name} == {torch.bfloat16}


def test_the_layers_take_half_the_room_and_the_rest_stays():
    model = model_of()
    plain = {name: weight.clone() for name, weight in model.named_parameters()}
    computed = compute_in_fp8(model, least=0)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Fp8BaseLinear)}
    assert len(layers) == computed.layers == LINEARS
    for name, weight in model.named_parameters():
        inside = name.removesuffix(".weight") in layers
        assert weight.element_size() == (1 if inside else 2)
        assert inside or torch.equal(weight, plain[name])
    changed = sum(
        (dequantized(m.weight, m.weight_scale_inv, m.block, torch.float32) - plain[f"{name}.weight"]).square().sum()
        for name, m in layers.items()
    )
    whole = sum(plain[f"{name}.weight"].float().square().sum() for name in layers)
    assert computed.error == pytest.approx(((changed / whole) ** 0.5).item(), rel=1e-5)
    assert 0.02 < computed.error < 0.03
    assert len(computed.plain) == 7


def test_small_odd_and_routing_layers_stay_and_are_counted():
    shape = {**SHAPE, "moe_intermediate_size": 40, "num_experts": 16, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).bfloat16()
    model.model.layers[1].self_attn.o_proj = torch.nn.Linear(64, 64 + 8, bias=False).bfloat16()
    for name in ("router", "gate"):
        setattr(model.model.layers[0], name, torch.nn.Linear(64, 64, bias=False).bfloat16())
    told = compute_in_fp8(model, least=64 * 64)
    assert (told.layers, told.left_out["router"], told.left_out["experts held together"]) == (3, 2, 4)
    assert told.left_out["of sizes that are no multiple of 16"] == 1
    assert told.left_out["of fewer than 4,096 numbers, which would gain little"] == 4  # keys and values
    assert type(model.lm_head) is torch.nn.Linear


def test_a_model_with_nothing_to_gain_and_damaged_weights_are_one_sentence():
    with pytest.raises(ModelError, match=r"no linear layers that FP8 would serve \(14 of fewer than 2,621,440 numbers"):
        compute_in_fp8(model_of())
    model = model_of()
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("inf")
    with pytest.raises(ModelError, match="the weight up_proj of layer 1 holds numbers that are not finite"):
        compute_in_fp8(model, least=0)


def config(**changes):
    lora = {"kind": "lora", "use_dora": False} | changes
    model = {
        "name": "builtin/tiny", "tokenizer": None, "revision": None, "dtype": "bfloat16", "attention": "sdpa",
        "quantization": "fp8",
    }  # fmt: skip
    return SimpleNamespace(
        model=SimpleNamespace(**model),
        adapter=SimpleNamespace(**lora),
        method=METHODS["sft"].model_construct(),
        kernels=SimpleNamespace(torch_compile=True),
    )


def test_a_machine_without_fp8_and_dora_are_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"model\.quantization: must be none without a GPU; got fp8"):
        load_model(config())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A100")
    with pytest.raises(ModelError, match=r"on A100; got fp8"):
        load_model(config())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with pytest.raises(ModelError, match=r"adapter\.use_dora: must be false while model\.quantization is fp8"):
        load_model(config(use_dora=True))


def adapted(rounded):
    model = model_of()
    if rounded:
        compute_in_fp8(model, least=0)
    torch.manual_seed(1)
    model = get_peft_model(model, LORA, autocast_adapter_dtype=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape).to(weight)
    return model.train()


def gradients(model):
    ids = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(2))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def test_adapters_on_every_layer_learn_nearly_as_beside_plain_weights():
    (loss, grads), (truth, plain) = gradients(adapted(True)), gradients(adapted(False))
    assert loss == pytest.approx(truth, rel=0.02)
    assert grads.keys() == plain.keys()
    assert len(grads) == 2 * LINEARS
    for name, gradient in plain.items():
        assert grads[name].dtype == torch.bfloat16
        assert (
            torch.nn.functional.cosine_similarity(grads[name].double().flatten(), gradient.double().flatten(), 0) > 0.97
        )


def test_under_a_checkpoint_the_gradients_are_the_same():
    model = adapted(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    (loss, grads), (truth, plain) = gradients(model), gradients(adapted(True))
    assert loss == truth
    assert all(torch.equal(grads[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_a_compiled_layer_rounds_one_input_once_for_all_that_read_it_and_keeps_no_product_under_a_checkpoint():
    model = adapted(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpoint_inside([model.get_base_model()])
    graphs = []

    def take(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        graphs[-1] += [f"kept {each.name}" for each in graph.graph.output_node().args[0] if each is not None]
        return make_boxed_func(graph.forward)

    layer = model.get_base_model().model.layers[1]
    group([layer])
    backend = aot_autograd(fw_compiler=take, bw_compiler=take, partition_fn=min_cut_rematerialization_partition)
    call = torch.compile(partial(_call, layer), backend=backend, fullgraph=True)
    hidden = torch.randn(1, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(1, 16, 16, dtype=torch.bfloat16)
    plain = layer(hidden, position_embeddings=(angles, angles))
    out = call(hidden, position_embeddings=(angles, angles))
    assert apart(out.detach(), plain.detach()) < 0.02
    out.sum().backward()
    torch._dynamo.reset()
    forward, backward = graphs
    assert forward.count("aten._scaled_mm.default") == 7
    assert forward.count("aten.amax.default") == 4  # for q, k and v; o; gate and up; down
    assert backward.count("aten._scaled_mm.default") == 7 + 6  # all but the last are computed again
    kept = [name for name in forward if name.startswith("kept ") and "primals" not in name]
    # The result, and before torch 2.15 the state of the random numbers.
    assert len(kept) == 1 + any("rng_state" in name for name in forward), forward


def in_fp8_here(monkeypatch):
    """The machine's products in place of a card's, and layers as small as those of the built-in model."""
    monkeypatch.setattr("engine.features.load.refuse_what_has_no_fp8", lambda config: None)
    monkeypatch.setattr(fp8, "LEAST_NUMBERS", 0)


@pytest.mark.slow
def test_a_run_learns_tells_its_errors_saves_adapters_alone_and_resumes_exactly(train, source, tmp_path, monkeypatch):  # noqa: F811
    in_fp8_here(monkeypatch)
    settings = {
        "model.dtype": "bfloat16", "model.quantization": "fp8", "adapter.kind": "lora", "adapter.r": 4,
        "optim.max_steps": 6, "run.save_steps": 3, "data.train": [{"path": source(CONVERSATIONS)}],
        "memory.gradient_checkpointing": "full",
    }  # fmt: skip
    run = train(settings)
    told = [e for event in lines(run, "receipt") for e in event["entries"] if e["feature"] == "quantization"]
    assert [(entry["effective"], entry["count"]) for entry in told] == [("float8_e4m3fn", 28)] * 2
    assert "rounding changed the weights by 2." in told[0]["detail"]
    measured = float(told[1]["detail"].rpartition(" by ")[2].removesuffix("%"))
    assert 1 < measured < 10
    losses = [event["loss"] for event in lines(run, "metrics") if "loss" in event]
    assert losses[-1] < losses[0]
    (weights,) = run.checkpoints.glob("checkpoint-6/adapter_model.safetensors")
    from safetensors.torch import load_file

    assert all("lora_" in name for name in load_file(weights))
    again = train(folder=resumed_from(run, 3, tmp_path / "again"))
    assert lines(again, "started", 1)[0]["resumed_from_step"] == 3
    after = [event["loss"] for event in lines(again, "metrics", 1) if "loss" in event]
    assert after == losses[3:]


def test_the_estimate_counts_the_bytes_that_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_NUMBERS", 64 * 64)
    Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    model = model_of()
    computed = compute_in_fp8(model)
    held = [*model.parameters(), *(m.weight_scale_inv for m in model.modules() if isinstance(m, Fp8BaseLinear))]
    mapping = {"model": {"name": str(tmp_path), "quantization": "fp8"}, "adapter": {"kind": "lora"}}
    guess = estimate(read(mapping).config, Facts(model=model_facts(str(tmp_path)))).memory
    assert guess["weights"] == sum(tensor.nbytes for tensor in held)
    assert computed.layers == 2 * 5
