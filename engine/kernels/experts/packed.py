"""Frozen experts held in four or eight bits.

`PackedExperts` shows the shape and the format of the weight that it stands for, so that modules and adapters take it for
one. Each expert is packed by itself: by bitsandbytes, or into MXFP4, NVFP4 or FP8 in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.device import kernel_serves
from engine.kernels.experts import fp8, groups, mxfp4, nvfp4
from engine.kernels.requirements import EXPERT_BUFFER

KINDS = ("nf4", "fp4", "int8", "mxfp4", "nvfp4", "fp8")
PLAIN = "mxfp4", "nvfp4", "fp8"
"""Packed and unpacked without bitsandbytes."""
GROUPED = tuple(groups.BITS)
"""Read from files alone, and unpacked without bitsandbytes."""
_Aten: Any = torch.ops.aten
PAIRED = True
"""Whether a product begins before the one of the experts before has ended."""


class Held(NamedTuple):
    """What all experts of one weight are held in, an expert's numbers in one row of each.

    numbers: [E, bytes] uint8, two weights in each or, of FP8, one, or [E, rows * columns] int8; scales: [E, blocks] uint8, or
    float32 of each row (INT8) or block (FP8). Of NVFP4 also `middle` [E], an expert's own scale. Of bitsandbytes' four bits
    also `middle` [E] and `steps` [E, blocks of scales], float32, by which the scales were quantized again, and the two tables
    that codes stand for. Of unsigned numbers in groups scales [E, rows * groups] of a float format, `zeros` of the same shape
    where they are not all half of what the bits can count, and `of_column` [E, columns], int32, the group of each column
    where these do not lie side by side.
    """

    numbers: Tensor
    scales: Tensor
    middle: Tensor | None = None
    steps: Tensor | None = None
    code: Tensor | None = None
    scale_code: Tensor | None = None
    zeros: Tensor | None = None
    of_column: Tensor | None = None


class Form(NamedTuple):
    """How it is packed: kind, rows and columns of one expert as stored, whether it is shown turned, weights of one scale
    and scales of one step (of FP8 columns and rows of one scale, of groups their columns and 1), the format that it is unpacked
    to, and whether every number was finite."""

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
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way to have none

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

    def unpack_range(self, first: int, out: Tensor, starts: Tensor | None = None, beside: bool = False) -> None:
        """Writes the experts from the number `first` on into `out` [n, rows, columns] as stored: in one launch on a card.

        With `starts` [E + 1], where each expert's rows begin and the last one's end, experts without rows are left out.
        `beside` a product on another stream it leaves most of a card to that.
        """
        if kernel_serves(self.held.numbers):
            from engine.kernels.experts.unpack import unpack

            unpack(self.held, self.form, first, out, starts, beside)
            return
        ends = None if starts is None else starts.tolist()
        for place, room in enumerate(out):
            if ends is None or ends[first + place] < ends[first + place + 1]:
                _unpacked(self.held, self.form, first + place, room)

    @property
    def can_go_ahead(self) -> bool:
        """Whether some experts can be unpacked while those before them are multiplied: where the room holds some of them twice,
        and not all."""
        each = self.form.rows * self.form.columns * self.element_size()
        return self.device.type == "cuda" and 2 * each <= EXPERT_BUFFER < each * self.shape[0]

    def in_turn(self, starts: Tensor, ahead: bool = False) -> Iterator[tuple[Tensor, int]]:
        """The experts with rows, as many at a time as a bounded room holds: the weights [n, out, in] of some of them,
        good until the next are asked for, and the number of the first. With `ahead` the room is shared by those that are
        multiplied and the next ones, which are unpacked meanwhile."""
        form, experts = self.form, self.shape[0]
        each = form.rows * form.columns * self.element_size()
        turns = -(-experts // max(1, min(EXPERT_BUFFER // (1 + ahead) // each, experts)))
        at_once = -(-experts // turns)
        rooms = torch.empty(1 + ahead, at_once, form.rows, form.columns, dtype=form.dtype, device=self.device)
        firsts = range(0, experts, at_once)

        def unpacked(turn: int, beside: bool = False) -> Tensor:
            some = rooms[turn % len(rooms)][: experts - firsts[turn]]
            self.unpack_range(firsts[turn], some, starts, beside)
            return some.transpose(1, 2) if form.turned else some

        if not ahead:
            yield from ((unpacked(turn), first) for turn, first in enumerate(firsts))
            return
        yield from zip(_one_ahead(unpacked, len(firsts), self.device), firsts, strict=True)

    def all_unpacked(self) -> Tensor:
        """[E, out, in], every expert."""
        form = self.form
        every = torch.empty(self.shape[0], form.rows, form.columns, dtype=form.dtype, device=self.device)
        self.unpack_range(0, every)
        return every.transpose(1, 2) if form.turned else every

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch's, which takes it too
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
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (instead := TAKES_PACKED.get(func)) is not None:
            return instead(*args, **kwargs)
        itself = args[0] if args and isinstance(args[0], PackedExperts) else None
        if itself is not None and (answer := _ANSWERS.get(func)) is not None:
            found = answer(itself, *args[1:], **kwargs)
            if found is not NotImplemented:
                return found
        if func._schema.is_mutable and itself is not None:
            raise RuntimeError("packed experts cannot be written to: their numbers have too few bits")
        plain, more = torch.utils._pytree.tree_map_only(PackedExperts, PackedExperts.all_unpacked, (args, kwargs))
        return func(*plain, **more)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One that unpacks, whose programs go first where there is room for them, and one for every second product."""
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)


def _one_ahead(unpacked: Callable[[int, bool], Tensor], turns: int, device: torch.device) -> Iterator[Tensor]:
    """What `unpacked` gives for each turn, the next one's on another stream while the caller multiplies this one's. Every second
    turn is another stream's too, so that a product begins as the last programs of the one before it end. However it ends, the
    caller's own stream has waited for all of it, so that rooms may be given back there."""
    here = torch.cuda.current_stream(device)
    side, other = _streams(device)
    products = (here, other) if PAIRED else (here, here)
    found = unpacked(0, False)
    begun = free = ready = here.record_event()
    other.wait_event(begun)
    try:
        for turn in range(turns):
            following = None
            if turn + 1 < turns:
                side.wait_event(free)
                with torch.cuda.stream(side):
                    following = unpacked(turn + 1, True)
                coming = side.record_event()
            product = products[turn % 2]
            product.wait_event(ready)
            torch.cuda.set_stream(product)
            yield found
            torch.cuda.set_stream(here)
            free = product.record_event()
            if following is not None:
                found, ready = following, coming
    finally:  # also of a product that found no room, after which another way is tried
        torch.cuda.set_stream(here)
        here.wait_stream(side)
        here.wait_stream(other)


def _again(packed: PackedExperts, held: Held, form: Form) -> PackedExperts:
    """The same weight held anew, with what others have noted on it: torch makes another parameter of one that is moved."""
    made = PackedExperts(held, form)
    noted = {name: value for name, value in vars(packed).items() if not name.startswith("_")}
    vars(made).update({**noted, "held": held, "form": form})
    return made


def _same(packed: PackedExperts, *args: Any, **kwargs: Any) -> PackedExperts:
    return _again(packed, packed.held, packed.form)


def _cloned(packed: PackedExperts, *args: Any, **kwargs: Any) -> PackedExperts:
    return _again(packed, _each(packed.held, torch.clone), packed.form)


def _moved(packed: PackedExperts, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> PackedExperts:
    """On another device, or shown in another format: the bits stay as they are."""
    form = packed.form if dtype is None else packed.form._replace(dtype=dtype)
    blocking = kwargs.get("non_blocking", False)
    return _again(packed, _each(packed.held, lambda part: part.to(device or part.device, non_blocking=blocking)), form)


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


TAKES_PACKED: dict[Any, Callable[..., Any]] = {}
"""What computes an operation that is given packed experts, of those that need not unpack them all."""


def of_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype, *, turned: bool) -> PackedExperts:
    """The weight that these bytes [E, rows, blocks, 16] and scales [E, rows, blocks] are, uint8, as checkpoints hold them;
    shown as [E, columns, rows] where `turned`. Nothing is copied. Raises ValueError for other shapes or formats."""
    form = blocks.dtype, scales.dtype, blocks.shape[3:], blocks.shape[:3]
    if form != (torch.uint8, torch.uint8, (mxfp4.BLOCK // 2,), scales.shape):
        raise ValueError(
            f"MXFP4 is bytes [E, rows, blocks, {mxfp4.BLOCK // 2}] and scales [E, rows, blocks]; "
            f"got {tuple(blocks.shape)} and {tuple(scales.shape)}"
        )
    _, rows, count = scales.shape
    finite = bool((scales < mxfp4.TOO_LARGE).all())
    held = Held(blocks.flatten(1), scales.flatten(1))
    return PackedExperts(held, Form("mxfp4", rows, count * mxfp4.BLOCK, turned, mxfp4.BLOCK, 1, dtype, finite))


def of_fp8(
    numbers: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype, *, turned: bool = False
) -> PackedExperts:
    """The weight that these numbers [E, rows, columns], float8_e4m3fn, and scales [E, blocks of rows, blocks of columns],
    float32, stand for; shown as [E, columns, rows] where `turned`. `block` is the rows and columns of one scale. Nothing is
    copied. Raises ValueError for other shapes or formats."""
    sides, given = numbers.shape[1:], (numbers.dtype, scales.dtype, len(numbers))
    wanted = tuple(-(-side // size) for side, size in zip(sides, block, strict=False))
    if given != (torch.float8_e4m3fn, torch.float32, len(scales)) or len(sides) != 2 or scales.shape[1:] != wanted:
        raise ValueError(
            f"FP8 is numbers [E, rows, columns] and a float32 scale for each block of {block[0]} x {block[1]}; got "
            f"{numbers.dtype} {tuple(numbers.shape)} and {scales.dtype} {tuple(scales.shape)}"
        )
    codes = numbers.view(torch.uint8)
    finite = bool(torch.stack([((each & 127) != 127).all() for each in codes]).all() & scales.isfinite().all())
    held = Held(codes.flatten(1), scales.flatten(1))
    return PackedExperts(held, Form("fp8", *sides, turned, block[1], block[0], dtype, finite))


def of_groups(
    kind: str, numbers: Tensor, scales: Tensor, group: int, columns: int, dtype: torch.dtype, *,
    zeros: Tensor | None = None, of_column: Tensor | None = None, turned: bool = False,
) -> PackedExperts:  # fmt: skip
    """The weight that these bytes [E, rows, bytes], uint8, and scales [E, rows, groups] stand for, `kind` being uint4 or uint8;
    shown as [E, columns, rows] where `turned`. `zeros` is like `scales`, `of_column` [E, columns]. Nothing is copied. Raises
    ValueError for other shapes or formats."""
    experts, rows, count = scales.shape
    wide = -(-columns * groups.BITS[kind] // 8)
    covered = of_column is not None or count == -(-columns // group)
    fits = numbers.shape == (experts, rows, wide) and (zeros is None or zeros.shape == scales.shape) and covered
    ordered = of_column is None or of_column.shape == (experts, columns)
    if not (fits and ordered) or numbers.dtype != torch.uint8 or not scales.is_floating_point():
        raise ValueError(
            f"{kind} is bytes [E, rows, {wide}] and a scale for each group of {group} of {columns} columns; got "
            f"{tuple(numbers.shape)} and {tuple(scales.shape)}"
        )
    if of_column is not None and (int(of_column.min()) < 0 or int(of_column.max()) >= count):
        raise ValueError(
            f"columns are of groups 0 to {count - 1}; got {int(of_column.min())} to {int(of_column.max())}"
        )
    held = Held(
        numbers.flatten(1), scales.flatten(1), zeros=None if zeros is None else zeros.flatten(1), of_column=of_column
    )
    finite = bool(scales.isfinite().all())
    return PackedExperts(held, Form(kind, rows, columns, turned, group, 1, dtype, finite))


class Packer:
    """Takes the experts of one weight in order and packs each as it comes: [rows, columns] as stored, or the other way round
    where the weight is stored `turned`."""

    def __init__(self, experts: int, kind: str, dtype: torch.dtype, *, turned: bool = False) -> None:
        self.experts, self.kind, self.dtype, self.turned = experts, kind, dtype, turned
        self._place = 0
        self._held: Held | None = None
        self._form: Form | None = None
        self._finite: list[Tensor] = []

    def add(self, expert: Tensor) -> None:
        """Packs the next expert. Raises ValueError for one of another shape than the first, or too many."""
        expert = expert.T if self.turned else expert
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
        return PackedExperts(self._held, self._form._replace(finite=finite, turned=self.turned))

    def _room(self, part: Tensor) -> Tensor:
        return torch.empty(self.experts, *part.shape, dtype=part.dtype, device=part.device)


def _packed(expert: Tensor, kind: str) -> tuple[Held, Form]:
    """One expert's parts, and their form."""
    rows, columns = expert.shape
    if kind == "mxfp4":
        numbers, scales = mxfp4.packed(expert)
        return Held(numbers.flatten(), scales.flatten()), Form(
            kind, rows, columns, False, mxfp4.BLOCK, 1, expert.dtype, True
        )
    if kind == "nvfp4":
        numbers, scales, whole = nvfp4.packed(expert)
        form = Form(kind, rows, columns, False, nvfp4.BLOCK, 1, expert.dtype, True)
        return Held(numbers.flatten(), scales.flatten(), whole), form
    if kind == "fp8":
        numbers, scales = fp8.packed(expert)
        form = Form(kind, rows, columns, False, fp8.BLOCK, fp8.BLOCK, expert.dtype, True)
        return Held(numbers.flatten(), scales.flatten()), form
    from bitsandbytes import functional

    if kind == "int8":
        numbers, scales, _ = functional.int8_vectorwise_quant(expert.half())
        return Held(numbers.flatten(), scales), Form(kind, rows, columns, False, columns, 1, expert.dtype, True)
    numbers, state = functional.quantize_4bit(expert, quant_type=kind, compress_statistics=True)
    second = state.state2
    held = Held(numbers.flatten(), state.absmax, state.offset, second.absmax, state.code, second.code)
    return held, Form(kind, rows, columns, False, state.blocksize, second.blocksize, expert.dtype, True)


def matrix_unpacked(held: Held, form: Form) -> Tensor:
    """The numbers [rows, columns] of the one expert that these are of: in one launch on a card. Code that is compiled calls
    `matrix_unpacked_op`."""
    if kernel_serves(held.numbers):
        from engine.kernels.experts.unpack import unpack

        out = torch.empty(1, form.rows, form.columns, dtype=form.dtype, device=held.numbers.device)
        unpack(held, form, 0, out, None)
        return out[0]
    return _unpacked(held, form, 0, None)


@torch.library.custom_op("workbench::matrix_unpacked", mutates_args=())
def matrix_unpacked_op(
    numbers: Tensor, scales: Tensor, middle: Tensor | None, zeros: Tensor | None, of_column: Tensor | None, kind: str,
    rows: int, columns: int, block: int, scale_block: int, dtype: torch.dtype, after: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`matrix_unpacked` as one node of a graph, of the parts of a `Held` and the fields of a `Form` that is not turned.

    `after` is not read: the node comes after it. A backward pass gives its gradient, or the compiler takes its node and the
    forward pass's for one and keeps the numbers [rows, columns] from one to the other.
    """
    held = Held(numbers.reshape(1, -1), scales, middle, zeros=zeros, of_column=of_column)
    return matrix_unpacked(held, Form(kind, rows, columns, False, block, scale_block, dtype, True)).contiguous()


@matrix_unpacked_op.register_fake
def _(numbers, scales, middle, zeros, of_column, kind, rows, columns, block, scale_block, dtype, after=None):
    return numbers.new_empty(rows, columns, dtype=dtype)


def _in_plain_torch(held: Held, form: Form, expert: int) -> Tensor:
    numbers, scales = held.numbers[expert], held.scales[expert]
    if form.kind in GROUPED:
        zeros = None if held.zeros is None else held.zeros[expert].view(form.rows, -1)
        of_column = None if held.of_column is None else held.of_column[expert]
        return groups.unpacked(
            numbers.view(form.rows, -1), scales.view(form.rows, -1), zeros, of_column, groups.BITS[form.kind], form.block,
            form.columns,
        )  # fmt: skip
    if form.kind == "fp8":
        by_block = scales.view(-(-form.rows // form.scale_block), -1)
        return fp8.unpacked(numbers.view(form.rows, form.columns), by_block, form.scale_block, form.block)
    scales = scales.view(form.rows, -1)
    numbers = numbers.view(*scales.shape, -1)
    if held.middle is None:
        return mxfp4.unpacked(numbers, scales, form.columns)
    return nvfp4.unpacked(numbers, scales, held.middle[expert], form.columns)


def _unpacked(held: Held, form: Form, expert: int, out: Tensor | None) -> Tensor:
    shape, numbers, scales = (form.rows, form.columns), held.numbers[expert], held.scales[expert]
    if form.kind in (*PLAIN, *GROUPED):
        found = _in_plain_torch(held, form, expert).to(form.dtype)
        return found if out is None else out.copy_(found)
    from bitsandbytes import functional

    if form.kind == "int8":
        found = functional.int8_vectorwise_dequant(numbers.view(shape), scales).to(form.dtype)
    else:
        assert held.middle is not None
        assert held.steps is not None
        second = functional.QuantState(
            absmax=held.steps[expert], code=held.scale_code, blocksize=form.scale_block, dtype=torch.float32
        )
        # On a CPU bitsandbytes takes rows apart that end within a block of scales: it is handed one long column.
        as_held = shape if numbers.is_cuda else (form.rows * form.columns, 1)
        state = functional.QuantState(
            absmax=scales, shape=torch.Size(as_held), code=held.code, blocksize=form.block, quant_type=form.kind,
            dtype=form.dtype, offset=held.middle[expert], state2=second,
        )  # fmt: skip
        if out is not None and out.is_cuda:
            return functional.dequantize_4bit(numbers.view(-1, 1), state, out=out)
        found = functional.dequantize_4bit(numbers.view(-1, 1), state).view(shape)
    return found if out is None else out.copy_(found)
