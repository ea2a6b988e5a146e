"""Adapters on weights of four and eight bits: gradients are those on the weights taken out of them, and they learn."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.features.load import load_model
from engine.models.adapters import add_adapter
from engine.planning.auto import resolved
from engine.rules import read
from tests.caches import own_cache
from tests.engine.trainers.building import apart
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, TEXTS, lines, source, train  # noqa: F401

bnb = pytest.importorskip("bitsandbytes", reason="weights of 4 and 8 bits are bitsandbytes'")
LINEARS = 4 * 7


def model(quantization: str, dtype: str = "float32") -> Any:
    mapping = {
        "model": {"name": "builtin/tiny", "dtype": dtype, "quantization": quantization},
        "adapter": {"kind": "lora", "r": 4, "target_modules": "all-linear"},
    }
    config = resolved(read(mapping).config)
    torch.manual_seed(0)
    found = add_adapter(load_model(config), config)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if "lora_B" in name:  # 0 at the start, and then nothing flows to lora_A
                weight.add_(0.1 * torch.randn_like(weight))
    return found


def taken_out(quantized: Any) -> Any:
    """The same model with plain layers that hold the numbers which the four bits stand for."""
    plain = copy.deepcopy(quantized)
    for layer in plain.modules():
        base = getattr(layer, "base_layer", None)
        if isinstance(base, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(base.weight.data, base.weight.quant_state).float()
            layer.base_layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.base_layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return plain


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(48, device=next(model.parameters()).device).view(2, 24)
    model.train().zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_adapters_beside_a_bfloat16_model_in_few_bits_are_bfloat16(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    trained = [weight for weight in model(kind, "bfloat16").parameters() if weight.requires_grad]
    assert len(trained) == 2 * LINEARS
    assert {weight.dtype for weight in trained} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_gradients_are_those_of_the_weights_taken_out_of_four_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    quantized = model(kind)
    layers = [layer for layer in quantized.modules() if isinstance(layer, bnb.nn.Linear4bit)]
    assert len(layers) == LINEARS
    assert {layer.weight.dtype for layer in layers} == {torch.uint8}
    assert all(layer.weight.quant_state.nested for layer in layers)  # statistics are quantized too
    (ours, found), (theirs, expected) = step(quantized), step(taken_out(quantized))
    assert len(found) == 2 * LINEARS
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert apart(found, expected) < 1e-5
    rounded, _ = step(model("none"))
    assert rounded != pytest.approx(theirs, rel=1e-4)  # four bits are not the weights themselves


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_the_receipt_counts_weights_and_not_the_bytes_they_are_packed_into(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.trainers.receipt import _parameters, _precision

    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    config = SimpleNamespace(adapter=None, model=SimpleNamespace(dtype="float32", train_vision="all"))
    plain, quantized = model("none"), model(kind)
    assert _parameters(config, quantized)["detail"] == _parameters(config, plain)["detail"]
    told = _precision(config, quantized)
    assert told["count"] == sum(weight.numel() for weight in plain.parameters())
    packed = sum(weight.numel() for name, weight in plain.named_parameters() if "proj.base_layer" in name)
    assert f"{packed:,} in {kind}" in told["detail"]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_looking_at_held_out_rows_changes_no_gradient(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor multiplies bfloat16 by itself, bitsandbytes would lay four bits out for it, and lose gradients."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    quantized = model(kind)
    loss, before = step(quantized)
    with torch.no_grad():
        quantized.eval()(input_ids=torch.arange(12).view(1, 12).to(quantized.device))
    again, after = step(quantized)
    assert again == pytest.approx(loss, rel=1e-6)
    assert apart(after, before) < 1e-6


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_learns_and_its_receipt_says_what_holds_the_weights(
    kind: str,
    train: Any,  # noqa: F811
    source: Any,  # noqa: F811
) -> None:
    settings = {"model.quantization": kind, "adapter.kind": "lora", "adapter.r": 4, "optim.learning_rate": 1e-2}
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 6})
    losses = [event["loss"] for event in lines(run, "metrics")]
    assert losses[-1] < 0.8 * losses[0]
    said = SimpleNamespace(**{e["feature"]: e for e in lines(run, "receipt")[0]["entries"]}).quantization
    assert (said["requested"], said["count"]) == (kind, LINEARS)
    assert said["effective"] == {"nf4": "Linear4bit", "int8": "Linear8bitLt"}[kind]


@pytest.mark.parametrize(
    "method", ["sft", "reward", *(pytest.param(each, marks=pytest.mark.slow) for each in ("dpo", "embedding"))]
)
def test_adapters_beside_quantized_weights_have_the_format_that_was_asked_for(
    method: str,
    train: Any,  # noqa: F811
    source: Any,  # noqa: F811
) -> None:
    rows = {"sft": CONVERSATIONS, "embedding": TEXTS}.get(method, PAIRS)
    base = {"method.kind": method, "model.quantization": "nf4", "model.dtype": "bfloat16", "adapter.kind": "lora"}
    base |= {"data.train": [{"path": source(rows)}], "optim.max_steps": 1}
    for wide, kind in ((False, torch.bfloat16), (True, torch.float32)):
        run = train({**base, "adapter.autocast_adapter_dtype": wide})
        saved = load_file(run.checkpoints / "checkpoint-1/adapter_model.safetensors")
        assert {weight.dtype for name, weight in saved.items() if "lora_" in name} == {kind}


def test_a_head_trained_whole_beside_int8_answers_in_the_models_format(
    train: Any,  # noqa: F811
    source: Any,  # noqa: F811
) -> None:
    settings = {"model.quantization": "int8", "adapter.kind": "lora", "adapter.modules_to_save": ["lm_head"]}
    settings |= {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1}
    settings |= {"run.prompts": ["What is 3?"], "run.max_new_tokens": 8}
    run = train(settings)
    assert [event["step"] for event in lines(run, "sample")] == [0, 1]
    saved = load_file(run.checkpoints / "checkpoint-1/adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
