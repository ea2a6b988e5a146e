"""LoRA in closed form on a card: bf16 numbers within PEFT's own rounding, over 4-bit weights too, and memory that falls."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.features.fused_lora.apply import fuse
from engine.features.tiled_mlp import apply as tiled_mlp
from tests.engine.features.conftest import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPE = {"layers": 2, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}


def adapted(dtype=torch.bfloat16, four_bits=False, **settings):
    base = tiny_model(**SHAPE).to("cuda", dtype)
    if four_bits:
        bnb = pytest.importorskip("bitsandbytes")
        for layer in base.model.layers:
            for path, linear in list(layer.named_modules()):
                if isinstance(linear, torch.nn.Linear):
                    parent, _, name = path.rpartition(".")
                    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
                    made.weight = bnb.nn.Params4bit(
                        linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", module=made
                    )
                    setattr(layer.get_submodule(parent), name, made.to("cuda"))
        base.is_loaded_in_4bit = True
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **settings))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(dtype)
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return model.train()


def step(model, ids):
    model.zero_grad()
    torch.manual_seed(3)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hidden = model.get_base_model().model(ids, use_cache=False).last_hidden_state
    slope = torch.randn(hidden.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    (hidden.float() * slope).sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}, peak


def errors(found, truth):
    return {name: float((found[name] - exact).norm() / exact.norm()) for name, exact in truth.items()}


@pytest.mark.parametrize("four_bits", [False, True], ids=["bf16", "nf4"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_lie_as_near_to_the_truth_as_pefts_and_less_memory_is_taken(four_bits, dropout):
    ids = torch.randint(128, (4, 512), device="cuda")
    model = adapted(four_bits=four_bits, lora_dropout=dropout)
    theirs, peak = step(model, ids)
    _, undo = fuse(list(model.get_base_model().model.layers))
    ours, ours_peak = step(model, ids)
    again, _ = step(model, ids)
    undo()
    if four_bits or dropout:
        # Another way to multiply 4-bit weights, and other masks in float32: the two forms are held against each other.
        assert all(error < 0.05 for error in errors(ours, theirs).values())
    else:
        exact = adapted(torch.float32)
        exact.load_state_dict(model.state_dict())
        truth, _ = step(exact, ids)
        peft = errors(theirs, truth)
        assert all(error <= 1.5 * peft[name] + 1e-3 for name, error in errors(ours, truth).items())
    assert max(errors(again, ours).values()) < 1e-2
    assert ours_peak < 0.9 * peak


def test_a_gated_block_in_tiles_holds_less_in_closed_form():
    model = adapted()
    block, x = model.get_base_model().model.layers[0].mlp, torch.randn(1, 4096, 512, device="cuda").bfloat16()
    found, peaks = [], []
    for closed in (True, False):
        plain = tiled_mlp._in_tiles(block, 1024, False, None)
        run = tiled_mlp._in_closed_tiles(block, plain, "silu", 1024, False) if closed else plain
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        out = run(leaf)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out.backward(x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - held)
        found.append([leaf.grad.double(), *(p.grad.double() for p in block.parameters() if p.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()
    assert peaks[0] < 0.75 * peaks[1]
