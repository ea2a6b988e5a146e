"""Fused norm and rotation give the class's own attention: outputs, gradients, generation, trained norms, and back."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.config.kernels import NORM_ROPE_MODELS
from engine.errors import ModelError
from engine.patches import attention
from tests.engine.patches.conftest import tiny_model


def config(value=True):
    return SimpleNamespace(kernels=SimpleNamespace(fused_attn_kernel=value))


def layers_of(model):
    return list(attention.attention_layers(SimpleNamespace(model=model)))


def moe():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, vocab_size=128, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def step(model, ids):
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def random_norms(model):
    for name, weight in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.mark.parametrize("make", [tiny_model, moe])
def test_logits_gradients_and_answers_are_those_of_the_class(make):
    model, ids = random_norms(make()), torch.randint(128, (2, 19))
    theirs, gradients = step(model, ids)
    answer = model.generate(ids[:1, :4], max_new_tokens=5, do_sample=False)
    undo = attention.fuse(layers_of(model))
    assert len(layers_of(model)) == 2
    ours, found = step(model, ids)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert torch.equal(model.generate(ids[:1, :4], max_new_tokens=5, do_sample=False), answer)
    undo()
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(step(model, ids)[0].logits, theirs.logits)


LAYERS = {
    "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextAttention", 8),
    "qwen3_vl_moe": ("Qwen3VLMoeTextConfig", "Qwen3VLMoeTextAttention", 8),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5Attention", 4),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeAttention", 4),
    "gemma3": ("Gemma3TextConfig", "Gemma3Attention", 8),
}


def layer_of(family):
    """One layer of a family in float64 with random norms, and how many numbers of a head are turned."""
    settings, kind, turned = LAYERS[family]
    place = f"transformers.models.{family}"
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "layer_types": ["full_attention"],
        "attn_implementation": "sdpa",
    }  # fmt: skip
    told = getattr(importlib.import_module(f"{place}.configuration_{family}"), settings)(**shape)
    layer = getattr(importlib.import_module(f"{place}.modeling_{family}"), kind)(told, 0)
    return random_norms(layer.double()), turned


@pytest.mark.parametrize("family", LAYERS)
def test_layers_of_other_families_keep_outputs_and_gradients(family):
    layer, turned = layer_of(family)
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    angles = torch.randn(2, 9, turned // 2, dtype=torch.float64).repeat(1, 1, 2)

    def run():
        layer.zero_grad()
        given = hidden.clone().requires_grad_()
        out, _ = layer(given, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        return [out.detach(), given.grad, *(p.grad.clone() for p in layer.parameters())]

    theirs = run()
    assert list(attention.attention_layers(SimpleNamespace(model=layer))) == [layer]
    undo = attention.fuse([layer])
    # The class rounds to float32 inside its norms, ours does not.
    for ours, plain in zip(run(), theirs, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-6)
    undo()
    assert all(torch.equal(ours, plain) for ours, plain in zip(run(), theirs, strict=True))


def test_a_norm_that_is_trained_whole_beside_an_adapter_is_the_one_in_force():
    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=["q_norm"], r=2)
    model, ids = get_peft_model(tiny_model(), adapter), torch.randint(128, (2, 9))
    for name, weight in model.named_parameters():
        if "q_norm.modules_to_save" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    theirs, gradients = step(model, ids)
    with model.disable_adapter(), torch.no_grad():
        off = model(ids).logits
    attention.fuse(layers_of(model))
    ours, found = step(model, ids)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
    assert any("q_norm.modules_to_save" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, off, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(off, theirs.logits, atol=1e-4)


def test_a_layer_that_computes_something_else_is_found_out():
    model = tiny_model()
    layer = layers_of(model)[0]
    layer.scaling *= 1.0
    plain = type(layer).forward
    layer.forward = lambda *args, **kwargs: (1.01 * plain(layer, *args, **kwargs)[0], None)
    with pytest.raises(ModelError, match="computes something else"):
        attention.fuse([layer])


def test_a_cpu_and_a_model_without_such_attention_are_refused():
    with pytest.raises(ModelError, match="needs a CUDA device"):
        attention.fused_attention(config(), SimpleNamespace(model=tiny_model()))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape))
    with pytest.raises(ModelError, match=f"no attention layer of {', '.join(NORM_ROPE_MODELS)}"):
        attention.fused_attention(config(), SimpleNamespace(model=llama))
    assert attention.fused_attention(config("auto"), SimpleNamespace(model=llama)) is None


def test_a_number_format_without_a_kernel_is_refused_with_those_that_have_one(monkeypatch):
    monkeypatch.setattr(attention, "lacking", lambda device: None)
    with pytest.raises(ModelError, match="no kernel serves float64; float32, float16 and bfloat16 are served"):
        attention.fused_attention(config(), SimpleNamespace(model=tiny_model().double()))


IN_THE_INTERPRETER = """
import json, torch
from types import SimpleNamespace
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config
from engine.patches import attention

told = Qwen3Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, attn_implementation="sdpa")
layer, hidden = Qwen3Attention(told, 0), torch.randn(1, 3, 16, requires_grad=True)
angles = torch.randn(1, 3, 8)
given = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
plain = layer(hidden, **given)[0]
on = SimpleNamespace(kernels=SimpleNamespace(fused_attn_kernel=True))
done = attention.fused_attention(on, SimpleNamespace(model=layer))
ours = layer(hidden, **given)[0]
found = [torch.autograd.grad(x.square().sum(), [hidden, *layer.parameters()]) for x in (ours, plain)]
error = max(float((a - b).abs().max()) for a, b in zip(*found))
print(json.dumps([done.entry(), float((ours - plain).abs().max()), error]))
"""


def test_the_kernel_itself_serves_a_layer_in_tritons_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    entry, error, of_gradients = json.loads(done.stdout)
    assert (entry["effective"], entry["count"]) == ("Triton", 1)
    assert error < 1e-5
    assert of_gradients < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu_a_compiled_layer_keeps_the_kernel_in_one_graph(dtype):
    ids = torch.randint(128, (2, 33), device="cuda")
    model = random_norms(tiny_model()).to("cuda", dtype)
    theirs, gradients = step(model, ids)
    attention.fuse(layers_of(model))
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    ours, found = step(model, ids)
    allowed = 1e-4 if dtype is torch.float32 else 4e-2
    assert abs(ours.loss.item() - theirs.loss.item()) < allowed
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= allowed * gradient.norm() + 1e-5, name
