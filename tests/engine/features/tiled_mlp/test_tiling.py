"""A block over tiles gives the block's own numbers and gradients, holds one tile at a time, and is not computed a third time."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from engine.features.gradient_checkpointing.tiers import POLICIES
from engine.features.tiled_mlp.tiling import tiled
from tests.engine.features.conftest import Meter

HIDDEN = 16


class Mlp(torch.nn.Module):
    """The gated block of most models, with dropout where asked for."""

    def __init__(self, width=40, dropout=0.0):
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, width)
        self.up_proj = torch.nn.Linear(HIDDEN, width, bias=False)
        self.down_proj = torch.nn.Linear(width, HIDDEN)
        self.dropout = torch.nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.down_proj(self.dropout(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def moe():
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    config = Qwen3MoeConfig(hidden_size=HIDDEN, **shape)
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return block


def adapted(**changes):
    torch.manual_seed(0)
    block = torch.nn.ModuleDict({"mlp": Mlp()})
    settings = {"r": 4, "target_modules": ["gate_proj", "down_proj"], **changes}
    model = get_peft_model(block, LoraConfig(**settings), autocast_adapter_dtype=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.base_model.model["mlp"]


BLOCKS = {
    "dense": Mlp,
    "experts": moe,
    "lora": adapted,
    "dora": lambda: adapted(use_dora=True),
    "module trained whole": lambda: adapted(modules_to_save=["up_proj"]),
}


def both(block, tokens, shape=(3, 7), **kwargs):
    """Output and gradients (of the input first) of the plain block and of the tiled one, on the same numbers."""
    torch.manual_seed(2)
    values, weight = torch.randn(*shape, HIDDEN).double(), torch.randn(*shape, HIDDEN).double()
    found = []
    for tiles in (None, tokens):
        x = values.clone().requires_grad_()
        block.zero_grad()
        out = block(x) if tiles is None else tiled(block, x, list(block.parameters()), tiles, **kwargs)
        (out * weight).sum().backward()
        gradients = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
        found.append((out.detach(), {"x": x.grad, **gradients}))
    return found


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_output_and_every_gradient_equal_the_plain_blocks(kind, tiles):
    torch.manual_seed(0)
    block = BLOCKS[kind]().double()
    (out, gradients), (ours, found) = both(
        block, -(-21 // tiles)
    )  # 21 tokens: tiles of 21, of 11 and 10, of 6, 6, 6, 3
    assert found.keys() == gradients.keys()
    torch.testing.assert_close(ours, out, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["dense", "lora", "module trained whole"])
def test_the_last_product_is_left_out_of_the_backward_pass_and_no_gradient_changes(kind):
    torch.manual_seed(0)
    block = BLOCKS[kind]().double()
    last = getattr(block.down_proj, "base_layer", block.down_proj)
    plain, counted = last.forward, []
    last.forward = lambda x: counted.append(len(x)) or plain(x)
    (_, gradients), (_, found) = both(block, 6, last=last)
    assert len(counted) == 1 + 4  # the whole, and each tile once, forward
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
    assert last.forward(torch.ones(1, 40).double()).abs().sum() > 0


def test_weights_learn_where_the_input_needs_no_gradient_and_frozen_ones_get_none():
    block = Mlp().double()
    block.up_proj.requires_grad_(False)
    x = torch.randn(1, 20, HIDDEN).double()
    block(x).square().sum().backward()
    wanted = {name: p.grad for name, p in block.named_parameters()}
    block.zero_grad()
    tiled(block, x, list(block.parameters()), 6).square().sum().backward()
    assert block.up_proj.weight.grad is None
    for name, weight in block.named_parameters():
        if wanted[name] is not None:
            torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-12, atol=1e-12)


def test_dropout_is_drawn_again_alike_and_chance_goes_on_as_if_nothing_had_been():
    block = Mlp(dropout=0.5).double()
    x = torch.randn(24, HIDDEN).double().requires_grad_()
    torch.manual_seed(5)
    out = torch.cat([block(part) for part in x.split(6)])
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    after = torch.rand(())
    torch.manual_seed(5)
    ours = tiled(block, x[None], list(block.parameters()), 6)
    (found,) = torch.autograd.grad(ours.square().sum(), x)
    torch.testing.assert_close(ours[0], out)
    torch.testing.assert_close(found, gradient)
    assert torch.rand(()) == after


def test_sums_in_float32_lose_less_of_bfloat16_gradients():
    torch.manual_seed(0)
    block, x = Mlp().bfloat16(), torch.randn(1, 4096, HIDDEN).bfloat16()
    exact = copy.deepcopy(block).double()
    exact(x.double()).square().sum().backward()
    errors = {}
    for in_float32 in (False, True):
        block.zero_grad()
        tiled(block, x, list(block.parameters()), 16, in_float32=in_float32).square().sum().backward()
        wanted = exact.gate_proj.weight.grad
        assert block.gate_proj.weight.grad.dtype is torch.bfloat16
        errors[in_float32] = float((block.gate_proj.weight.grad.double() - wanted).norm() / wanted.norm())
    assert errors[True] < 0.5 * errors[False]


def test_one_tile_at_a_time_is_held():
    block, x = Mlp(width=512), torch.randn(1, 4096, HIDDEN, requires_grad=True)
    block.requires_grad_(False)

    def peak(tokens):
        with Meter() as meter:
            tiled(block, x, list(block.parameters()), tokens).sum().backward()
        return meter.peak

    wide = 4096 * 512 * 4
    assert peak(4096) > 4 * wide
    assert peak(512) < 1.2 * wide


@pytest.mark.parametrize("kind", ["later", "reentrant", "selective", "medium"])
def test_under_a_checkpoint_it_gives_the_same_and_is_computed_twice_a_tile(kind):
    torch.manual_seed(0)
    block, x = Mlp().double(), torch.randn(2, 12, HIDDEN).double().requires_grad_()
    (block(x) + x).square().sum().backward()
    wanted, x.grad, calls = x.grad, None, {"reentrant": 4 * 3}.get(kind, 4 * 2)
    block.calls = 0
    context = {"context_fn": lambda: create_selective_checkpoint_contexts(POLICIES[kind])} if kind in POLICIES else {}

    def layer(hidden):
        return hidden + tiled(block, torch.nn.functional.silu(hidden) * 0 + hidden, list(block.parameters()), 6)

    out = checkpoint(layer, x, use_reentrant=kind == "reentrant", **context)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-12, atol=1e-12)
    assert block.calls == calls


def test_a_tier_keeps_nothing_of_a_tile():
    block, x = Mlp(width=64), torch.randn(1, 2048, HIDDEN, requires_grad=True)
    block.requires_grad_(False)

    def live(tokens):
        context = {"context_fn": lambda: create_selective_checkpoint_contexts(POLICIES["selective"])}
        with Meter() as meter:
            out = checkpoint(lambda h: tiled(block, h, (), tokens), x, use_reentrant=False, **context)
            held = meter.live
        del out
        return held

    wide = 2048 * 64 * 4
    assert live(2048) > 2 * wide
    assert live(256) < 0.3 * wide  # the result itself


def test_mixed_precision_is_what_it_was():
    block, x = Mlp(), torch.randn(1, 16, HIDDEN, requires_grad=True)
    found = []
    for tokens in (16, 4):
        block.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = tiled(block, x, list(block.parameters()), tokens)
        assert out.dtype is torch.bfloat16
        (gradient,) = torch.autograd.grad(out.float().square().sum(), x)
        found.append(gradient)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


def _rank(rank, folder):
    """One of two processes: its half of the rows through a tiled block under data-parallel reduction."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    block, x = Mlp().double(), torch.randn(2, 20, HIDDEN).double()

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return tiled(self.block, x, list(self.block.parameters()), 6)

    model = torch.nn.parallel.DistributedDataParallel(Wrapped())
    model(x[rank : rank + 1]).square().sum().backward()
    torch.save([p.grad for p in block.parameters()], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_one_gradient_per_weight(tmp_path):
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    torch.manual_seed(0)
    block, x = Mlp().double(), torch.randn(2, 20, HIDDEN).double()
    (block(x).square().sum() / 2).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for ours, weight in zip(found, block.parameters(), strict=True):
            torch.testing.assert_close(ours, weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 9, HIDDEN), (18, HIDDEN)])
def test_a_layer_may_add_to_the_result_in_place(shape):
    """As Falcon's layers add what attention found."""
    torch.manual_seed(0)
    block, x = Mlp(), torch.randn(shape, requires_grad=True)
    found = []
    for run in (block, lambda x: tiled(block, x, list(block.parameters()), 4)):
        out = run(x)
        out += x
        found.append(torch.autograd.grad(out.square().sum(), (x, *block.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
