"""Packed experts give what their unpacked numbers give, unpack what is routed alone, in a bounded room, and keep none of it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch

from engine.kernels.experts import ExpertLoRA, Gate, expert_mlp
from engine.kernels.experts.packed import KINDS, PackedExperts, Packer

pytest.importorskip("bitsandbytes", reason="bits are bitsandbytes'")
EXPERTS, WIDTH, HIDDEN, TOKENS, TOP_K, RANK = 6, 24, 32, 11, 2, 3
ROUTINGS = {
    "even": lambda ids: ids,
    "skewed": lambda ids: torch.where(ids < 4, 1, ids),
    "one": lambda ids: torch.full_like(ids, 5),
    "sentinels": lambda ids: ids.masked_fill(ids == 2, -1).masked_fill(ids == 3, EXPERTS + 1),
    "nowhere": lambda ids: torch.full_like(ids, EXPERTS),
}
CASES = [
    {},
    {"kind": "fp4", "dtype": torch.bfloat16},
    {"kind": "int8"},
    {"adapted": False},
    {"gate": Gate("clamped_swiglu", interleaved=True), "turned": True, "biased": True},
    *({"routing": name} for name in ROUTINGS if name != "even"),
]
"""The common case, and those beside it along one axis."""


def weight_of(numbers, kind):
    packer = Packer(len(numbers), kind, numbers.dtype)
    for expert in numbers:
        packer.add(expert)
    return packer.done()


def weights(kind="nf4", dtype=torch.float32, turned=False):
    """Packed gate_up [E, 2 I, H] and down [E, H, I]; turned ones are stored the other way round."""
    generator = torch.Generator().manual_seed(1)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    wide = [torch.randn(shape, generator=generator).to(dtype) / 4 for shape in shapes]
    if turned:
        return [weight_of(each.transpose(1, 2), kind).transpose(1, 2) for each in wide]
    return [weight_of(each, kind) for each in wide]


def block(gate_up, down, *, routing="even", adapted=True, biased=False, gate=Gate()):
    """The result and the gradients of everything that trains, by name."""
    torch.manual_seed(2)
    ids = ROUTINGS[routing](torch.rand(TOKENS, EXPERTS).topk(TOP_K, -1).indices)
    given = {"x": torch.randn(TOKENS, HIDDEN, dtype=gate_up.dtype), "routing": torch.rand(TOKENS, TOP_K)}
    if adapted:
        for name, each in (("gate_up", gate_up), ("down", down)):
            given[f"{name}.a"] = torch.randn(EXPERTS * RANK, each.shape[2]) / 4
            given[f"{name}.b"] = torch.randn(each.shape[1], RANK * EXPERTS) / 4
    if biased:
        given |= {"gate_up_bias": torch.randn(gate_up.shape[:2]), "down_bias": torch.randn(down.shape[:2])}
    given = {name: each.requires_grad_() for name, each in given.items()}
    loras = {
        f"{name}_lora": ExpertLoRA.from_peft(given[f"{name}.a"], given[f"{name}.b"], EXPERTS, 0.5)
        for name in ("gate_up", "down")
        if adapted
    }
    more = {name: each for name, each in given.items() if name.endswith("bias")}
    out = expert_mlp(given["x"], ids, given["routing"], gate_up, down, gate=gate, **loras, **more)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return {"out": out.detach(), **{name: each.grad for name, each in given.items()}}


def test_every_case_is_that_of_the_unpacked_numbers():
    for case in CASES:
        told = {name: case[name] for name in ("routing", "adapted", "biased", "gate") if name in case}
        held = weights(**{name: case[name] for name in ("kind", "dtype", "turned") if name in case})
        theirs, ours = block(*(each.all_unpacked() for each in held), **told), block(*held, **told)
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            wide = 2e-2 if expected.dtype == torch.bfloat16 or held[0].dtype == torch.bfloat16 else 1e-5
            error = (ours[name].double() - expected.double()).norm()
            assert error <= wide * expected.double().norm() + 1e-7, (case, name)


def test_routed_experts_alone_are_unpacked_in_a_bounded_room_and_nothing_of_them_is_kept(monkeypatch):
    held, asked, rooms, kept = weights(), [], set(), []
    unpack = PackedExperts.unpack_into

    def seen(self, experts, out):
        asked.extend(experts.tolist())
        rooms.add(out.untyped_storage().data_ptr())
        assert out.untyped_storage().nbytes() <= 4 * 2 * WIDTH * HIDDEN
        return unpack(self, experts, out)

    monkeypatch.setattr(PackedExperts, "unpack_into", seen)

    def keep(each):
        if torch._C._current_graph_task_id() < 0:  # not what the backward pass makes for itself
            kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        block(*held, routing="skewed", adapted=False)
    ids = ROUTINGS["skewed"](torch.manual_seed(2) and torch.rand(TOKENS, EXPERTS).topk(TOP_K, -1).indices)
    routed = sorted(set(ids.flatten().tolist()))
    assert len(routed) < EXPERTS
    # gate_up and down, forward and backward, each routed expert once.
    assert sorted(asked) == sorted(routed * 4)
    assert len(rooms) <= 4
    assert max(each.numel() for each in kept) < WIDTH * HIDDEN


def test_a_packed_weight_is_a_weight_to_whoever_asks():
    held = weights("nf4", torch.bfloat16)[0]
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(held, requires_grad=False)
    every = held.all_unpacked()
    for each in (module.weight, copy.deepcopy(module).weight):
        assert isinstance(each, PackedExperts)
        assert torch.equal(each.all_unpacked(), every)
    assert (held.shape, held.dtype, held.element_size()) == (every.shape, torch.bfloat16, 2)
    assert held.packed_bytes < 0.6 * held.numel() + 4 * 300
    assert torch.equal(held[3], every[3])
    assert torch.equal(held.transpose(1, 2)[3], every[3].T)
    assert torch.equal(held * 2, every * 2)
    module.to("meta")
    assert module.weight.held.numbers.device.type == "meta"
    module.weight = torch.nn.Parameter(held, requires_grad=False)
    assert module.float().weight.form.dtype == torch.float32
    with pytest.raises(RuntimeError, match="cannot be written to"):
        held.mul_(2)
    with pytest.raises(ValueError, match="must both be packed"):
        expert_mlp(torch.ones(1, HIDDEN), torch.zeros(1, 1).long(), torch.ones(1, 1), held, weights()[1].all_unpacked())
    half = Packer(2, "nf4", torch.float32)
    half.add(torch.ones(4, 64))
    with pytest.raises(ValueError, match="1 of 2 experts were given"):
        half.done()


def unpacked_alike(device):
    """One launch gives any experts in any order, bit for bit as bitsandbytes unpacks each, whatever an expert's size."""
    launches = []
    formats = torch.float16, torch.float32, torch.bfloat16
    for kind in KINDS:
        for dtype in formats[: 3 if device == "cuda" else 2]:  # the interpreter cuts bfloat16 where cards round
            for rows, columns in ((7, 24), (64, 100), (40, 448)):
                packer = Packer(5, kind, dtype)
                for _ in range(5):
                    packer.add((torch.randn(rows, columns, device=device) * 3).to(dtype))
                held = packer.done()
                experts = torch.tensor([4, 0, 2, 2], device=device)
                out = torch.full((4, rows, columns), float("nan"), dtype=dtype, device=device)
                held.unpack_into(experts, out)
                for expert, found in zip(experts.tolist(), out, strict=True):
                    assert torch.equal(found, held.unpack(expert)), (kind, dtype, rows, columns, expert)
                launches.append(len(out))
    assert len(launches) == 9 * (3 if device == "cuda" else 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_launch_unpacks_as_bitsandbytes_does_on_the_gpu():
    unpacked_alike("cuda")


IN_THE_INTERPRETER = """
from engine.kernels.experts import packed
from tests.engine.kernels import test_packed_experts as tests

packed.EXPERT_BUFFER = 2 * 4 * 3 * tests.WIDTH * tests.HIDDEN  # room for two experts
tests.unpacked_alike("cpu")
tests.test_every_case_is_that_of_the_unpacked_numbers()
print("agree")
"""


@pytest.mark.slow
def test_the_kernels_take_groups_of_unpacked_experts():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "agree"), done.stderr[-2000:]
