"""Norms in float32 between layers of 16 bits: nearer to the truth, moved by the smallest steps, seen by nothing else."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from engine.errors import ModelError
from engine.features.built import Built
from engine.features.fp32_norms.apply import apply, norms, prepare
from engine.features.fused_norm_rope import apply as fused_norm_rope
from tests.engine.features.compile.test_grouped import step
from tests.engine.features.conftest import built_of
from tests.engine.features.families import FUSED, made
from tests.engine.trainers.conftest import CONVERSATIONS, lines

ON = SimpleNamespace(memory=SimpleNamespace(fp32_norms=True))


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=64))


MODELS = {**{family: (lambda family=family: made(family)) for family in ("qwen3", "gemma3", "qwen3_5")}, "gpt2": gpt2}
# Norms of two layers (queries and keys have their own, and so has the gated sum of linear attention) and the last.
COUNTS = {"qwen3": 9, "gemma3": 13, "qwen3_5": 8, "gpt2": 5}


def answers(norm, x, gate, slope, dtype):
    """What a norm answers and the gradients of its input and weights, for numbers of this format."""
    inputs = [each.to(dtype).requires_grad_() for each in ((x, gate) if "Gated" in type(norm).__name__ else (x,))]
    out = norm(*inputs)
    return out, torch.autograd.grad(out, (*inputs, *norm.parameters()), slope.to(out.dtype))


def error(found, truth):
    return ((found.detach().double() - truth.detach()).norm() / truth.detach().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", MODELS)
def test_each_norm_comes_nearer_to_the_truth_and_answers_in_the_format_that_came(family, dtype):
    plain = MODELS[family]().to(dtype)
    model = copy.deepcopy(plain)
    prepare(ON, Built(model))
    assert len(list(norms(model))) == COUNTS[family]
    for rounded, raised in zip(norms(plain), norms(model), strict=True):
        torch.manual_seed(1)
        width = raised.weight.numel()
        x, gate, slope = (torch.randn(64, width).to(dtype) for _ in range(3))
        exact = copy.deepcopy(rounded).double()
        truth, slopes = answers(exact, x, gate, slope, torch.float64)
        ours, found = answers(raised, x, gate, slope, dtype)
        theirs, kept = answers(rounded, x, gate, slope, dtype)
        assert ours.dtype == theirs.dtype == dtype
        assert error(ours, truth.double()) <= error(theirs, truth.double())
        assert error(ours, truth.double()) < torch.finfo(dtype).eps / 2  # one rounding
        assert [each.dtype for each in found[-1:]] == [torch.float32]
        assert error(found[-1], slopes[-1].double()) < error(kept[-1], slopes[-1].double())
        assert error(found[-1], slopes[-1].double()) < 1e-5


def test_steps_too_small_for_bfloat16_move_the_norms_and_are_kept(train, source):
    base = {"data.train": [{"path": source(CONVERSATIONS)}], "model.dtype": "bfloat16", "optim.learning_rate": 1e-4}
    base |= {"optim.max_steps": 3, "run.save_steps": 3, "optim.optim": "adamw_torch"}
    moved = {}
    for asked in (False, True):
        run = train({**base, "memory.fp32_norms": asked})
        saved = load_file(run.checkpoints / "checkpoint-3" / "model.safetensors")
        found = {name: weight for name, weight in saved.items() if "norm" in name}
        moved[asked] = {name: weight for name, weight in found.items() if not bool((weight == 1).all())}
        assert {weight.dtype for weight in found.values()} == {torch.float32 if asked else torch.bfloat16}
        assert {weight.dtype for name, weight in saved.items() if name not in found} == {torch.bfloat16}
        said = {e["feature"]: e for event in lines(run, "receipt") for e in event["entries"]}.get("norms in float32")
        assert (said is not None) is asked
    anew = AutoModelForCausalLM.from_pretrained(run.checkpoints / "checkpoint-3")
    assert {weight.dtype for weight in anew.parameters()} == {
        torch.bfloat16
    }  # as the folder says, for whoever loads it
    assert moved[False] == {}
    assert len(moved[True]) == said["count"] == 17
    assert "17 weights trained, 0 frozen" in said["detail"]


def test_a_norm_that_is_trained_whole_beside_an_adapter_is_raised_with_its_original():
    model = get_peft_model(
        made("qwen3").bfloat16(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["q_norm"]),
        autocast_adapter_dtype=False,
    )  # fmt: skip
    prepare(ON, Built(model))
    trainer = SimpleNamespace(model=model, ref_model=made("qwen3").bfloat16().requires_grad_(False))
    done = apply(ON, built_of(trainer))
    assert done.count == 9 + 2 + 9
    assert "2 weights trained, 18 frozen" in done.detail
    ids = torch.randint(61, (2, 9))
    with model.disable_adapter():
        off = model(ids).logits
    assert off.dtype == torch.bfloat16
    assert torch.equal(off, trainer.ref_model(ids).logits)
    _, gradients = step(model, ids)
    assert [each.dtype for name, each in gradients.items() if "q_norm" in name] == [torch.float32] * 2
    assert {each.dtype for name, each in gradients.items() if "q_norm" not in name} == {torch.bfloat16}


def test_a_copy_computes_with_its_own_weights_and_all_is_taken_back():
    model = made("qwen3").bfloat16()
    undo, ids = prepare(ON, Built(model)), torch.randint(61, (2, 9))
    twin, logits = copy.deepcopy(model), model(ids).logits
    with torch.no_grad():
        for norm in norms(model):
            norm.weight.mul_(2)
    assert torch.equal(twin(ids).logits, logits)
    assert not torch.equal(model(ids).logits, logits)
    done = apply(ON, Built(twin))
    done.undo()
    undo()
    assert all("forward" not in vars(module) for each in (model, twin) for module in each.modules())


def test_a_module_that_is_called_a_norm_and_holds_a_matrix_stays_as_it_is():
    class ModulatedNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

    plain = torch.nn.LayerNorm(4)
    assert list(norms(torch.nn.Sequential(plain, ModulatedNorm()))) == [plain]


def test_a_trainer_that_rounded_the_norms_again_finds_them_raised():
    model = made("qwen3").bfloat16()
    prepare(ON, Built(model))
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    apply(ON, Built(model))
    assert {norm.weight.dtype for norm in norms(model)} == {torch.float32}


@pytest.mark.parametrize("family", FUSED)
def test_the_fused_norm_and_rotation_take_the_weights_as_they_are(family):
    model, ids = made(family).bfloat16(), torch.randint(61, (2, 9))
    prepare(ON, Built(model))
    with torch.no_grad():
        for norm in norms(model):
            norm.weight.add_(0.001)  # lost in bfloat16
    truth = step(copy.deepcopy(model).float(), ids)[1]
    logits, gradients = step(model, ids)
    fused_norm_rope.fuse(fused_norm_rope.attention_layers(built_of(SimpleNamespace(model=model))))
    ours, found = step(model, ids)
    assert ours.dtype == torch.bfloat16
    assert error(ours, logits.double()) < 0.03
    for name, gradient in gradients.items():
        assert found[name].dtype == gradient.dtype
        # Two experts nearly as likely may change places in bfloat16, of the class as of the kernel.
        ours, theirs = (error(each[name], truth[name].double()) for each in (found, gradients))
        assert ours <= 2 * theirs + 0.01, name


def test_a_compiled_layer_stays_one_graph():
    model, ids = made("qwen3").bfloat16(), torch.randint(61, (2, 9))
    prepare(ON, Built(model))
    logits = model(ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    assert torch.equal(model(ids, use_cache=False).logits, logits)
    torch._dynamo.reset()


def test_a_model_without_anything_to_raise_is_refused():
    with pytest.raises(ModelError, match="are float32 already"):
        prepare(ON, Built(made("qwen3")))
    with pytest.raises(ModelError, match="it has none"):
        prepare(ON, Built(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2, elementwise_affine=False))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("more", [{}, {"kernels.torch_compile": True}, {"memory.layer_offloading": True}], ids=str)
def test_on_a_card_the_kernel_reads_float32_weights_and_layers_stream_them(train, source, more):
    base = {"data.train": [{"path": source(CONVERSATIONS)}], "model.dtype": "bfloat16", "adapter.kind": "lora"}
    base |= {"optim.max_steps": 3, "memory.fp32_norms": True}
    plain, run = train(base), train({**base, "kernels.fused_attn_kernel": True, **more})
    told = [[event["loss"] for event in lines(each, "metrics") if "loss" in event] for each in (plain, run)]
    assert told[1] == pytest.approx(told[0], rel=0.02)
    said = {e["feature"]: e for event in lines(run, "receipt") for e in event["entries"]}
    assert said["norms in float32"]["count"] == 17
    assert said["fused norm and rotary"]["count"] == 4
