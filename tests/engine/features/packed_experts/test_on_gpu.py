"""Packed experts on a card: the kernels over groups of unpacked ones, and memory that stays within the room."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.experts import ExpertLoRA, expert_mlp
from engine.kernels.experts.packed import Packer
from engine.kernels.requirements import EXPERT_BUFFER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EXPERTS, HIDDEN, WIDTH, RANK, TOKENS = 128, 2048, 768, 16, 512


def weights(kind):
    pytest.importorskip("bitsandbytes")
    made = []
    for rows, columns in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        packer = Packer(EXPERTS, kind, torch.bfloat16)
        for _ in range(EXPERTS):
            packer.add(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / 40)
        made.append(packer.done())
    return made


def step(gate_up, down, tile=None):
    """The result, the gradients of tokens and adapters, and the most that was taken meanwhile."""
    torch.manual_seed(1)
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(8, -1).indices
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    factors = [
        (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 20).requires_grad_()
        for shape in ((EXPERTS * RANK, HIDDEN), (2 * WIDTH, RANK * EXPERTS), (EXPERTS * RANK, WIDTH), (HIDDEN, RANK * EXPERTS))
    ]  # fmt: skip
    loras = [ExpertLoRA.from_peft(a, b, EXPERTS, 1.0) for a, b in (factors[:2], factors[2:])]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = expert_mlp(
        x, ids, torch.full_like(ids, 0.125, dtype=x.dtype), gate_up, down, gate_up_lora=loras[0], down_lora=loras[1],
        tile_tokens=tile,
    )  # fmt: skip
    out.sum().backward()
    return [out, x.grad, *(each.grad for each in factors)], torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["nf4", "int8", "mxfp4"])
def test_the_numbers_are_those_of_unpacked_experts_in_a_bounded_room(kind):
    held = weights(kind)
    ours, taken = step(*held)
    theirs, plain = step(*(each.all_unpacked() for each in held))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.double() - other.double()).norm() <= 2e-2 * other.double().norm()
    assert taken <= plain + 1.25 * EXPERT_BUFFER


@pytest.mark.parametrize("kind", ["nf4", "mxfp4"])
def test_tiles_share_one_unpacking_and_give_the_same_numbers(kind):
    held = weights(kind)
    ours, _ = step(*held, tile=100)
    theirs, _ = step(*held)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.double() - other.double()).norm() <= 2e-2 * other.double().norm()
