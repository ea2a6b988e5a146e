"""Packed experts give what their unpacked numbers give, unpack what is routed alone, in a bounded room, and keep none of it."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from engine.kernels.experts import ExpertLoRA, Gate, expert_mlp, groups, launch, packed
from engine.kernels.experts.packed import GROUPED, KINDS, PLAIN, PackedExperts, Packer, of_fp8, of_groups, of_mxfp4
from engine.kernels.tuned import Kept
from engine.kernels.tuner import Tuner

pytest.importorskip("bitsandbytes", reason="bits are bitsandbytes'")
EXPERTS, WIDTH, HIDDEN, TOKENS, TOP_K, RANK = 6, 24, 32, 11, 2, 3
ROUTINGS = {
    "even": lambda ids: ids,
    "skewed": lambda ids: torch.where(ids < 4, 1, ids),
    "one": lambda ids: torch.full_like(ids, 5),
    "sentinels": lambda ids: ids.masked_fill(ids == 2, -1).masked_fill(ids == 3, EXPERTS + 1),
    "nowhere": lambda ids: torch.full_like(ids, EXPERTS),
}
SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""What three bits of MXFP4 stand for."""
CASES = [
    {},
    {"kind": "fp4", "dtype": torch.bfloat16},
    {"kind": "int8"},
    {"kind": "mxfp4", "dtype": torch.bfloat16},
    {"kind": "nvfp4", "dtype": torch.bfloat16},
    {"kind": "fp8", "turned": True, "biased": True},
    {"adapted": False},
    {"gate": Gate("clamped_swiglu", interleaved=True), "turned": True, "biased": True, "kind": "mxfp4"},
    *({"routing": name} for name in ROUTINGS if name != "even"),
]
"""The common case, and those beside it along one axis."""


def weight_of(numbers, kind, **more):
    packer = Packer(len(numbers), kind, numbers.dtype, **more)
    for expert in numbers:
        packer.add(expert)
    return packer.done()


def weights(kind="nf4", dtype=torch.float32, turned=False):
    """Packed gate_up [E, 2 I, H] and down [E, H, I]; turned ones are stored the other way round."""
    generator = torch.Generator().manual_seed(1)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    wide = [torch.randn(shape, generator=generator).to(dtype) / 4 for shape in shapes]
    if turned:
        told = {"turned": True} if kind == "mxfp4" else {}
        return [weight_of(each.transpose(1, 2), kind, **told).transpose(1, 2) for each in wide]
    return [weight_of(each, kind) for each in wide]


def block(gate_up, down, *, routing="even", adapted=True, biased=False, gate=Gate(), op=None):
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
    out = (op or expert_mlp)(given["x"], ids, given["routing"], gate_up, down, gate=gate, **loras, **more)
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


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("kind", ["nf4", "nvfp4"])
def test_views_few_tokens_and_short_ids_are_taken_as_they_come(tokens, kind):
    """Every second column of tokens, routing weights that lie the other way round, ids of 32 bits, none or one token."""
    held = weights(kind)
    ids = torch.randint(-1, EXPERTS + 2, (tokens, 3), dtype=torch.int32, generator=torch.manual_seed(3))
    x, share = torch.randn(tokens, 2 * HIDDEN)[:, ::2], torch.rand(3, tokens).T
    found = []
    for gate_up, down in (held, [each.all_unpacked() for each in held]):
        leaves = [each.detach().requires_grad_() for each in (x, share)]
        out = expert_mlp(leaves[0], ids, leaves[1], gate_up, down)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_routed_experts_alone_are_unpacked_in_a_bounded_room_and_nothing_of_them_is_kept(monkeypatch):
    held, asked, rooms, kept = weights(), [], set(), []
    unpack = PackedExperts.unpack

    def seen(self, expert, out=None):
        asked.append(expert)
        rooms.add(out.untyped_storage().data_ptr())
        assert out.untyped_storage().nbytes() <= 4 * 2 * WIDTH * HIDDEN
        return unpack(self, expert, out)

    monkeypatch.setattr(PackedExperts, "unpack", seen)

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


def in_mxfp4(rows=4, blocks=2, experts=3):
    """Bytes and scales of every kind: all codes and all powers of two that a checkpoint may hold, but not a number."""
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(0, 256, (experts, rows, blocks, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 253, (experts, rows, blocks), generator=generator, dtype=torch.uint8)
    scales[0, 0], scales[-1, -1] = 0, 252
    return numbers, scales


def test_mxfp4_is_what_checkpoints_hold_and_exact_in_bfloat16():
    numbers, scales = in_mxfp4()
    codes = torch.stack([numbers & 15, numbers >> 4], -1).flatten(3).long()
    wide = torch.cat([SIZES, -SIZES]).double()[codes] * 2.0 ** (scales.double() - 127)[..., None]
    theirs = wide.flatten(2).mT.float()
    for dtype in (torch.float32, torch.bfloat16):
        held = of_mxfp4(numbers, scales, dtype, turned=True)
        assert held.shape == (3, 64, 4)
        assert held.form.finite
        assert held.held.numbers.data_ptr() == numbers.data_ptr()
        assert torch.equal(held.all_unpacked().float(), theirs)
        assert held.packed_bytes * 8 == 4.25 * held.numel()
    unknown = scales.clone()
    unknown[1, 1, 1] = 255
    assert not of_mxfp4(numbers, unknown, torch.bfloat16, turned=True).form.finite
    assert of_mxfp4(numbers, unknown, torch.bfloat16, turned=False)[1].isnan().sum() == 32
    with pytest.raises(ValueError, match=r"scales \[E, rows, blocks\]; got \(3, 4, 2, 16\) and \(3, 4, 1\)"):
        of_mxfp4(numbers, scales[..., :1], torch.bfloat16, turned=False)


def test_packing_into_mxfp4_takes_the_nearest_numbers_and_what_is_one_already_as_it_is():
    torch.manual_seed(5)
    weight = torch.randn(2, 8, 80) * torch.logspace(-30, 30, 8)[:, None]
    weight[0, 0, 32:64] = 0
    held = weight_of(weight, "mxfp4")
    found = held.all_unpacked()
    assert torch.equal(weight_of(found, "mxfp4").all_unpacked(), found)
    powers = held.held.scales.view(2, 8, 3).repeat_interleave(32, 2)[..., :80].float() - 127
    nearest = (weight.abs() / 2**powers).unsqueeze(-1).sub(SIZES).abs().amin(-1)
    assert torch.equal(nearest * 2**powers, (weight - found).abs())
    # No other power of two would have been closer to a block.
    error = (weight - found)[..., :64].double().unflatten(-1, (2, 32)).square().sum(-1)
    for other in (-1, 1):
        scale = 2 ** (powers + other)[..., :64]
        off = ((weight.abs()[..., :64] / scale).unsqueeze(-1).sub(SIZES).abs().amin(-1) * scale).double()
        assert (error <= off.unflatten(-1, (2, 32)).square().sum(-1) * 1.000001).all()
    # Halfway it is the even one; turned weights have their blocks along what goes in all the same.
    half = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(1, 1, 4)
    assert weight_of(half, "mxfp4")[0, 0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    turned = weight_of(weight.transpose(1, 2), "mxfp4", turned=True)
    assert turned.shape == (2, 80, 8)
    assert torch.equal(turned.all_unpacked(), found.transpose(1, 2))
    weight[1, 2, 3] = torch.inf
    assert not weight_of(weight, "mxfp4").form.finite


def test_nvfp4_has_the_nearest_numbers_of_the_better_of_two_scales():
    torch.manual_seed(6)
    weight = torch.randn(2, 8, 40) * torch.logspace(-1, 1, 8)[:, None]
    weight[0, 0, 16:32] = 0
    held = weight_of(weight, "nvfp4")
    found = held.all_unpacked()
    scales = held.held.scales.view(2, 8, 3)
    steps = scales.view(torch.float8_e4m3fn).float() * held.held.middle[:, None, None]
    step = steps.repeat_interleave(16, 2)[..., :40]
    nearest = (weight.abs() / step).unsqueeze(-1).sub(SIZES).abs().amin(-1) * step
    torch.testing.assert_close((weight - found).abs(), nearest.nan_to_num(), rtol=1e-5, atol=1e-5)
    # Both choices are taken, each where it is the closer one, and less is lost than with MXFP4's powers of two.
    most = (torch.nn.functional.pad(weight, (0, 8)).unflatten(2, (3, 16)).abs().amax(-1) / steps).nan_to_num()
    assert {4, 6} <= set(most.round().flatten().tolist()) <= {0, 4, 5, 6, 7}
    assert (weight - found).norm() < 0.8 * (weight - weight_of(weight, "mxfp4").all_unpacked()).norm()
    assert held.packed_bytes == 2 * 8 * 3 * (8 + 1) + 2 * 4
    assert not weight_of(torch.zeros(1, 4, 20), "nvfp4").all_unpacked().any()
    weight[1, 2, 3] = torch.nan
    assert not weight_of(weight, "nvfp4").form.finite


def test_fp8_is_a_number_times_the_scale_of_its_block():
    torch.manual_seed(7)
    weight = torch.randn(2, 200, 130) * torch.logspace(-3, 3, 200)[:, None]
    held = weight_of(weight, "fp8")
    assert held.held.scales.shape == (2, 4)
    found = held.all_unpacked()
    for rows in (slice(128), slice(128, None)):
        for columns in (slice(128), slice(128, None)):
            own, back = weight[:, rows, columns], found[:, rows, columns]
            largest = own.abs().amax((1, 2))[:, None, None]
            assert ((own - back).abs() <= torch.maximum(own.abs() / 16, largest / 448 / 2**10) * 1.0001).all()
    numbers = held.held.numbers.view(2, 200, 130).view(torch.float8_e4m3fn)
    again = of_fp8(numbers, held.held.scales.view(2, 2, 2), (128, 128), torch.float32, turned=True)
    assert torch.equal(again.all_unpacked(), found.mT)
    assert again.held.numbers.data_ptr() == numbers.data_ptr()
    assert again.form.finite
    numbers.view(torch.uint8)[1, 5, 5] = 127
    assert not of_fp8(numbers, held.held.scales.view(2, 2, 2), (128, 128), torch.float32).form.finite
    with pytest.raises(ValueError, match=r"a float32 scale for each block of 64 x 128; got .* \(2, 2, 2\)"):
        of_fp8(numbers, held.held.scales.view(2, 2, 2), (64, 128), torch.float32)


def test_products_decode_where_rows_are_few_or_where_that_was_faster(tmp_path):
    """The way is picked by the rows of a tile, or by times of both; a weight whose blocks do not fit tiles is unpacked."""
    fits, odd = (
        weight_of(torch.ones(2, 64, columns, dtype=torch.bfloat16), "mxfp4" if columns % 64 else "nf4")
        for columns in (128, 40)
    )
    tuner, seen = Tuner(), []

    def inside(weight, slots):
        del seen[:]
        x = torch.ones(slots, weight.shape[2], dtype=torch.bfloat16)
        plan = launch.Plan(torch.empty(slots), *[torch.tensor([0, slots, slots])] * 3)
        launch._launch_all(launch.PRODUCT, x, plan, weight, 16, lambda weight, *told: seen.append(weight))
        assert all(isinstance(each, PackedExperts) for each in seen) or torch.equal(seen[-1][0], weight[0])
        return isinstance(seen[-1], PackedExperts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "TUNER", tuner)
        assert [inside(fits, 2), inside(fits, 256), inside(fits, 257), inside(odd, 2)] == [True, True, False, False]
        asked = []

        def by_the_second(runs):
            asked.append(len(runs))
            return [1.0] + [0.5] * (len(runs) - 1)

        tuner.start(by_the_second, lambda device: Kept(tmp_path / "card.json"))
        assert [inside(fits, 2), inside(fits, 300)] == [False, True]
        times = len(asked)
        assert [inside(fits, 2), inside(fits, 300), len(asked)] == [False, True, times]
    words = [each.words() for each in tuner.picked if each.tiles.kernel == "packed_experts_product"]
    assert words == [
        "packed_experts_product: unpacked first (0.5 ms, by hand 1)",
        "packed_experts_product: decoded inside the product (0.5 ms, by hand 1)",
    ]


IN_GROUPS = (
    {},
    {"zeros": True},
    {"columns": 37, "group": 16, "zeros": True},
    {"ordered": True, "zeros": True},
    {"group": 64},
)


def in_groups(kind, *, rows=5, columns=64, group=16, zeros=False, ordered=False, device="cpu"):
    """Random unsigned numbers of three experts, and what each stands for, one at a time, in float32."""
    generator = torch.Generator().manual_seed(4)
    bits, count = groups.BITS[kind], -(-columns // group)
    codes = torch.randint(0, 1 << bits, (3, rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(3, rows, count, generator=generator).half() + 0.01
    half = torch.full((3, rows, count), 1 << (bits - 1), dtype=torch.int16)
    zero = torch.randint(0, (1 << bits) + 1, half.shape, generator=generator, dtype=torch.int16) if zeros else half
    of = torch.stack([torch.randperm(columns, generator=generator) // group for _ in range(3)])
    of = of if ordered else (torch.arange(columns) // group).expand(3, -1)
    wide = torch.empty(3, rows, columns)
    for at in [(e, r, c) for e in range(3) for r in range(rows) for c in range(columns)]:
        place = at[0], at[1], int(of[at[0], at[2]])
        wide[at] = (int(codes[at]) - int(zero[place])) * scales[place].float()
    numbers = torch.stack([groups.in_bytes(each, bits) for each in codes])
    held = of_groups(
        kind, numbers.to(device), scales.to(device), group, columns, torch.float16,
        zeros=zero.to(device) if zeros else None, of_column=of.int().to(device) if ordered else None,
    )  # fmt: skip
    return held, wide


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("case", IN_GROUPS, ids=str)
def test_unsigned_numbers_in_groups_stand_for_their_distance_from_zero(kind, case):
    held, wide = in_groups(kind, **case)
    assert torch.equal(held.all_unpacked(), wide.half())
    assert torch.equal(held[1].float(), wide[1].half().float())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"group": 48}, "a scale for each group of 48 of 64 columns"),
        ({"columns": 66}, r"uint4 is bytes \[E, rows, 33\]"),
        ({"of_column": torch.full((3, 64), 9, dtype=torch.int32)}, "columns are of groups 0 to 3; got 9 to 9"),
    ],
)
def test_groups_that_do_not_cover_the_columns_are_refused(wrong, said):
    held = in_groups("uint4")[0].held
    told = {"group": 16, "columns": 64, "dtype": torch.float32, **wrong}
    with pytest.raises(ValueError, match=said):
        of_groups("uint4", held.numbers.view(3, 5, -1), held.scales.view(3, 5, -1), **told)


def unpacked_alike(device):
    """One launch gives those of some experts that have rows, bit for bit as bitsandbytes or plain torch unpacks each,
    whatever its size."""
    launches = []
    formats = torch.float16, torch.float32, torch.bfloat16
    numbers, scales = (part.to(device) for part in in_mxfp4())
    for dtype in formats:
        # The interpreter gets bfloat16 below its least normal number wrong.
        least = 2 if device == "cpu" and dtype == torch.bfloat16 else 0
        held = of_mxfp4(numbers, scales.clamp(min=least), dtype, turned=False)
        out = torch.empty(3, 4, 64, dtype=dtype, device=device)
        held.unpack_range(0, out)
        for expert, found in enumerate(out):
            assert torch.equal(found, held.unpack(expert)), (dtype, expert)
    for kind in KINDS if device == "cpu" or find_spec("bitsandbytes") else PLAIN:
        exact = device == "cuda" or kind == "mxfp4"
        for dtype in formats[: 3 if exact else 2]:  # the interpreter cuts bfloat16 where cards round
            for rows, columns in ((7, 24), (64, 100), (40, 448)):
                packer = Packer(5, kind, dtype)
                for _ in range(5):
                    packer.add((torch.randn(rows, columns, device=device) * 3).to(dtype))
                held = packer.done()
                starts = torch.tensor([0, 3, 4, 4, 9, 9], device=device, dtype=torch.int32)
                out = torch.full((4, rows, columns), float("nan"), dtype=dtype, device=device)
                held.unpack_range(1, out, starts)
                for expert, found in enumerate(out, 1):
                    same = torch.equal(found, held.unpack(expert)) if expert in (1, 3) else bool(found.isnan().all())
                    assert same, (kind, dtype, rows, columns, expert)
                held.unpack_range(1, out)
                assert torch.equal(out, torch.stack([held.unpack(expert) for expert in range(1, 5)]))
                launches.append(len(out))
    # Numbers and scales as files hold them: every code, and blocks that are no squares and are cut off.
    numbers = torch.arange(256, dtype=torch.uint8).repeat(3, 8, 1).view(3, 16, 128)[..., :100].contiguous()
    numbers = numbers.masked_fill(numbers & 127 == 127, 0).view(torch.float8_e4m3fn)
    for block in ((1, 100), (16, 100), (5, 48), (32, 128)):
        sides = [-(-side // size) for side, size in zip((16, 100), block, strict=True)]
        scales = torch.rand(3, *sides) * torch.logspace(-3, 3, 3)[:, None, None]
        held = of_fp8(numbers.to(device), scales.to(device), block, torch.float16)
        out = torch.empty(3, 16, 100, dtype=torch.float16, device=device)
        held.unpack_range(0, out)
        assert torch.equal(out, torch.stack([held.unpack(expert) for expert in range(3)])), block
    for kind in GROUPED:
        for case in IN_GROUPS:
            held = in_groups(kind, device=device, **case)[0]
            out = torch.empty(held.shape, dtype=torch.float16, device=device)
            held.unpack_range(0, out)
            assert torch.equal(out, torch.stack([held.unpack(expert) for expert in range(len(out))])), (kind, case)
    assert len(launches) == (9 * len(KINDS) if device == "cuda" else 6 * (len(KINDS) - 1) + 9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_launch_unpacks_as_bitsandbytes_does_on_the_gpu():
    unpacked_alike("cuda")


def one_graph_alike(monkeypatch):
    """Compiled with fullgraph, packed weights among a module's parameters, they give what they give eagerly."""
    from engine.kernels import experts

    monkeypatch.setattr(experts, "_in_graph", lambda *given: True)
    for case in CASES[:1] + [case for case in CASES if {"adapted", "gate"} & case.keys()]:
        told = {name: case[name] for name in ("adapted", "biased", "gate") if name in case}
        held = weights(case.get("kind", "nf4"), turned=case.get("turned", False))
        module = torch.nn.Module()
        module.gate_up, module.down = (torch.nn.Parameter(each, requires_grad=False) for each in held)
        run = torch.compile(
            lambda x, ids, routing, *_, at=module, **more: expert_mlp(x, ids, routing, at.gate_up, at.down, **more),
            fullgraph=True,
            backend="aot_eager",
        )
        for name, expected in block(*held, **told).items():
            torch.testing.assert_close(block(*held, **told, op=run)[name], expected, rtol=1e-6, atol=1e-6)


IN_THE_INTERPRETER = """
import pytest
from engine.kernels.experts import packed
from tests.engine.kernels import test_packed_experts as tests

packed.EXPERT_BUFFER = 2 * 4 * 3 * tests.WIDTH * tests.HIDDEN  # room for two experts
with pytest.MonkeyPatch.context() as patch:
    tests.{}
print("agree")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        'unpacked_alike("cpu")',
        "test_every_case_is_that_of_the_unpacked_numbers()",
        "one_graph_alike(patch)",
    ],
)
def test_the_kernels_take_groups_of_unpacked_experts(call):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER.format(call)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "agree"), done.stderr[-2000:]


class Ordered:
    """A stream, or an event, by what is sure to be over before what it is given next."""

    current = None

    def __init__(self, over=()):
        self.over = set(over)

    def record_event(self):
        return Ordered(self.over)

    def wait_event(self, event):
        self.over |= event.over

    wait_stream = wait_event


@pytest.mark.parametrize("fails_at", [None, 0, 1, 3])
def test_what_is_unpacked_ahead_waits_for_its_room_and_is_waited_for_also_by_one_that_fails(monkeypatch, fails_at):
    here, side, other = Ordered(), Ordered(), Ordered()
    Ordered.current = here
    monkeypatch.setattr(packed, "_streams", lambda device: (side, other))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Ordered.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Ordered, "current", stream))
    begun = []

    @contextlib.contextmanager
    def within(stream):
        before, Ordered.current = Ordered.current, stream
        yield
        Ordered.current = before

    def does(what, turn, *before):
        assert set(before) <= Ordered.current.over, (what, turn)
        Ordered.current.over.add((what, turn))
        begun.append((what, turn))

    monkeypatch.setattr(torch.cuda, "stream", within)

    def unpacked(turn, beside):
        does("unpacked", turn, *([("product", turn - 2)] if turn >= 2 else []))
        return turn

    def multiplied():
        for turn in packed._one_ahead(unpacked, 5, torch.device("cuda", 0)):
            does("product", turn, ("unpacked", turn))
            if turn == fails_at:
                raise torch.OutOfMemoryError

    with contextlib.suppress(torch.OutOfMemoryError):
        multiplied()
    assert Ordered.current is here
    assert len(begun) == (10 if fails_at is None else 2 * fails_at + 3)
    assert set(begun) <= here.over
