"""Packed experts in tiles: the numbers of the whole batch, each routed expert unpacked once a pass however many tiles."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoTokenizer

from engine.builtin import tiny
from engine.config.facts import Facts, ModelFacts
from engine.features.built import Built
from engine.features.gradient_checkpointing.tiers import POLICIES
from engine.features.tiled_mlp import tiles_need_a_block_of_tokens_by_themselves
from engine.features.tiled_mlp.apply import prepare
from engine.kernels.experts import ExpertLoRA, expert_mlp
from engine.kernels.experts.packed import PackedExperts, Packer
from engine.rules import read
from tests.engine.features.families import made
from tests.engine.features.packed_experts.test_apply import adapted, learned, settings

pytest.importorskip("bitsandbytes", reason="weights of 4 bits are bitsandbytes'")
EXPERTS, HIDDEN, WIDE, TOKENS, TOP, RANK = 6, 64, 32, 41, 2, 3


def in_few_bits(kind, turned):
    torch.manual_seed(0)
    found = []
    for rows, columns in ((2 * WIDE, HIDDEN), (HIDDEN, WIDE)):
        packer = Packer(EXPERTS, kind, torch.float32, turned=turned)
        for _ in range(EXPERTS):
            packer.add(0.1 * torch.randn((columns, rows) if turned else (rows, columns)))
        found.append(packer.done().transpose(1, 2) if turned else packer.done())
    return found


def computed(weights, tile, frozen=False):
    """The result, and gradients of tokens, routing weights, adapters and biases; one expert gets no token."""
    torch.manual_seed(1)
    x, routing = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP)
    ids = torch.rand(TOKENS, EXPERTS - 1).topk(TOP).indices
    ids[0] = torch.tensor([EXPERTS, -1])
    shapes = [(EXPERTS, RANK, HIDDEN), (EXPERTS, 2 * WIDE, RANK), (EXPERTS, RANK, WIDE), (EXPERTS, HIDDEN, RANK)]
    small = [torch.randn(shape) for shape in [*shapes, (EXPERTS, 2 * WIDE), (EXPERTS, HIDDEN)]]
    leaves = [x, routing, *small]
    for leaf in leaves[2:] if frozen else leaves:
        leaf.requires_grad_()
    out = expert_mlp(
        x, ids, routing, *weights, gate_up_lora=ExpertLoRA(*small[:2], 0.5), down_lora=ExpertLoRA(*small[2:4], 0.5),
        gate_up_bias=small[4], down_bias=small[5], tile_tokens=tile,
    )  # fmt: skip
    (out * torch.randn_like(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


@pytest.mark.parametrize(("kind", "turned"), [("nf4", False), ("mxfp4", True), ("nvfp4", False)])
@pytest.mark.parametrize("frozen", [False, True], ids=["all gradients", "adapters alone"])
def test_tiles_of_any_size_give_the_numbers_of_the_whole_batch(kind, turned, frozen):
    weights = in_few_bits(kind, turned)
    whole = computed(weights, None, frozen)
    for tile in (1, 7, 20, 40, TOKENS):
        for ours, theirs in zip(computed(weights, tile, frozen), whole, strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("tier", list(POLICIES))
def test_a_tier_that_keeps_products_keeps_none_of_a_tile(tier):
    weights, kept = in_few_bits("nf4", False), []

    def policy(ctx, op, *args, **kwargs):
        choice = POLICIES[tier](ctx, op, *args, **kwargs)
        kept.extend([op] if choice == CheckpointPolicy.MUST_SAVE else [])
        return choice

    def learned(tile):
        kept.clear()
        torch.manual_seed(1)
        x, routing = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, TOP)
        ids = torch.rand(TOKENS, EXPERTS).topk(TOP).indices
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        again = {"use_reentrant": False, "context_fn": contexts}
        out = checkpoint(lambda x: expert_mlp(x, ids, routing, *weights, tile_tokens=tile), x, **again)
        held = len(kept)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        return held, gradient

    whole, plain = learned(None)
    held, gradient = learned(10)
    assert whole or tier == "medium"
    assert held == 0
    torch.testing.assert_close(gradient, plain)


def test_experts_are_unpacked_once_a_pass_however_many_tiles(monkeypatch):
    weights, unpacked = in_few_bits("nf4", False), []
    real = PackedExperts.unpack_range

    def counting(self, first, out, starts=None):
        unpacked.append(len(out))
        real(self, first, out, starts)

    monkeypatch.setattr(PackedExperts, "unpack_range", counting)
    computed(weights, 4)
    assert sum(unpacked) == 2 * 2 * EXPERTS  # two weights, forward and backward


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found, tokenizer = {}, AutoTokenizer.from_pretrained(tiny.folder())
    for family in ("qwen3_moe", "gpt_oss", "qwen3_5_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        made(family, vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(found[family])
        tokenizer.save_pretrained(found[family])
    return found


def in_tiles(tokens):
    memory = {"tiled_mlp": True, "tiled_mlp_tokens": tokens}
    return read({"model": {"name": "builtin/tiny"}, "data": {"max_length": 64}, "memory": memory}).config


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_learn_the_same_and_are_taken_back(folders, family, checkpointed):
    model, _ = adapted(settings(folders[family], "mxfp4" if family == "gpt_oss" else "nf4"))
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss, gradients = learned(model)
    before = [set(vars(module)) for module in model.modules()]
    told = prepare(in_tiles(16), Built(model))
    assert told is not None
    assert "packed experts, unpacked once for all tiles" in told.detail
    ours = learned(model)
    assert ours[0] == pytest.approx(loss, rel=1e-6)
    assert ours[1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (ours[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name
    told.undo()
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(("packed", "refused"), [(True, False), (False, True)])
def test_gpt_oss_has_tiles_where_its_experts_are_packed(packed, refused):
    mapping = {
        "model": {"name": "m", "quantization": "mxfp4" if packed else "none"},
        "adapter": {"kind": "lora"},
        "memory": {"tiled_mlp": True},
    }
    facts = Facts(model=ModelFacts("m", model_type="gpt_oss", experts=4, parameters=1000))
    found = list(tiles_need_a_block_of_tokens_by_themselves(read(mapping).config, facts))
    assert bool(found) is refused
