"""Frozen experts held in four or eight bits, and the pass over them in which routed experts alone are unpacked.

`PackedExperts` shows the shape and the format of the weight that it stands for, so that modules and adapters take it for
one. Each expert is packed by itself by bitsandbytes. The pass sorts the slots by expert, unpacks as many routed experts
at a time as a bounded buffer holds, again in the backward pass, and keeps nothing unpacked in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.device import kernel_serves
from engine.kernels.experts.launch import (
    Kept,
    Plan,
    Settings,
    Wanted,
    backward,
    formats_of,
    forward,
    prepared,
    serves,
)
from engine.kernels.experts.reference import ExpertLoRA, expert_mlp_reference
from engine.kernels.requirements import EXPERT_BUFFER
from engine.kernels.shapes import first_derivatives_alone

KINDS = ("nf4", "fp4", "int8")
_Aten: Any = torch.ops.aten


class Held(NamedTuple):
    """What all experts of one weight are held in, an expert's numbers in one row of each.

    numbers: [E, bytes] uint8, two weights in each, or [E, rows * columns] int8; scales: [E, blocks] uint8, or float32 of
    each row; of four bits also `middle` [E] and `steps` [E, blocks of scales], float32, by which the scales were quantized
    again, and the two tables that codes stand for.
    """

    numbers: Tensor
    scales: Tensor
    middle: Tensor | None = None
    steps: Tensor | None = None
    code: Tensor | None = None
    scale_code: Tensor | None = None


class Form(NamedTuple):
    """How it is packed: kind, rows and columns of one expert as stored, whether it is shown turned, weights of one scale
    and scales of one step, the format that it is unpacked to, and whether every number was finite."""

    kind: str
    rows: int
    columns: int
    turned: bool
    block: int
    scale_block: int
    dtype: torch.dtype
    finite: bool


class PackedExperts(torch.Tensor):
    """A weight [E, out, in] of frozen experts in few bits. It trains never; what is asked of it beyond its shape, its place
    and single experts is answered from all of them unpacked, and writing to it is refused."""

    held: Held
    form: Form
    # Else results would be taken for packed ones.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Held, form: Form) -> PackedExperts:
        sides = (form.columns, form.rows) if form.turned else (form.rows, form.columns)
        made: PackedExperts = torch.Tensor._make_wrapper_subclass(
            cls, (held.numbers.shape[0], *sides), dtype=form.dtype, device=held.numbers.device, requires_grad=False
        )
        made.held, made.form = held, form
        return made

    def __init__(self, held: Held, form: Form) -> None:
        pass

    @property
    def packed_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(each.numel() * each.element_size() for each in self.held if each is not None)

    def unpack(self, expert: int, out: Tensor | None = None) -> Tensor:
        """The numbers [out, in] of one expert, written into `out` [rows, columns] as stored where that is given."""
        found = _unpacked(self.held, self.form, expert, out)
        return found.T if self.form.turned else found

    def unpack_into(self, experts: Tensor, out: Tensor) -> None:
        """Writes the experts of these numbers [n] into `out` [n, rows, columns] as stored: in one launch on a card."""
        if kernel_serves(self.held.numbers):
            from engine.kernels.experts.unpack import unpack

            unpack(self.held, self.form, experts, out)
            return
        for expert, place in zip(experts.tolist(), out, strict=True):
            _unpacked(self.held, self.form, expert, place)

    def all_unpacked(self) -> Tensor:
        """[E, out, in], every expert."""
        form, experts = self.form, self.shape[0]
        every = torch.empty(experts, form.rows, form.columns, dtype=form.dtype, device=self.device)
        self.unpack_into(torch.arange(experts, device=self.device), every)
        return every.transpose(1, 2) if form.turned else every

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedExperts({self.form.kind}, {tuple(self.shape)}, {self.form.dtype}, {self.device})"

    def __getattr__(self, name: str) -> Tensor | None:
        """A part by its name in `Held`, as torch asks for the parts of a tensor that is moved with its module."""
        if name in Held._fields:
            return getattr(self.held, name)
        raise AttributeError(name)

    def __tensor_flatten__(self) -> tuple[list[str], Form]:
        return [name for name, part in self.held._asdict().items() if part is not None], self.form

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], form: Form, size: Any, stride: Any) -> PackedExperts:
        return PackedExperts(Held(**parts), form)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        itself = args[0] if args and isinstance(args[0], PackedExperts) else None
        if itself is not None and (answer := _ANSWERS.get(func)) is not None:
            found = answer(itself, *args[1:], **kwargs)
            if found is not NotImplemented:
                return found
        if func._schema.is_mutable and itself is not None:
            raise RuntimeError("packed experts cannot be written to: their numbers have too few bits")
        plain, more = torch.utils._pytree.tree_map_only(PackedExperts, PackedExperts.all_unpacked, (args, kwargs))
        return func(*plain, **more)


def _same(packed: PackedExperts, *args: Any, **kwargs: Any) -> PackedExperts:
    return PackedExperts(packed.held, packed.form)


def _cloned(packed: PackedExperts, *args: Any, **kwargs: Any) -> PackedExperts:
    return PackedExperts(_each(packed.held, torch.clone), packed.form)


def _moved(packed: PackedExperts, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> PackedExperts:
    """On another device, or shown in another format: the bits stay as they are."""
    form = packed.form if dtype is None else packed.form._replace(dtype=dtype)
    blocking = kwargs.get("non_blocking", False)
    return PackedExperts(_each(packed.held, lambda part: part.to(device or part.device, non_blocking=blocking)), form)


def _turned(packed: PackedExperts, first: int, second: int) -> Any:
    if {first % 3, second % 3} != {1, 2}:
        return NotImplemented
    return PackedExperts(packed.held, packed.form._replace(turned=not packed.form.turned))


def _one(packed: PackedExperts, dim: int, index: int) -> Any:
    return packed.unpack(index % packed.shape[0]) if dim == 0 else NotImplemented


def _each(held: Held, change: Callable[[Tensor], Tensor]) -> Held:
    numbers, scales, *more = held
    assert numbers is not None
    assert scales is not None
    return Held(change(numbers), change(scales), *(None if part is None else change(part) for part in more))


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _Aten.detach.default: _same,
    _Aten.alias.default: _same,
    _Aten.clone.default: _cloned,
    _Aten._to_copy.default: _moved,
    _Aten.transpose.int: _turned,
    _Aten.select.int: _one,
}


class Packer:
    """Takes the experts [rows, columns] of one weight in order and packs each as it comes, by bitsandbytes' own functions."""

    def __init__(self, experts: int, kind: str, dtype: torch.dtype) -> None:
        self.experts, self.kind, self.dtype = experts, kind, dtype
        self._place = 0
        self._held: Held | None = None
        self._form: Form | None = None
        self._finite: list[Tensor] = []

    def add(self, expert: Tensor) -> None:
        """Packs the next expert. Raises ValueError for one of another shape than the first, or too many."""
        parts, form = _packed(expert.detach().to(self.dtype).contiguous(), self.kind)
        if self._held is None:
            self._held, self._form = _each(parts._replace(code=None, scale_code=None), self._room), form
        if form != self._form or self._place >= self.experts:
            raise ValueError(
                f"expert {self._place} of {self.experts} is {form.rows} x {form.columns}; wanted {self._form}"
            )
        for room, part in zip(self._held[:4], parts[:4], strict=True):
            if room is not None and part is not None:
                room[self._place] = part
        self._held = self._held._replace(code=parts.code, scale_code=parts.scale_code)
        self._finite.append(expert.isfinite().all())
        self._place += 1

    def done(self) -> PackedExperts:
        """The weight. Raises ValueError where experts are missing."""
        if self._held is None or self._form is None or self._place < self.experts:
            raise ValueError(f"{self._place} of {self.experts} experts were given")
        finite = bool(torch.stack(self._finite).all())
        return PackedExperts(self._held, self._form._replace(finite=finite))

    def _room(self, part: Tensor) -> Tensor:
        return torch.empty(self.experts, *part.shape, dtype=part.dtype, device=part.device)


def _packed(expert: Tensor, kind: str) -> tuple[Held, Form]:
    """One expert's parts, and their form."""
    from bitsandbytes import functional

    rows, columns = expert.shape
    if kind == "int8":
        numbers, scales, _ = functional.int8_vectorwise_quant(expert.half())
        return Held(numbers.flatten(), scales), Form(kind, rows, columns, False, columns, 1, expert.dtype, True)
    numbers, state = functional.quantize_4bit(expert, quant_type=kind, compress_statistics=True)
    second = state.state2
    held = Held(numbers.flatten(), state.absmax, state.offset, second.absmax, state.code, second.code)
    return held, Form(kind, rows, columns, False, state.blocksize, second.blocksize, expert.dtype, True)


def _unpacked(held: Held, form: Form, expert: int, out: Tensor | None) -> Tensor:
    from bitsandbytes import functional

    shape, numbers, scales = (form.rows, form.columns), held.numbers[expert], held.scales[expert]
    if form.kind == "int8":
        found = functional.int8_vectorwise_dequant(numbers.view(shape), scales).to(form.dtype)
    else:
        assert held.middle is not None
        assert held.steps is not None
        second = functional.QuantState(
            absmax=held.steps[expert], code=held.scale_code, blocksize=form.scale_block, dtype=torch.float32
        )
        state = functional.QuantState(
            absmax=scales, shape=torch.Size(shape), code=held.code, blocksize=form.block, quant_type=form.kind,
            dtype=form.dtype, offset=held.middle[expert], state2=second,
        )  # fmt: skip
        if out is not None and out.is_cuda:
            return functional.dequantize_4bit(numbers.view(-1, 1), state, out=out)
        found = functional.dequantize_4bit(numbers.view(-1, 1), state)
    return found if out is None else out.copy_(found)


class Group(NamedTuple):
    """Routed experts that are unpacked together: the places of the first and behind the last among those routed, and where
    their slots begin and end in the order by expert."""

    begin: int
    end: int
    first: int
    last: int


class Routed(NamedTuple):
    """Slots by expert: `experts` [n] those routed, `order` [S] the slots by expert, those of none last, and `owner` [S] the
    place of each among the routed."""

    experts: Tensor
    order: Tensor
    owner: Tensor


class _Pass(NamedTuple):
    """How a group is computed: `forward(rows, ids, routing, weights, settings)` gives the result and what to keep,
    `backward(dy, rows, ids, routing, weights, settings, kept, wanted)` the gradients of rows, routing and the weights."""

    forward: Callable[..., tuple[Tensor, tuple[Tensor | None, ...]]]
    backward: Callable[..., list[Tensor | None]]
    keeps: int


def expert_mlp_packed(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, weights: list[Tensor | None], settings: Settings
) -> Tensor:
    """As `expert_mlp`, the first two of `weights` packed, x in their format. Waits for the device once a pass, to learn
    which experts are routed."""
    return _outside_graphs(settings, *weights[:2], x, expert_ids, routing_weights, *weights[2:])


@torch.compiler.disable
def _outside_graphs(*given: Any) -> Tensor:
    out: Tensor = _OverPacked.apply(*given)
    return out


class _OverPacked(torch.autograd.Function):
    """Keeps tokens, ids, routing weights and adapters, and of the kernels what they keep over plain weights. Computes in
    the weights' format, also under autocast."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, gate_up: PackedExperts, down: PackedExperts, x: Tensor, ids: Tensor,
        routing: Tensor, *small: Tensor | None,
    ) -> Tensor:  # fmt: skip
        way = _BY_KERNELS if serves(x, ids) else _BY_REFERENCE
        routed, groups = _grouped(ids, gate_up.shape[0], _at_once(gate_up, down) if way is _BY_KERNELS else 1)
        every, kept = x.new_zeros(ids.numel(), x.shape[1]), list[Tensor | None]()
        for slots, held, rows in _unpacked_in_turn(gate_up, down, small, routed, groups, x, ids, routing):
            with torch.autocast(x.device.type, enabled=False):
                every[slots], keeps = way.forward(*rows, held, settings)
            kept += keeps
        ctx.settings, ctx.packed, ctx.groups, ctx.way = settings, (gate_up, down), groups, way
        ctx.save_for_backward(x, ids, routing, *routed, *small, *kept)
        return _by_token(every, ids, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first_derivatives_alone("expert_mlp")
        x, ids, routing, *rest = ctx.saved_tensors
        routed, rest = Routed(*rest[:3]), rest[3:]
        small, kept, count = rest[:6], rest[6:], ctx.way.keeps
        _, _, _, need_x, _, need_routing, *need = ctx.needs_input_grad
        d_slots = x.new_zeros(ids.numel(), x.shape[1])
        d_routing = torch.zeros_like(routing)
        found = [torch.zeros_like(part) if wanted else None for part, wanted in zip(small, need, strict=True)]
        wanted = [need_x, need_routing, False, False, *need]
        gate_up, down = ctx.packed
        turns = _unpacked_in_turn(gate_up, down, small, routed, ctx.groups, x, ids, routing)
        for number, (slots, held, rows) in enumerate(turns):
            keeps = kept[count * number : count * (number + 1)]
            dy = grads[0][slots // ids.shape[1]]
            with torch.autocast(x.device.type, enabled=False):
                d_rows, d_share, _, _, *of_small = ctx.way.backward(dy, *rows, held, ctx.settings, keeps, wanted)
            if need_x:
                d_slots[slots] = d_rows
            if need_routing:
                d_routing.view(-1)[slots] = d_share.view(-1)
            among = routed.experts[ctx.groups[number].begin : ctx.groups[number].end]
            for room, part in zip(found, of_small, strict=True):
                if room is not None:
                    room[among] = part
        dx = _by_token(d_slots, ids, x) if need_x else None
        return None, None, None, dx, None, d_routing if need_routing else None, *found


def _at_once(gate_up: PackedExperts, down: PackedExperts) -> int:
    """How many experts the buffer holds."""
    each = sum(packed.form.rows * packed.form.columns * packed.element_size() for packed in (gate_up, down))
    return max(1, EXPERT_BUFFER // each)


def _grouped(ids: Tensor, experts: int, at_once: int) -> tuple[Routed, list[Group]]:
    """The slots by expert and the groups of routed experts. Waits for the device, once."""
    flat = ids.reshape(-1).long()
    owners = flat.masked_fill((flat < 0) | (flat >= experts), experts)
    order = owners.argsort(stable=True)
    counts = torch.bincount(owners, minlength=experts + 1)[:experts]
    ends = [0, *counts.cumsum(0).tolist()]
    among = [expert for expert in range(experts) if ends[expert + 1] > ends[expert]]
    groups = list[Group]()
    for begin in range(0, len(among), at_once):
        some = among[begin : begin + at_once]
        groups.append(Group(begin, begin + len(some), ends[some[0]], ends[some[-1] + 1]))
    place = (counts > 0).long().cumsum(0) - 1
    routed = torch.tensor(among, dtype=torch.long).to(ids.device, non_blocking=True)
    return Routed(routed, order, place[owners[order].clamp(max=experts - 1)]), groups


def _unpacked_in_turn(
    gate_up: PackedExperts, down: PackedExperts, small: Sequence[Tensor | None], routed: Routed, groups: list[Group],
    x: Tensor, ids: Tensor, routing: Tensor,
) -> Iterator[tuple[Tensor, list[Tensor | None], tuple[Tensor, Tensor, Tensor]]]:  # fmt: skip
    """Of each group its slots, its weights, unpacked into the room of the group before, and its rows with their ids and
    routing weights."""
    most = max((group.end - group.begin for group in groups), default=0)
    rooms = [x.new_empty(most, each.form.rows, each.form.columns, dtype=each.dtype) for each in (gate_up, down)]
    for group in groups:
        among = routed.experts[group.begin : group.end]
        held = list[Tensor | None]()
        for packed, room in zip((gate_up, down), rooms, strict=True):
            some = room[: len(among)]
            packed.unpack_into(among, some)
            held.append(some.transpose(1, 2) if packed.form.turned else some)
        held += [None if part is None else part[among] for part in small]
        slots = routed.order[group.first : group.last]
        local = routed.owner[group.first : group.last] - group.begin
        rows = x[slots // ids.shape[1]], local[:, None], routing.reshape(-1)[slots, None]
        yield slots, held, rows


def _by_token(every: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """[T, H]: the sum of each token's slots."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return every.view(*ids.shape, x.shape[1]).sum(1, dtype=wide).to(x.dtype)


def _referred(
    rows: Tensor, ids: Tensor, routing: Tensor, held: Sequence[Tensor | None], settings: Settings
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    gate_up, down, gate_up_bias, down_bias, *factors = held
    assert gate_up is not None
    assert down is not None
    loras = [
        None if a is None or b is None else ExpertLoRA(a, b, scale)
        for a, b, scale in zip(factors[::2], factors[1::2], (settings.gate_up_scale, settings.down_scale), strict=True)
    ]
    found = expert_mlp_reference(
        rows, ids, routing, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias,
        gate_up_lora=loras[0], down_lora=loras[1], gate=settings.gate,
    )  # fmt: skip
    return found, ()


def _referred_back(
    dy: Tensor, rows: Tensor, ids: Tensor, routing: Tensor, held: Sequence[Tensor | None], settings: Settings,
    kept: Sequence[Tensor | None], wanted: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Computes the group again, since nothing of it was kept."""
    given = [
        None if part is None else part.detach().requires_grad_(need)
        for part, need in zip((rows, routing, *held), wanted, strict=True)
    ]
    with torch.enable_grad():
        out, _ = _referred(given[0], ids, given[1], given[2:], settings)  # type: ignore[arg-type]
    asked = [part for part, need in zip(given, wanted, strict=True) if need and part is not None]
    gradients = iter(torch.autograd.grad(out, asked, dy)) if asked else iter(())
    return [next(gradients) if need and part is not None else None for part, need in zip(given, wanted, strict=True)]


def _launched(
    rows: Tensor, ids: Tensor, routing: Tensor, held: Sequence[Tensor | None], settings: Settings
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    out, kept = forward(*prepared(rows, ids, routing, held), settings)
    return out, (*kept.plan, kept.both, kept.gate_up_inner, kept.down_inner)


def _launched_back(
    dy: Tensor, rows: Tensor, ids: Tensor, routing: Tensor, held: Sequence[Tensor | None], settings: Settings,
    kept: Sequence[Any], wanted: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    needs = Wanted(wanted[0], wanted[1], tuple(wanted[2:]), formats_of(held))
    made = Kept(Plan(*kept[:4]), *kept[4:])
    d_rows, d_routing, found = backward(dy, *prepared(rows, ids, routing, held), settings, made, needs)
    return [d_rows, d_routing, *found]


_BY_REFERENCE = _Pass(_referred, _referred_back, 0)
_BY_KERNELS = _Pass(_launched, _launched_back, 7)
