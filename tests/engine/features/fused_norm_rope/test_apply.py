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
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.config.kernels import NORM_ROPE_MODELS, ROPE_MODELS
from engine.errors import ModelError
from engine.features.fused_norm_rope import apply as fused_norm_rope
from engine.kernels.rope import rope
from tests.engine.features.conftest import built_of, tiny_model


def config(value=True):
    return SimpleNamespace(kernels=SimpleNamespace(fused_attn_kernel=value))


def layers_of(model):
    return fused_norm_rope.attention_layers(built_of(SimpleNamespace(model=model)))


def moe():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, vocab_size=128, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=128,
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


@pytest.mark.parametrize("make", [tiny_model, moe, llama])
def test_logits_gradients_and_answers_are_those_of_the_class(make):
    model, ids = random_norms(make()), torch.randint(128, (2, 19))
    theirs, gradients = step(model, ids)
    answer = model.generate(ids[:1, :4], max_new_tokens=5, do_sample=False)
    undo = fused_norm_rope.fuse(layers_of(model))
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
    "qwen2_vl": ("Qwen2VLTextConfig", "Qwen2VLAttention", 8),
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", "Qwen2_5_VLAttention", 8),
    "qwen2": ("Qwen2Config", "Qwen2Attention", 8),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeAttention", 8),
    "llama": ("LlamaConfig", "LlamaAttention", 8),
    "mistral": ("MistralConfig", "MistralAttention", 8),
    "mixtral": ("MixtralConfig", "MixtralAttention", 8),
    "gemma": ("GemmaConfig", "GemmaAttention", 8),
    "gemma2": ("Gemma2Config", "Gemma2Attention", 8),
    "granite": ("GraniteConfig", "GraniteAttention", 8),
}


SLIDING = ("gemma2", "gemma3", "qwen2")


def layer_of(family):
    """One layer of a family in float64 with random norms, and how many numbers of a head are turned."""
    settings, kind, turned = LAYERS[family]
    place = f"transformers.models.{family}"
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "sliding_window": 3,
        "layer_types": ["sliding_attention" if family in SLIDING else "full_attention"],
        "attn_implementation": "eager" if family == "gemma2" else "sdpa",
    }  # fmt: skip
    told = getattr(importlib.import_module(f"{place}.configuration_{family}"), settings)(**shape)
    layer = getattr(importlib.import_module(f"{place}.modeling_{family}"), kind)(told, 0)
    return random_norms(layer.double()), turned


def test_model_types_that_are_named_to_people_are_those_that_have_a_forward():
    for kinds, normed in ((NORM_ROPE_MODELS, True), (ROPE_MODELS, False)):
        modules = {fused_norm_rope._module(kind) for kind in kinds}
        assert modules == {module for module, family in fused_norm_rope.CLASSES.items() if family.normed is normed}


def told(layer, turned):
    """What the function of attention is told beside queries, keys and values: how far to see, how to score."""
    given = {}

    def attend(module, q, k, v, mask, **more):
        given.update(more)
        return q.transpose(1, 2), None

    kind, layer.config._attn_implementation = layer.config._attn_implementation, "told"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "told", attend)
        angles = torch.zeros(1, 9, turned, dtype=torch.float64)
        layer(torch.zeros(1, 9, 32).double(), position_embeddings=(angles, angles), attention_mask=None)
    layer.config._attn_implementation = kind
    return {name: value for name, value in given.items() if value is not None}


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
    asked = told(layer, turned)
    assert fused_norm_rope.attention_layers(built_of(SimpleNamespace(model=layer))) == [layer]
    undo = fused_norm_rope.fuse([layer])
    assert told(layer, turned) == asked
    # The class rounds to float32 inside its norms, ours does not.
    for ours, plain in zip(run(), theirs, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-6)
    undo()
    assert all(torch.equal(ours, plain) for ours, plain in zip(run(), theirs, strict=True))


@pytest.mark.parametrize(
    ("layers", "more"),
    [(4, {"num_kv_shared_layers": 2}), (2, {"attention_k_eq_v": True, "num_global_key_value_heads": 1})],
)
def test_layers_that_attend_to_the_keys_of_others_and_values_that_are_keys_stay_what_they_are(layers, more):
    torch.manual_seed(0)
    told = Gemma4TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, global_head_dim=16, vocab_size=128, vocab_size_per_layer_input=128, hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2), sliding_window=4, **more,
    )  # fmt: skip
    model, ids = random_norms(Gemma4ForCausalLM(told)), torch.randint(128, (2, 19))
    theirs, gradients = step(model, ids)
    answer = model.generate(ids[:1, :4], max_new_tokens=5, do_sample=False)
    found_layers = layers_of(model)
    assert [layer.is_kv_shared_layer for layer in found_layers] == [False, False, True, True][:layers]
    undo = fused_norm_rope.fuse(found_layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ours, found = step(model.train(), ids)
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert torch.equal(model.eval().generate(ids[:1, :4], max_new_tokens=5, do_sample=False), answer)
    undo()
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_norm_that_is_trained_whole_beside_an_adapter_is_the_one_in_force():
    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=["q_norm"], r=2)
    model, ids = get_peft_model(tiny_model(), adapter), torch.randint(128, (2, 9))
    for name, weight in model.named_parameters():
        if "q_norm.modules_to_save" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    theirs, gradients = step(model, ids)
    with model.disable_adapter(), torch.no_grad():
        off = model(ids).logits
    fused_norm_rope.fuse(layers_of(model))
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
        fused_norm_rope.fuse([layer])


def test_compiled_layers_rotate_by_themselves_and_the_kernel_serves_what_is_not_compiled(monkeypatch):
    model, ids = llama(), torch.randint(128, (2, 9))
    theirs, gradients = step(model, ids)
    fused_norm_rope.fuse(layers_of(model))
    asked = []
    monkeypatch.setattr(fused_norm_rope, "rope", lambda *given: asked.append(given) or rope(*given))
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    ours, found = step(model, ids)
    assert not asked
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    with torch.compiler.set_stance("force_eager"):
        model(ids)
    assert len(asked) == len(model.model.layers)


def test_trying_a_layer_leaves_random_numbers_and_what_was_switched_off_as_they_were():
    """A run with the kernel drops and draws what it would without."""
    model = llama().train()
    layers = layers_of(model)
    layers[0].o_proj.eval()
    random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    fused_norm_rope.fuse(layers)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes


def test_a_layer_that_is_called_otherwise_is_named_with_a_way_out_and_left_as_it_was():
    layer = layers_of(tiny_model().train())[0]
    layer.forward = plain = lambda *args, **kwargs: [][1]
    with pytest.raises(ModelError, match=r"Qwen3Attention of this release .* is called otherwise") as refused:
        fused_norm_rope.fuse([layer])
    assert "Take a newer transformers" in refused.value.hint
    assert layer.training
    assert layer.forward is plain


def test_a_cpu_and_a_model_without_such_attention_are_refused():
    with pytest.raises(ModelError, match="needs a CUDA device"):
        fused_norm_rope.apply(config(), built_of(SimpleNamespace(model=tiny_model())))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    phi = Phi3ForCausalLM(Phi3Config(vocab_size=128, pad_token_id=0, **shape))
    with pytest.raises(ModelError, match=f"no attention layer of {', '.join(fused_norm_rope.SERVED)}"):
        fused_norm_rope.apply(config(), built_of(SimpleNamespace(model=phi)))
    assert fused_norm_rope.apply(config("auto"), built_of(SimpleNamespace(model=phi))) is None


def test_a_number_format_without_a_kernel_is_refused_with_those_that_have_one(monkeypatch):
    monkeypatch.setattr(fused_norm_rope, "lacking", lambda device: None)
    with pytest.raises(ModelError, match="no kernel serves float64; float32, float16 and bfloat16 are served"):
        fused_norm_rope.apply(config(), built_of(SimpleNamespace(model=tiny_model().double())))


IN_THE_INTERPRETER = """
import json, torch
from types import SimpleNamespace
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention, Qwen2_5_VLTextConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config
from engine.features.built import Built
from engine.features.fused_norm_rope import apply as fused_norm_rope

on = SimpleNamespace(kernels=SimpleNamespace(fused_attn_kernel=True))
shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}
for kind, config in ((Qwen3Attention, Qwen3Config), (Qwen2_5_VLAttention, Qwen2_5_VLTextConfig)):
    layer = kind(config(**shape, attn_implementation="sdpa"), 0)
    hidden, angles = torch.randn(1, 3, 16, requires_grad=True), torch.randn(1, 3, 8)
    given = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    plain = layer(hidden, **given)[0]
    done = fused_norm_rope.apply(on, Built(layer))
    ours = layer(hidden, **given)[0]
    found = [torch.autograd.grad(x.square().sum(), [hidden, *layer.parameters()]) for x in (ours, plain)]
    error = max(float((a - b).abs().max()) for a, b in zip(*found))
    names, nodes = set(), [ours.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [each for each, _ in node.next_functions if each is not None]
    print(json.dumps([done.entry(), float((ours - plain).abs().max()), error, sorted(names)]))
"""


@pytest.mark.slow
def test_the_kernels_themselves_serve_a_layer_in_tritons_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    normed, alone = map(json.loads, done.stdout.splitlines())
    for entry, error, of_gradients, _ in (normed, alone):
        assert (entry["effective"], entry["count"]) == ("Triton", 1)
        assert error < 1e-5
        assert of_gradients < 1e-4
    assert "_NormRopeBackward" in normed[-1]
    assert "_RopeBackward" in alone[-1]
    assert "the rotation alone" not in normed[0]["detail"]
    assert "the rotation alone" in alone[0]["detail"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("make", "dtype"), [(tiny_model, torch.bfloat16), (llama, torch.float32)])
def test_on_the_gpu_a_compiled_layer_stays_one_graph(make, dtype):
    torch.compiler.reset()  # what other tests compiled counts against how often one function may be
    torch.manual_seed(0)
    ids = torch.randint(128, (2, 33), device="cuda")
    model = random_norms(make()).to("cuda", dtype)
    theirs, gradients = step(model, ids)
    fused_norm_rope.fuse(layers_of(model))
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    ours, found = step(model, ids)
    allowed = 1e-4 if dtype is torch.float32 else 4e-2
    assert abs(ours.loss.item() - theirs.loss.item()) < allowed
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= allowed * gradient.norm() + 1e-5, name
