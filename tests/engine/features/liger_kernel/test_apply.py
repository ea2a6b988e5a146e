"""Liger's kernels on this run's layers alone: numbers of the classes, what is left to others, refusals, and no trace.

The package wants a card. A module of its names computes in its place by plain torch and writes where Liger's writes; the
slow test has the package itself, in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from engine.config.facts import Facts
from engine.errors import ModelError
from engine.features.fused_lora import apply as fused_lora
from engine.features.fused_norm_rope import apply as fused_norm_rope
from engine.features.gradient_checkpointing.tiers import use_tier
from engine.features.liger_kernel import apply as liger
from engine.rules import read, run_rules
from tests.engine.features.conftest import built_of
from tests.engine.features.families import adapted, batches, made
from tests.engine.features.liger_kernel.interpreted import compare, difference, step
from tests.engine.rules.rule_cases.shared import H100

IDS = batches(1, 2, 12)[0]


def config(*, adapter="none", memory=(), parts=(), **kernels):
    given = {"kernels": {"use_liger_kernel": True, "liger_kernel_config": dict(parts), **kernels}}
    return read(
        {**given, "memory": {"gradient_checkpointing": False, **dict(memory)}, "adapter": {"kind": adapter}}
    ).config


def of(model):
    return built_of(SimpleNamespace(model=model))


class Norm(torch.autograd.Function):
    """As LigerRMSNormFunction, in float32; its gradient over the one that came in where `in_place` says so."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset, casting, in_place):
        ctx.save_for_backward(x, weight)
        ctx.told = eps, offset, in_place
        return F.rms_norm(x, x.shape[-1:], weight + offset, eps)

    @staticmethod
    def backward(ctx, grad):
        eps, offset, in_place = ctx.told
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            out = F.rms_norm(x, x.shape[-1:], weight + offset, eps)
        dx, dw = torch.autograd.grad(out, (x, weight), grad)
        return (grad.copy_(dx) if in_place else dx), dw, None, None, None, None


def gate_of(activation):
    class Gate(torch.autograd.Function):
        """As LigerSiLUMulFunction and LigerGELUMulFunction: gradients over what was kept."""

        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return activation(gate) * up

        @staticmethod
        def backward(ctx, grad):
            gate, up = (each.detach() for each in ctx.saved_tensors)
            leaves = [each.clone().requires_grad_() for each in (gate, up)]
            with torch.enable_grad():
                out = activation(leaves[0]) * leaves[1]
            for kept, found in zip((gate, up), torch.autograd.grad(out, leaves, grad), strict=True):
                kept.copy_(found)
            return gate, up

    return Gate


class Rope(torch.autograd.Function):
    """As LigerRopeFunction: over queries and keys [B, H, T, D] that lie token by token, and over their gradients."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(Rope.turned(x, cos, sin) for x in (q, k))

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *(Rope.turned(x, cos, -sin) for x in (dq, dk)), None, None

    @staticmethod
    def turned(x, cos, sin):
        x = x.transpose(1, 2).contiguous()
        first, second = x.chunk(2, -1)
        x.copy_(x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None])
        return x.transpose(1, 2)


@pytest.fixture
def package(monkeypatch):
    """The stand-in, installed, on a device where kernels run."""
    ops = ModuleType("liger_kernel.ops")
    ops.LigerRMSNormFunction, ops.LigerRopeFunction = Norm, Rope
    ops.LigerSiLUMulFunction, ops.LigerGELUMulFunction = (
        gate_of(F.silu),
        gate_of(lambda x: F.gelu(x, approximate="tanh")),
    )
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr(liger, "installed", lambda name: "0.8.5")
    monkeypatch.setattr(liger, "lacking", lambda device: None)
    monkeypatch.setattr(liger, "kernel_serves", lambda *tensors: True)
    return ops


TAKEN = {
    "llama": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "gemma2": {"rms_norm": 9, "rope": 2, "geglu": 2},
    "gemma3": {"rms_norm": 13, "rope": 2, "geglu": 2},
    "qwen3": {"rms_norm": 9, "rope": 2, "swiglu": 2},
    "phi3": {"rms_norm": 5},
    "cohere": {"swiglu": 2},
    "qwen3_5": {"rms_norm": 7, "swiglu": 2},
}


@pytest.mark.parametrize("family", TAKEN)
def test_logits_and_gradients_are_the_classes_and_nothing_stays(package, family):
    """Gemma's norms scale by one more than their weights, Cohere's and a gated one are no such norms, Qwen3.5 rotates a
    part of each head, Phi-3 multiplies gate and up at once; Gemma 2 has a residual stream behind a norm."""
    found = compare(family)
    assert found["taken"] == TAKEN[family]
    assert (found["logits"] < 1e-6, found["gradients"] < 3e-6, found["again"]) == (True, True, 0.0), found


def test_blocks_of_one_class_are_told_apart_by_their_activations(package):
    """A policy's and a reward model's may differ."""
    model, ids = made("qwen3"), IDS
    first, second = (layer.mlp for layer in model.model.layers[:2])
    second.act_fn = torch.nn.GELU(approximate="tanh")
    plain = model(ids).logits
    found, undo = liger.use(config(), of(model))
    assert (found.taken["swiglu"], found.taken["geglu"]) == (len(model.model.layers) - 1, 1)
    assert "forward" in vars(first)
    assert difference(model(ids).logits, plain) < 1e-5
    undo()


def test_a_gradient_written_over_the_one_that_came_in_would_be_found_out(package, monkeypatch):
    """Why norms are asked not to: what stands behind a norm of Gemma 2 adds a residual stream."""
    plain = Norm.apply
    package.LigerRMSNormFunction = SimpleNamespace(apply=lambda *given: plain(*given[:-1], True))
    assert compare("gemma2")["gradients"] > 1e-2


def test_where_a_tier_keeps_products_rotations_stay_with_the_class(package):
    """The kernel writes over them, and what is computed again would start from there."""
    given = config(memory={"gradient_checkpointing": "selective"})
    model = made("llama")
    plain = step(model, IDS)[1]
    use_tier(model, "selective")
    model.gradient_checkpointing_enable()
    found, undo = liger.use(given, of(model))
    assert found.left["rope"] == "it writes over products that memory.gradient_checkpointing selective keeps"
    assert max(difference(x, plain[name]) for name, x in step(model, IDS)[1].items()) < 3e-6
    undo()
    liger.use(config(), of(model))
    assert max(difference(x, plain[name]) for name, x in step(model, IDS)[1].items()) > 1e-2


@pytest.mark.parametrize("tier", ["full", "medium"])
def test_layers_that_are_computed_again_have_the_same_gradients(package, tier):
    model = made("qwen3")
    plain = step(model, IDS)[1]
    use_tier(model, tier) if tier != "full" else None
    model.gradient_checkpointing_enable()
    liger.use(config(memory={"gradient_checkpointing": tier}), of(model))
    assert max(difference(x, plain[name]) for name, x in step(model, IDS)[1].items()) < 3e-6


def test_adapters_learn_the_same_with_dropout_and_beside_kernels_of_our_own(package):
    model = get_peft_model(made("qwen3"), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)

    def gradients():
        torch.manual_seed(5)
        return step(model, IDS)[1]

    plain = gradients()
    ours = fused_norm_rope.fuse(fused_norm_rope.attention_layers(of(model)))
    found, undo = liger.use(config(adapter="lora", fused_attn_kernel=True, fused_lora=True), of(model))
    _, undo_lora = fused_lora.fuse(of(model).decoder_layers())
    # Norms of queries and keys are read by our kernel, blocks computed in closed form.
    assert dict(found.taken) == {"rms_norm": 5}
    assert set(found.left) == {"rope", "swiglu", "geglu"}
    undo_lora()
    undo()
    ours()
    found, undo = liger.use(config(adapter="lora"), of(model))
    assert dict(found.taken) == {"rms_norm": 9, "rope": 2, "swiglu": 2}
    assert max(difference(x, plain[name]) for name, x in gradients().items()) < 1e-5
    undo()
    assert all("forward" not in vars(module) for module in model.get_base_model().modules())


def test_answers_are_the_classes_and_mixed_precision_is_left_to_them(package):
    model = made("qwen3")
    wanted = model.generate(IDS[:1, :4], max_new_tokens=5, do_sample=False)
    calls = []
    plain = Norm.apply
    package.LigerRMSNormFunction = SimpleNamespace(apply=lambda *given: calls.append(1) or plain(*given))
    liger.use(config(), of(model))
    assert torch.equal(model.generate(IDS[:1, :4], max_new_tokens=5, do_sample=False), wanted)
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS)
    assert calls == []


def test_the_receipt_tells_parts_and_version_and_one_that_is_off_is_not_there(package):
    said = liger.apply(config(parts={"rope": False}), of(made("llama")))
    assert (said.effective, said.count) == ("rms_norm + swiglu", 7)
    assert said.detail == "5 norms, 2 gated blocks; geglu left out: no layer has it; liger-kernel 0.8.5"
    assert liger.apply(config(use_liger_kernel=False), of(made("llama"))) is None
    with pytest.raises(ModelError, match=r"it has nothing to compute \(geglu: no layer has it\)"):
        liger.apply(config(parts=dict.fromkeys(("rms_norm", "rope", "swiglu"), False)), of(made("llama")))


def test_a_layer_that_answers_otherwise_ends_the_run_and_leaves_no_trace(package):
    package.LigerSiLUMulFunction = gate_of(F.relu)
    model = made("llama")
    with pytest.raises(ModelError, match=r"swiglu of LlamaMLP is computed otherwise \(relative error") as problem:
        liger.apply(config(), of(model))
    assert "Set kernels.liger_kernel_config.swiglu to false" in problem.value.full_message
    assert all("forward" not in vars(module) for module in model.modules())


def test_without_package_or_card_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(liger, "installed", lambda name: None)
    (said,) = (
        each.message
        for each in run_rules(config(), Facts(packages={"liger-kernel": None}, machine=H100), ())
        if each.path == "kernels.use_liger_kernel"
    )
    assert said.endswith("Install it with `pip install liger-kernel`, or leave the setting out.")
    with pytest.raises(ModelError) as problem:
        liger.apply(config(), of(made("llama")))
    assert problem.value.full_message == said
    monkeypatch.setattr(liger, "installed", lambda name: "0.8.5")
    with pytest.raises(ModelError, match="the kernels need a CUDA device"):
        liger.apply(config(), of(made("llama")))


def test_closed_form_that_acts_after_it_keeps_the_rotation(package):
    """Queries, keys and values by fused LoRA inside the attention that rotates by Liger."""
    model = made("qwen3")
    adapted(model, kernels=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    _, undo = fused_lora.fuse(of(model).decoder_layers())
    alone = step(model, IDS)[1]
    undo()
    turned = []
    rope = Rope.apply
    package.LigerRopeFunction = SimpleNamespace(apply=lambda *given: turned.append(1) or rope(*given))
    liger.use(config(adapter="lora", fused_lora=True), of(model))
    found, _ = fused_lora.fuse(of(model).decoder_layers())
    turned.clear()
    assert (found.blocks, found.groups) == (2, 2)
    assert max(difference(x, alone[name]) for name, x in step(model, IDS)[1].items()) < 1e-5
    assert len(turned) == 2


@pytest.mark.slow
def test_the_package_itself_gives_the_classes_numbers_in_tritons_interpreter():
    pytest.importorskip("liger_kernel")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.features.liger_kernel.interpreted", *TAKEN],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {each["family"]: each["taken"] for each in found} == TAKEN
    for each in found:
        assert (each["logits"] < 1e-6, each["gradients"] < 3e-6, each["again"]) == (True, True, 0.0), each
