"""Frozen layers computed in FP8 on a card: the CPU's numbers, one plain weight at a time, in each method and in compiled layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.config.method import METHODS
from engine.features import fp8_base
from engine.features.fp8_base.layers import Fp8BaseLinear, compute_in_fp8, rounded_rows
from tests.engine.trainers.conftest import source, train  # noqa: F401
from tests.engine.trainers.test_matrix import LORA, SAMPLED, losses, receipt, settings

CARD = torch.cuda.is_available() and torch.cuda.get_device_capability() >= fp8_base.LEAST_CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CARD, reason="no CUDA device that multiplies in FP8")]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [1, 37, 256])
def test_products_on_a_card_are_those_of_the_rounded_numbers(tokens, compiled):
    torch.manual_seed(0)
    plain = torch.nn.Linear(512, 768, dtype=torch.bfloat16)
    plain.weight.data *= torch.logspace(-3, 3, 768)[:, None].bfloat16()
    numbers, scale = rounded_rows(plain.weight.data)
    ours = Fp8BaseLinear(copy.deepcopy(plain).cuda(), numbers.cuda(), scale.cuda())
    on_card, card_scale = rounded_rows(plain.weight.data.cuda())
    assert torch.equal(on_card.view(torch.uint8).cpu(), numbers.view(torch.uint8))
    assert torch.equal(card_scale.cpu(), scale)
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, 768, device="cuda", dtype=torch.bfloat16)
    out = (torch.compile(ours, fullgraph=True) if compiled else ours)(x)
    out.backward(gradient)
    rounded = [
        n.double() * s.double() for n, s in (rounded_rows(x.detach()), rounded_rows(gradient * scale.cuda().t()))
    ]
    meant = numbers.cuda().double()
    truth = rounded[0] @ (meant * scale.cuda().double()).t() + ours.bias.double()
    for mine, wanted in ((out, truth), (x.grad, rounded[1] @ meant)):
        assert (mine.double() - wanted).norm() <= 5e-3 * wanted.norm()


def test_a_model_is_brought_to_the_card_a_layer_at_a_time():
    shape = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).bfloat16()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    computed = compute_in_fp8(model, torch.device("cuda"), least=1024 * 4096)
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(8 * 3 * 1024 * 4096, rel=0.02)
    assert torch.cuda.max_memory_allocated() - before <= held + 16 * 1024 * 4096  # and that a few times, in float32
    assert {weight.device.type for weight in computed.plain.values()} == {"cpu"}
    assert {module.weight_scale_inv.device.type for module in computed.plain} == {"cuda"}


@pytest.mark.parametrize("method", METHODS)
def test_the_base_is_computed_in_fp8_in_each_method(train, source, method, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fp8_base, "LEAST_NUMBERS", 0)
    base = {**settings(source, method, "lora"), **LORA, "model.dtype": "bfloat16"}
    compiled = method == "sft"
    plain = losses(train(base))
    run = train({**base, "model.quantization": "fp8", "kernels.torch_compile": compiled})
    said = receipt(run)["quantization"]
    assert (said["effective"], said["count"]) == ("float8_e4m3fn", 28)
    assert "what the first layer adds to its first batch by" in said["detail"]
    assert all(math.isfinite(loss) for loss in losses(run))
    if method not in SAMPLED:
        assert losses(run) == pytest.approx(plain, rel=0.2, abs=0.1)  # so narrow a model feels each rounding


def test_layers_in_fp8_stream_from_the_host(train, source, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fp8_base, "LEAST_NUMBERS", 0)
    base = {**settings(source, "sft", "lora"), "model.dtype": "bfloat16", "model.quantization": "fp8"}
    resident, streamed = train(base), train({**base, "memory.layer_offloading": True})
    assert losses(streamed) == pytest.approx(losses(resident), rel=1e-3)
    assert receipt(streamed)["layer offloading"]["count"] == 4
