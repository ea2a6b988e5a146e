"""What every device is asked of experts: error ratios along each axis, spread and skewed routing, empty experts, sentinels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from engine.kernels.experts import ACTIVATIONS, ExpertLoRA, Gate, expert_mlp, expert_mlp_reference, launch
from engine.kernels.experts import packed as packing
from engine.kernels.experts.launch import planned
from engine.kernels.experts.packed import KINDS, PLAIN, Packer
from tests.engine.kernels.judging import DEVICE, DTYPES, INTERPRETED, combined, compare, rms, said


@dataclass(frozen=True)
class Case:
    """One block of experts; the common case along whose axes the others lie."""

    tokens: int = 9
    experts: int = 4
    hidden: int = 48
    width: int = 24
    top_k: int = 2
    rank: int = 3
    dtype: torch.dtype = torch.bfloat16
    routing: str = "even"
    activation: str = "silu"
    interleaved: bool = False
    transposed: bool = False
    biased: bool = False
    adapted: str = "both"
    trained: bool = False

    def ids(self) -> torch.Tensor:
        spread = torch.rand(self.tokens, self.experts, device=DEVICE)
        if self.routing == "skewed":
            spread += 3.0 / (1 + torch.arange(self.experts, device=DEVICE))
        if self.routing == "empty":
            spread[:, self.top_k :] -= 2
        ids = spread.topk(self.top_k, -1).indices
        if self.routing == "one":
            ids = torch.full_like(ids, self.experts - 1)
        if self.routing == "sentinels":
            ids[::2, 0] = self.experts
            ids[1:2, -1] = -1
            ids[-1] = self.experts + 7
        return ids


def block(case: Case, op, ids, moved: float = 0.0):
    """`op` on flat tensors, as `compare` calls it; those that a case has not are left out. A clamp is `moved` by so much."""
    names = ["x", "routing", "gate_up", "down"]
    names += ["gate_up_bias", "down_bias"] if case.biased else []
    names += ["a1", "b1"] if case.adapted in ("both", "gate_up") else []
    names += ["a2", "b2"] if case.adapted in ("both", "down") else []

    def call(*tensors):
        t = dict(zip(names, tensors, strict=True))
        gate_up, down = t["gate_up"], t["down"]
        if case.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return op(
            t["x"], ids, t["routing"], gate_up, down,
            gate_up_bias=t.get("gate_up_bias"), down_bias=t.get("down_bias"),
            gate_up_lora=ExpertLoRA(t["a1"], t["b1"], 2.0) if "a1" in t else None,
            down_lora=ExpertLoRA(t["a2"], t["b2"], 0.5) if "a2" in t else None,
            gate=Gate(case.activation, case.interleaved, Gate().limit + moved),
        )  # fmt: skip

    return names, call


def either_side(case: Case, ids) -> list:
    """The reference with a clamp moved either way by what numbers there are rounded by, half a step, and as much for what the
    adapter was rounded by before; none where nothing is clamped."""
    step = torch.finfo(case.dtype).eps * 2.0 ** math.floor(math.log2(Gate().limit))
    moves = (-step, step) if case.activation == "clamped_swiglu" else ()
    return [block(case, expert_mlp_reference, ids, moved)[1] for moved in moves]


def inputs(case: Case, names: list[str]) -> list[torch.Tensor]:
    experts, hidden, width, rank = case.experts, case.hidden, case.width, case.rank
    shapes = {
        "x": (case.tokens, hidden), "routing": (case.tokens, case.top_k), "gate_up": (experts, 2 * width, hidden),
        "down": (experts, hidden, width), "gate_up_bias": (experts, 2 * width), "down_bias": (experts, hidden),
        "a1": (experts, rank, hidden), "b1": (experts, 2 * width, rank), "a2": (experts, rank, width),
        "b2": (experts, hidden, rank),
    }  # fmt: skip
    frozen = {"gate_up", "down", "gate_up_bias", "down_bias"}
    sizes = {
        "x": 1.0,
        "routing": 1.0,
        "gate_up": hidden**-0.5 * 2,
        "down": width**-0.5,
        "a1": hidden**-0.5,
        "a2": width**-0.5,
    }
    found = []
    for name in names:
        shape = shapes[name]
        if case.transposed and name in ("gate_up", "down"):
            shape = (shape[0], shape[2], shape[1])
        x = (torch.randn(shape, device=DEVICE) * sizes.get(name, 0.3)).to(case.dtype)
        found.append(x.requires_grad_(case.trained or name not in frozen))
    return found


def check(case: Case, name: str) -> None:
    ids = case.ids()
    names, ours = block(case, expert_mlp, ids)
    _, theirs = block(case, expert_mlp_reference, ids)
    compare(
        f"experts {name}", ours, theirs, inputs(case, names), 1,
        handful=INTERPRETED or case.tokens < 16, either=either_side(case, ids),
    )  # fmt: skip


def held_in(kind: str, weight: torch.Tensor, turned: bool) -> torch.Tensor:
    """All experts [E, ...] packed; `turned` ones are the other way round in the kinds that go along what comes in."""
    packer = Packer(len(weight), kind, weight.dtype, turned=turned and kind in ("mxfp4", "nvfp4"))
    for expert in weight.detach():
        packer.add(expert)
    return packer.done()


@contextmanager
def decoding(inside: bool, ahead: bool = False) -> Iterator[list[bool]]:
    """Products decode packed weights inside wherever they can, or nowhere, and unpack some beside others or not; for each that was
    asked for whether it can be decoded inside."""
    asked: list[bool] = []
    own = launch.DECODED_ROWS, launch.AHEAD, launch.decoding
    tiles_of = launch.decoding

    def seen(*given):
        tiles = tiles_of(*given)
        asked.append(tiles is not None)
        return tiles

    launch.DECODED_ROWS, launch.AHEAD, launch.decoding = 2**20 if inside else 0, ahead, seen
    try:
        yield asked
    finally:
        launch.DECODED_ROWS, launch.AHEAD, launch.decoding = own


def check_packed(kind: str, case: Case, room: int, inside: bool = False, ahead: bool = False) -> None:
    """As `check`, over packed weights, of which so many experts are unpacked at a time, the next `ahead` or not, or which are
    decoded `inside` the products; the truth has their numbers."""
    ids = case.ids()
    names, theirs = block(case, expert_mlp_reference, ids)
    given = dict(zip(names, inputs(case, names), strict=True))
    held = {name: held_in(kind, given[name], case.transposed) for name in ("gate_up", "down")}
    # One by one, in plain torch or by bitsandbytes: not by the kernel that is looked at.
    given |= {name: torch.stack([each.unpack(i) for i in range(case.experts)]) for name, each in held.items()}
    turned = {name: each.transpose(1, 2) if case.transposed else each for name, each in held.items()}

    def over_packed(x, ids, routing, gate_up, down, **more):
        return expert_mlp(x, ids, routing, turned["gate_up"], turned["down"], **more)

    ours = block(case, over_packed, ids)[1]
    before = packing.EXPERT_BUFFER
    packing.EXPERT_BUFFER = room * 2 * case.width * case.hidden * case.dtype.itemsize
    way = " decoded inside" if inside else f" {room} at a time" + (", the next ahead" if ahead else "")
    try:
        with decoding(inside, ahead) as asked:
            compare(
                f"experts in {kind}{way} {case}", ours, theirs, list(given.values()), 1,
                handful=INTERPRETED or case.tokens < 16, either=either_side(case, ids),
            )  # fmt: skip
        said(not inside or (len(asked) == 4 and all(asked)), f"experts in {kind}: all four products decode {case}")
    finally:
        packing.EXPERT_BUFFER = before


def _tiles_alike(kind: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Rows of an identity through both products give a weight's numbers, bit for bit those that are unpacked."""
    weight = (torch.randn(2, rows, columns, device=DEVICE) * 0.1).to(dtype)
    held = held_in(kind, weight, False)
    every = torch.stack([held.unpack(i) for i in range(2)])
    for turned in (False, True):
        packed, wide = (each.transpose(1, 2) if turned else each for each in (held, every))
        depth = wide.shape[2]
        for some in (16, 128):
            x = torch.eye(depth, dtype=dtype, device=DEVICE).repeat(2, 1)
            ids = torch.arange(2, device=DEVICE).repeat_interleave(depth)[:, None]
            size = 16 if INTERPRETED else some
            with decoding(True) as asked:
                out = launch._product(x, packed, None, None, None, planned(ids, 2, size), size, top_k=1)
            same = torch.equal(out.view(2, depth, -1), wide.transpose(1, 2))
            said(
                same and asked == [True],
                f"{kind} tiles of {rows} x {columns}, turned {turned}, {size} rows",
            )
            if INTERPRETED:
                break


def experts_decoded() -> None:
    """Packed experts decoded inside the products, of every kind that can be had here, or of KIND alone."""
    torch.manual_seed(5)
    if INTERPRETED:
        common = Case(dtype=torch.float16, hidden=64, width=64, experts=3)
        sizes = [(64, 128)]
    else:
        common = Case(tokens=300, experts=8, hidden=256, width=192, top_k=4, rank=16)
        sizes = [(192, 256), (1536, 2048), (2048, 768)]
    other = replace(
        common, activation="clamped_swiglu", interleaved=True, transposed=True, biased=True, routing="sentinels"
    )
    served = [kind for kind in KINDS if kind in launch.DECODED and (find_spec("bitsandbytes") or kind in PLAIN)]
    for place, kind in enumerate([os.environ["KIND"]] if "KIND" in os.environ else served):
        for rows, columns in sizes:
            _tiles_alike(kind, rows, columns, torch.float16 if INTERPRETED else torch.bfloat16)
        both = common, other
        for case in both[place % 2 :][:1] if "PAIRWISE" in os.environ else both:
            check_packed(kind, case, 100, inside=True)
        if INTERPRETED or kind in ("fp4", "nvfp4"):  # decoded by the code of NF4 and MXFP4
            continue
        every = (
            {"tokens": 1},
            {"tokens": 5000},
            {"routing": "one"},
            {"routing": "empty"},
            {"dtype": torch.float16, "experts": 33},
        )
        # What only the launches around depend on is compiled for one kind.
        around = ({"tokens": 40}, {"adapted": "none"}, {"experts": 128, "hidden": 2048, "width": 768, "top_k": 8})
        for more in (*every, *(around if kind == served[0] else ())):
            check_packed(kind, replace(common, **more), 100, inside=True)


def experts_packed() -> None:
    """Packed experts of every kind that can be had here, or of KIND alone, all at once and a few at a time."""
    torch.manual_seed(4)
    common = (
        Case(dtype=torch.float16)
        if INTERPRETED
        else Case(tokens=300, experts=8, hidden=256, width=192, top_k=4, rank=16)
    )
    odd = replace(
        common, hidden=40, width=18, activation="clamped_swiglu", interleaved=True, transposed=True, biased=True,
        routing="sentinels",
    )  # fmt: skip
    served = KINDS if find_spec("bitsandbytes") else PLAIN
    for place, kind in enumerate([os.environ["KIND"]] if "KIND" in os.environ else served):
        both = ((common, 3), (odd, 1))
        # By default each kind meets one of the two, in turn.
        for case, room in both[place % 2 :][:1] if "PAIRWISE" in os.environ else both:
            check_packed(kind, case, room)
        if INTERPRETED:
            continue
        # What is behind the unpacking is one code for all kinds.
        few = {"tokens": 5000}, {"routing": "empty"}
        more_of_it = {"tokens": 1}, {"routing": "one"}, {"adapted": "none"}
        for more in (*few, *(more_of_it if kind == served[0] else ())):
            check_packed(kind, replace(common, **more), 100)
            check_packed(kind, replace(common, **more), 3, ahead=True)
        for ahead in (False, True):
            check_packed(kind, replace(common, dtype=torch.float16, experts=33, hidden=130), 7, ahead=ahead)


def axes() -> dict[str, list[Case]]:
    """Cases that differ from the common one along a single axis; small ones for the interpreter."""
    if INTERPRETED:
        return _small_axes()
    common = Case(tokens=300, experts=8, hidden=256, width=192, top_k=4, rank=16)
    return {
        "tokens": [replace(common, tokens=n) for n in (1, 7, 4096, 65_536)],
        "experts": [replace(common, experts=n) for n in (5, 33, 256)],
        "hidden": [replace(common, hidden=n) for n in (40, 130, 2048)],
        "width": [replace(common, width=n) for n in (17, 768, 1000)],
        "top_k": [replace(common, top_k=n) for n in (1, 3, 8)],
        "rank": [replace(common, rank=n) for n in (1, 7, 128)],
        "dtype": [replace(common, dtype=dtype) for dtype in DTYPES],
        "routing": [replace(common, routing=kind) for kind in ("skewed", "empty", "one", "sentinels")],
        "activation": [replace(common, activation=kind, biased=kind == ACTIVATIONS[3]) for kind in ACTIVATIONS[1:]],
        "gate": [replace(common, interleaved=True, transposed=turn, biased=turn) for turn in (False, True)],
        "transposed": [replace(common, transposed=True)],
        "adapted": [replace(common, adapted=kind, biased=kind == "none") for kind in ("none", "gate_up", "down")],
        "trained": [replace(common, trained=True, biased=True, transposed=turn) for turn in (False, True)],
    }


def _small_axes() -> dict[str, list[Case]]:
    # No bfloat16, which the interpreter cuts where a card rounds.
    common = Case(tokens=5, experts=3, hidden=16, width=16, top_k=2, rank=4, dtype=torch.float32)
    return {
        "tokens": [replace(common, tokens=n) for n in (1, 2, 17)],
        "experts": [replace(common, experts=n) for n in (2, 5)],
        "hidden": [replace(common, hidden=n) for n in (17, 24, 40)],
        "width": [replace(common, width=n) for n in (7, 17, 24)],
        "top_k": [replace(common, top_k=n) for n in (1, 3, 4, 5, 6, 7, 8)],
        "rank": [replace(common, rank=n) for n in (1, 7, 20, 128)],
        "dtype": [common, replace(common, dtype=torch.float16)],
        "routing": [replace(common, routing=kind) for kind in ("skewed", "empty", "one", "sentinels")],
        "activation": [replace(common, activation=kind, biased=kind == ACTIVATIONS[3]) for kind in ACTIVATIONS[1:]],
        "gate": [replace(common, interleaved=True, transposed=turn, biased=turn) for turn in (False, True)],
        "transposed": [replace(common, transposed=True)],
        "adapted": [replace(common, adapted=kind, biased=kind == "none") for kind in ("none", "gate_up", "down")],
        "trained": [replace(common, trained=True, biased=True, transposed=turn) for turn in (False, True)],
    }


FEW = {
    "common": Case(dtype=torch.float16),
    "gpt-oss": Case(
        dtype=torch.float16,
        activation="clamped_swiglu",
        interleaved=True,
        transposed=True,
        biased=True,
        routing="skewed",
    ),
    "all trained": Case(dtype=torch.float32, trained=True, biased=True, routing="sentinels", width=17, rank=1),
    "transposed, one expert": Case(
        dtype=torch.float32, transposed=True, routing="one", activation="gelu_tanh", rank=20
    ),
    "down alone": Case(activation="gelu", adapted="down", hidden=40, experts=2, top_k=1, tokens=20),
    "no adapters": Case(dtype=torch.float16, adapted="none", biased=True, interleaved=True, routing="empty", top_k=1),
    "gate_up alone, one token": Case(dtype=torch.float32, adapted="gate_up", tokens=1, experts=37, top_k=4),
}
"""For the interpreter, where a case takes a second: together they meet every value of every axis."""


def experts_cases() -> None:
    """One axis at a time from a common case, on a card of those named in AXES or of all."""
    torch.manual_seed(3)
    some = os.environ["AXES"].split() if "AXES" in os.environ else axes()
    every = FEW if INTERPRETED else {f"{axis} {i}": c for axis in some for i, c in enumerate(axes()[axis])}
    for name, case in every.items():
        if case.dtype in DTYPES:
            check(case, f"{name} {case}")


def experts_crosses() -> None:
    """CROSSES cases, by default 4 on a card and none in the interpreter, that differ along many axes at once, drawn from SEED: a
    card takes eight seconds a case, nearly all of it compiling, and some eight seeds side by side."""
    count = int(os.environ.get("CROSSES", "0" if INTERPRETED else "4"))
    choose = torch.Generator().manual_seed(int(os.environ.get("SEED", "0")))
    common = axes()["dtype"][0 if INTERPRETED else 1]
    options = [[case for case in cases if case.tokens < 5000] for cases in axes().values()]
    for i in range(count):
        case = common
        for cases in options:
            other = cases[int(torch.randint(len(cases), (1,), generator=choose))]
            if torch.rand(1, generator=choose) < 0.5:
                case = replace(case, **{k: v for k, v in vars(other).items() if v != getattr(common, k)})
        case = replace(case, experts=max(case.experts, case.top_k))
        check(case, f"cross {i} {case}")


def experts_plan() -> None:
    """Rows are in the order of a stable sort, and tiles cover each expert's rows once."""
    for tokens, experts, top_k, rows in combined((1, 65, 300), (1, 5, 40), (1, 3), (16, 64)):
        ids = torch.randint(-1, experts + 1, (tokens, top_k), device=DEVICE)
        plan = planned(ids, experts, rows)
        flat = ids.reshape(-1)
        known = (flat >= 0) & (flat < experts)
        sorted_slots = torch.where(known, flat, experts).sort(stable=True).indices[: int(known.sum())]
        good = torch.equal(plan.order[: len(sorted_slots)].long(), sorted_slots)
        covered = []
        for expert, first in zip(plan.tile_expert.tolist(), plan.tile_row.tolist(), strict=True):
            if expert < experts:
                end = min(first + rows, int(plan.starts[expert + 1]))
                covered += [(row, expert) for row in range(first, end)]
        wanted = [(row, int(flat[slot])) for row, slot in enumerate(sorted_slots)]
        said(good and covered == wanted, f"experts plan {tokens} {experts} {top_k} {rows}")
    # Several warps read the same count where there are few: written over, a later one would read what is no count any more.
    from engine.kernels.experts.kernels import plan_kernel

    counts, before = (
        torch.arange(6, dtype=torch.int32, device=DEVICE).view(2, 3),
        torch.empty(2, 3, dtype=torch.int32, device=DEVICE),
    )
    starts, ends = (torch.empty(size, dtype=torch.int32, device=DEVICE) for size in (4, 3))
    plan_kernel[(1,)](counts, before, starts, ends, 2, 3, BINS=32, CHUNK=2, ROWS=16, num_warps=8)
    good = counts.flatten().tolist() == list(range(6)) and before.tolist() == [[0, 0, 0], [0, 1, 2]]
    said(
        good and starts.tolist() == [0, 3, 8, 15] and ends.tolist() == [1, 2, 3], "experts plan leaves its counts alone"
    )


def experts_registered() -> None:
    """The operation that compiled code calls: numbers of the eager form, and torch's checks of its fake form."""
    from engine.kernels.experts.registered import expert_mlp_op

    case = Case(dtype=torch.float32, biased=True)
    ids = case.ids()
    names, ours = block(case, expert_mlp, ids)
    given = inputs(case, names)
    x, routing, *weights = given
    numbers = [7.0, 1.702, 2.0, 0.5]
    found = []
    for run in (lambda: expert_mlp_op(x, ids, routing, *weights, "silu", False, numbers)[0], lambda: ours(*given)):
        out = run()
        leaves = [each for each in given if each.requires_grad]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    said(all(map(torch.equal, *found)), "experts registered")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(expert_mlp_op, (x, ids, routing, *weights, "silu", False, numbers), test_utils=checks)
    print("ok   experts registered: schema, autograd, fake form")


def experts_formats() -> None:
    """Adapters and routing weights in float32 beside float16 products: gradients in their formats, and no further off."""
    case = Case(dtype=torch.float16)
    ids = case.ids()
    names, _ = block(case, expert_mlp, ids)
    given = inputs(case, names)
    found = []
    for op in (expert_mlp, expert_mlp_reference):
        leaves = [
            each.detach()
            .to(torch.float32 if name in ("routing", "a1", "b1", "a2", "b2") else each.dtype)
            .requires_grad_()
            for name, each in zip(names, given, strict=True)
        ]
        out = block(case, op, ids)[1](*leaves)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    kinds = [out.dtype == each.dtype for each, out in zip(leaves, found[0][1:], strict=True)]
    worst = max(rms(a.float() - b.float()) / rms(b.float()) for a, b in zip(*found, strict=True))
    said(all(kinds) and worst < 5e-3, "experts with float32 adapters", f"{worst:.1e} apart")


def experts_empty() -> None:
    """No token, and tokens of no expert at all: zeros, and gradients of zeros."""
    for tokens, ids in ((0, None), (3, torch.full((3, 2), 4, device=DEVICE))):
        case = Case(tokens=tokens)
        names, ours = block(
            case, expert_mlp, torch.zeros(0, 2, dtype=torch.long, device=DEVICE) if ids is None else ids
        )
        given = inputs(case, names)
        out = ours(*given)
        leaves = [each for each in given if each.requires_grad]
        grads = torch.autograd.grad(out.sum(), leaves, materialize_grads=True)
        zeros = all(not each.any() for each in (out, *grads))
        said(out.shape == (tokens, case.hidden) and zeros, f"experts for {tokens} tokens of none")


def _far_apart_in_the_interpreter() -> None:
    """Rows and experts 2^30 numbers apart, so that the third lies beyond 2^31; nothing is ever written between them."""
    from triton.runtime.interpreter import GridExecutor

    case = Case(tokens=3, experts=3, hidden=16, width=16, rank=4, dtype=torch.float16)
    ids = torch.tensor([[0, 2], [2, 1], [1, 2]])
    names, ours = block(case, expert_mlp, ids)
    near = inputs(case, names)

    def apart(each: torch.Tensor) -> torch.Tensor:
        step = 2**30 + 64
        # A storage, as what `torch.empty` gives is filled here.
        room = torch.UntypedStorage((step * (len(each) - 1) + each[0].numel()) * each.element_size())
        spread = torch.empty(0, dtype=each.dtype).set_(room, 0, each.shape, (step, *each.stride()[1:]))
        return spread.copy_(each.detach()).requires_grad_(each.requires_grad)

    far = [apart(each) if name in ("x", "gate_up", "down") else each for name, each in zip(names, near, strict=True)]
    plain = GridExecutor._restore_args_dev
    GridExecutor._restore_args_dev = lambda *_: None  # it copies every storage onto itself, touched or not
    try:
        found, wanted = (
            (out := ours(*given), *torch.autograd.grad(out.sum(), [each for each in given if each.requires_grad]))
            for given in (far, near)
        )
    finally:
        GridExecutor._restore_args_dev = plain
    same = all(map(torch.equal, found, wanted)) and bool(found[0].any())
    said(same, "experts with rows and weights 2^31 numbers apart", "as if they lay near" if same else "other numbers")


def experts_far() -> None:
    """More than 2^31 numbers in the rows, and in the weights: what lies far away is computed as if it lay near."""
    if INTERPRETED:
        _far_apart_in_the_interpreter()
        return
    case = Case(tokens=140_000, experts=8, hidden=2048, width=16, top_k=8, rank=4)
    ids = case.ids()
    names, ours = block(case, expert_mlp, ids)
    given = inputs(case, names)
    out = ours(*given)
    dx, d_routing = torch.autograd.grad(out.square().sum(), given[:2])
    near = [each.detach()[-500:].requires_grad_() for each in given[:2]]
    few = block(case, expert_mlp, ids[-500:])[1](*near, *given[2:])
    pairs = zip(
        (out[-500:], dx[-500:], d_routing[-500:]), (few, *torch.autograd.grad(few.square().sum(), near)), strict=True
    )
    worst = max(rms(a - b) / rms(b) for a, b in pairs)
    said(worst < 1e-2, "experts with rows beyond 2^31 numbers", f"{worst:.1e} apart")
    del given, out, dx, near, few
    case = Case(tokens=300, experts=256, hidden=2048, width=2304, routing="one")
    names, ours = block(case, expert_mlp, case.ids())
    given = inputs(case, names)
    out = ours(*given)
    last = [each[-1:] if each.dim() == 3 else each for each in given]
    alone = replace(case, experts=1)
    first = torch.zeros(case.tokens, case.top_k, dtype=torch.long, device=DEVICE)
    found = block(alone, expert_mlp, first)[1](*last)
    pairs = zip(
        (out, *torch.autograd.grad(out.sum(), given[:2])),
        (found, *torch.autograd.grad(found.sum(), given[:2])),
        strict=True,
    )
    worst = max(rms(a - b) / rms(b) for a, b in pairs)
    said(worst < 1e-2, "experts with weights beyond 2^31 numbers", f"{worst:.1e} apart")
