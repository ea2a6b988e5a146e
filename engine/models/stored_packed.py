"""Models whose files hold packed numbers with scales, as GPTQ, AWQ, compressed-tensors and Model Optimizer write them.

Under an adapter the numbers stay as they are: each layer's codes, scales and zero points are laid out anew once, bit for
bit (`engine.kernels.experts.groups`, NVFP4 and MXFP4 as `engine.kernels.experts` has them), and a product makes the numbers
that they stand for, forward and again in backward, keeping none. Without an adapter they are widened once and trained as
plain numbers; so is a head, whose weight the losses read. What a layer is held in comes from its tensors, so that layers
that were left out, or have other bits than the rest, are read as they lie; the note in config.json says how GPTQ counts
its zero points. transformers' own quantizers want gptqmodel, which wants a newer torch than most have, or widen the
weights at the first pass, as compressed-tensors' do for most formats.

GPTQ (arXiv:2210.17323): `qweight` [in * bits / 32, out] and `qzeros` [groups, out * bits / 32] int32, `scales` [groups, out],
`g_idx` [in], the group of each input; zero points are stored less one, but not where `checkpoint_format` is `gptq_v2`. AWQ
(arXiv:2306.00978), `gemm`: `qweight` [in, out / 8] and `qzeros` [groups, out / 8], eight outputs in each in the order 0 2 4 6
1 3 5 7. compressed-tensors: `weight_packed` [out, in * bits / 32], `weight_scale`, `weight_zero_point`, each code counted from
the least number. NVIDIA's Model Optimizer, NVFP4: `weight` [out, in / 2] bytes, `weight_scale` [out, in / 16] in FP8 and
`weight_scale_2`, one number that all of them are multiplied with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.config.kinds import Head
from engine.errors import ModelError, visible
from engine.facts.stored import PACKED, bits_of, stored_as
from engine.kernels.experts import groups
from engine.kernels.experts.packed import Form, Held, PackedExperts, matrix_unpacked, matrix_unpacked_op, of_groups
from engine.model_files import header, weight_files
from engine.models.expert_shards import share_of
from engine.models.packed_experts import converted, refuse_unserved
from engine.models.stored_fp8 import Fp8Linear, note_of, without_note
from engine.models.strict_load import load_strictly

_LEADS = "qweight", "weight_packed"
_ENDS = (
    *_LEADS, "qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
    "weight_global_scale", "input_global_scale", "input_scale", "input_zero_point", "weight_scale_2", "k_scale", "v_scale",
)  # fmt: skip
_AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7
"""Which of eight outputs each four bits of a word are, from the lowest on."""
_BY = "workbench_stored_packed"


@dataclass(frozen=True)
class StoredPacked:
    """How a model's files hold it: its config without the note on quantization, that note, and the folder."""

    config: PreTrainedConfig
    note: Mapping[str, Any]
    source: str
    revision: str | None

    @property
    def method(self) -> str:
        """`quant_method` of the note."""
        return str(self.note["quant_method"])


@dataclass
class HeldPacked:
    """What became of the packed numbers, for the receipt."""

    method: str
    kept: bool
    layers: int = 0
    experts: int = 0
    """Weights of experts of all layers that stay packed."""
    widened: int = 0
    """Weights that were widened once: all of them, or heads and what `model.quantize_moe_experts` leaves."""
    packed_bytes: int = 0


class Parts(NamedTuple):
    """A weight [rows, columns] as it is held: kind, bytes [rows, ...], scales [rows, groups], columns of a group, and what else
    `Held` has."""

    kind: str
    numbers: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    of_column: torch.Tensor | None = None
    middle: torch.Tensor | None = None


def stored_packed(source: str, revision: str | None) -> StoredPacked | None:
    """How the model is stored, or None where it is not packed so. Raises OSError or ValueError for a config not to be had."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    note = note_of(config, source, revision)
    if note is None or stored_as(note) not in PACKED:
        return None
    without_note(config)
    return StoredPacked(config, note, source, revision)


class Entries:
    """The packed weights of a folder's files, read one at a time: a mapping of layers' names to their parts."""

    def __init__(self, folder: Path, note: Mapping[str, Any]) -> None:
        self.note = note
        self._files: dict[str, dict[str, tuple[Path, tuple[int, ...]]]] = {}
        self._open: dict[Path, Any] = {}
        # What lies under the name of a plain weight, by its format.
        lead = {"compressed-tensors": "I8", "modelopt": "U8"}.get(str(note.get("quant_method")))
        for file in weight_files(folder):
            for key, each in header(file).items():
                name, _, end = key.rpartition(".")
                if name and (end in _ENDS or end == "bias" or (end == "weight" and each.dtype == lead)):
                    self._files.setdefault(name, {})[end] = file, each.shape
        self._files = {name: ends for name, ends in self._files.items() if {*_LEADS, "weight"} & ends.keys()}
        self.zero_biases = self._zero_biases()
        """Layers with a bias of zeros in every block, as older tools write them also where the model has none, such as beside
        the true ones of Qwen2's attention."""

    def _zero_biases(self) -> frozenset[str]:
        alike: dict[str, list[str]] = {}
        for name, ends in self._files.items():
            if {"bias", "qweight"} <= ends.keys():
                alike.setdefault(name.rpartition(".")[2], []).append(name)
        return frozenset(
            name
            for names in alike.values()
            if not any(bool(self.read(each, "bias").any()) for each in names)
            for name in names
        )

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files, key=dot_natural_key))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def holds(self, key: str) -> bool:
        """Whether this entry of the files is a part of a packed weight, or a bias that says nothing."""
        name, _, end = key.rpartition(".")
        return end in self._files.get(name, ()) and (end != "bias" or name in self.zero_biases)

    def leads(self, key: str) -> bool:
        """Whether this entry of the files holds the numbers themselves."""
        return self.holds(key) and key.rpartition(".")[2] in (*_LEADS, "weight")

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of what a layer's weight stands for, as far as its own tensors and the note tell."""
        ends = self._files[name]
        if "qweight" in ends:
            high, wide = ends["qweight"][1]
            if self.note.get("quant_method") == "awq":
                return wide * 8, high
            return wide, ends["g_idx"][1][0] if "g_idx" in ends else high * 32 // _bits(self.note)
        if "weight" in ends:
            high, wide = ends["weight"][1]
            wide *= 2 if self.note.get("quant_method") == "modelopt" else 1
        elif "weight_shape" in ends:
            high, wide = self.read(name, "weight_shape").tolist()
        else:
            high, wide = ends["weight_packed"][1]
            wide *= 2  # bytes of NVFP4 and MXFP4
        return high, wide

    def bias(self, name: str) -> torch.Tensor | None:
        """A layer's bias."""
        return self.maybe(name, "bias")

    def read(self, name: str, end: str) -> torch.Tensor:
        """A part of a layer. Raises ModelError for one that is not there."""
        found = self.maybe(name, end)
        if found is None:
            raise ModelError(f"model.name: the files hold no {visible(name)}.{end}.", "They may be incomplete.")
        return found

    def maybe(self, name: str, end: str) -> torch.Tensor | None:
        """The same, or None."""
        from safetensors import safe_open

        if end not in self._files[name]:
            return None
        file = self._files[name][end][0]
        if file not in self._open:
            self._open[file] = safe_open(file, "pt").__enter__()
        value: torch.Tensor = self._open[file].get_tensor(f"{name}.{end}")
        return value

    def parts(self, name: str, device: torch.device | str = "cpu", shape: tuple[int, int] | None = None) -> Parts:
        """The weight of a layer of this shape, laid out as it is held. Raises ModelError for tensors that do not fit."""
        rows, columns = shape or self.shape(name)

        def read(end: str) -> torch.Tensor | None:
            found = self.maybe(name, end)
            return None if found is None else found.to(device)

        ends = self._files[name]
        try:
            if "qweight" in ends:
                if self.note.get("quant_method") == "awq":
                    return _checked(name, _of_awq(read, rows, columns), rows, columns)
                return _checked(name, _of_gptq(read, rows, columns, self.note), rows, columns)
            if self.note.get("quant_method") == "modelopt":
                return _checked(name, _of_model_optimizer(read, rows, columns), rows, columns)
            return _checked(name, _of_compressed_tensors(read, rows, columns, self.note), rows, columns)
        except _Unfit as problem:
            raise ModelError(f"model.name: {visible(name)} cannot be read: {problem}.") from problem

    def wide(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """What a layer's weight stands for, [rows, columns]."""
        return _experts([self.parts(name, device)], self.shape(name), dtype).unpack(0)


class _Unfit(ValueError):
    """Why tensors are no weight."""


def _bits(note: Mapping[str, Any]) -> int:
    bits = note.get("bits")
    return bits if type(bits) is int and bits in range(2, 9) else 4


def _of_gptq(read: Callable[[str], torch.Tensor | None], rows: int, columns: int, note: Mapping[str, Any]) -> Parts:
    words, scales, zeros, of_column = (read(end) for end in ("qweight", "scales", "qzeros", "g_idx"))
    assert words is not None
    if words.dim() != 2 or words.shape[1] != rows:
        raise _Unfit(f"its numbers have the shape {tuple(words.shape)} for {rows} x {columns}")
    if scales is None or scales.dim() != 2 or scales.shape[1] != rows:
        raise _Unfit(f"its scales have the shape {None if scales is None else tuple(scales.shape)} for {rows} rows")
    bits = words.shape[0] * 32 // columns
    kind, numbers = _numbers(words.T.contiguous(), bits, columns)
    count = len(scales)
    half = 1 << (bits - 1)
    if zeros is not None:
        found = _codes(zeros, bits)[:, :rows].to(torch.int16)
        form = note.get("checkpoint_format") or note.get("format") or "gptq"
        zeros = (found + (form != "gptq_v2")).T.contiguous()
        if zeros.shape != (rows, count):
            raise _Unfit(f"its zero points have the shape {tuple(zeros.T.shape)}, and {count, rows} is wanted")
    group = _group(columns, count, note.get("group_size"), of_column)
    if of_column is not None:
        of_column = _order(of_column, columns, count, group)
    return Parts(kind, numbers, scales.T.contiguous(), group, _zeros(kind, zeros, half, scales.T), of_column)


def _of_awq(read: Callable[[str], torch.Tensor | None], rows: int, columns: int) -> Parts:
    words, scales, zeros = (read(end) for end in ("qweight", "scales", "qzeros"))
    assert words is not None
    if words.shape != (columns, rows // 8) or rows % 8:
        raise _Unfit(f"its numbers have the shape {tuple(words.shape)} for {rows} x {columns}")
    if scales is None or zeros is None or scales.shape[1:] != (rows,) or zeros.shape[1:] != (rows // 8,):
        raise _Unfit(f"its scales and zero points are not those of {rows} rows")
    numbers = groups.in_bytes(_in_order(words).T, 4)
    found = _in_order(zeros).T.to(torch.int16)
    group = _group(columns, len(scales), None, None)
    return Parts("uint4", numbers.contiguous(), scales.T.contiguous(), group, _zeros("uint4", found, 8, scales.T))


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """The codes [rows, 8 * n] of AWQ's words [rows, n]."""
    found = words.contiguous().view(torch.uint8)
    codes = torch.stack((found & 15, found >> 4), -1).view(*words.shape, 8)
    place = torch.tensor([_AWQ_ORDER.index(output) for output in range(8)], device=words.device)
    return codes.index_select(2, place).flatten(1)


def _of_compressed_tensors(
    read: Callable[[str], torch.Tensor | None], rows: int, columns: int, note: Mapping[str, Any]
) -> Parts:
    words, eights, scales = read("weight_packed"), read("weight"), read("weight_scale")
    if scales is None:
        raise _Unfit("it has no scales")
    lead = eights if words is None else words
    if lead is None or lead.dim() != 2 or len(lead) != rows or (words is None and lead.shape[1] != columns):
        raise _Unfit(f"its numbers have the shape {None if lead is None else tuple(lead.shape)} for {rows} x {columns}")
    if words is not None and words.dtype == torch.uint8:
        return _of_four_bit_floats(words, scales, read("weight_global_scale"), columns)
    scales = scales.reshape(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
    scales = scales.reshape(rows, -1).contiguous() if scales.numel() % rows == 0 else scales
    if scales.dim() != 2 or len(scales) != rows:
        raise _Unfit(f"its scales have the shape {tuple(scales.shape)} for {rows} rows")
    read_codes = _codes
    if words is not None:
        bits, whole = _in_words(words.shape[1], columns, bits_of(note))
        read_codes = _codes_in_whole_words if whole else _codes
        kind, numbers = _numbers(words.contiguous(), bits, columns, whole=whole)
    else:
        assert eights is not None
        bits, kind, numbers = 8, "uint8", eights.view(torch.uint8) ^ 128
    half = 1 << (bits - 1)
    zeros, of_column = read("weight_zero_point"), read("weight_g_idx")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = read_codes(zeros.T.contiguous(), bits)[:, :rows].T.to(torch.int16)
    elif zeros is not None:
        zeros = (zeros.to(torch.int16) + half).reshape(-1, 1 if zeros.numel() in (1, rows) else scales.shape[1])
        zeros = zeros.expand(rows, -1)
    if zeros is not None and zeros.shape != scales.shape:
        raise _Unfit(f"its zero points have the shape {tuple(zeros.shape)}, and {tuple(scales.shape)} is wanted")
    count = scales.shape[1]
    group = _group(columns, count, None, of_column)
    if of_column is not None:
        of_column = _order(of_column, columns, count, group)
    return Parts(kind, numbers, scales, group, _zeros(kind, zeros, half, scales), of_column)


def _of_four_bit_floats(numbers: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor | None, columns: int) -> Parts:
    if numbers.shape[1] * 2 != columns:
        raise _Unfit(f"its numbers have the shape {tuple(numbers.shape)} for {columns} columns")
    if whole is None:
        if scales.dtype != torch.uint8 or scales.shape[1] * 32 != columns:
            raise _Unfit(f"its scales are {scales.dtype} {tuple(scales.shape)}, and MXFP4 has one for each 32 columns")
        return Parts("mxfp4", numbers, scales, 32)
    if scales.dtype != torch.float8_e4m3fn or scales.shape[1] * 16 != columns:
        raise _Unfit(f"its scales are {scales.dtype} {tuple(scales.shape)}, and NVFP4 has one for each 16 columns")
    return Parts("nvfp4", numbers, scales.view(torch.uint8), 16, middle=1 / whole.float().reshape(1))


def _of_model_optimizer(read: Callable[[str], torch.Tensor | None], rows: int, columns: int) -> Parts:
    numbers, scales, whole = read("weight"), read("weight_scale"), read("weight_scale_2")
    if numbers is None or numbers.shape != (rows, columns // 2) or numbers.dtype != torch.uint8:
        shape = None if numbers is None else tuple(numbers.shape)
        raise _Unfit(f"its numbers have the shape {shape} for {rows} x {columns}")
    if scales is None or whole is None or whole.numel() != 1:
        raise _Unfit("NVFP4 has a scale for each 16 columns and one for the whole, and not both are there")
    parts = _of_four_bit_floats(numbers, scales, whole, columns)
    return parts._replace(middle=whole.float().reshape(1))  # it is multiplied with here, where others divide by theirs


def _in_words(count: int, columns: int, told: tuple[int, ...]) -> tuple[int, bool]:
    """Bits of a code where so many words hold a row, and whether no code lies across the end of a word, as compressed-tensors
    wrote them until it put each behind the one before."""
    for bits in told:
        if count == -(-columns * bits // 32):
            return bits, False
    for bits in told:
        if count == -(-columns // (32 // bits)):
            return bits, True
    return count * 32 // columns, False


def _numbers(words: torch.Tensor, bits: int, columns: int, *, whole: bool = False) -> tuple[str, torch.Tensor]:
    """The kind, and the bytes, of words int32 [rows, n] in which codes of so many bits follow each other, none of them across
    the end of a word where they are `whole`."""
    if whole:
        kind = "uint4" if bits < 4 else "uint8"
        return kind, groups.in_bytes(_codes_in_whole_words(words, bits)[:, :columns].contiguous(), groups.BITS[kind])
    if bits not in range(2, 9) or words.shape[1] != -(-columns * bits // 32):
        raise _Unfit(f"{words.shape[1]} words of 32 bits are no {columns} numbers")
    if bits == 4:  # the first code lies in a word's lowest bits, and so in its first byte's
        return "uint4", words.view(torch.uint8)[:, : -(-columns // 2)].contiguous()
    codes = _codes(words, bits)[:, :columns]
    kind = "uint4" if bits < 4 else "uint8"
    return kind, groups.in_bytes(codes.contiguous(), groups.BITS[kind])


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes [rows, ...], uint8, that follow each other in words int32 [rows, n], also across their ends."""
    found = words.contiguous().view(torch.uint8)
    if bits == 8:
        return found
    if bits == 4:
        return torch.stack((found & 15, found >> 4), -1).flatten(1)
    runs = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)).unflatten(1, (-1, bits)).long() & 0xFFFFFFFF
    codes = torch.empty(*runs.shape[:2], 32, dtype=torch.uint8, device=words.device)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        value = runs[..., word] >> shift
        if shift + bits > 32:
            value = value | runs[..., word + 1] << (32 - shift)
        codes[..., place] = (value & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)


def _codes_in_whole_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes [rows, ...], uint8, of words int32 [rows, n] that each hold as many as fit whole."""
    shifts = torch.arange(32 // bits, device=words.device) * bits
    return ((words.long()[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def _group(columns: int, count: int, told: Any, of_column: torch.Tensor | None) -> int:
    """Columns of a group: as the note says where that fits, else as many as share the columns evenly."""
    if type(told) is int and told > 0 and -(-columns // told) == count:
        return told
    if columns % count and of_column is None:
        raise _Unfit(f"{count} groups do not share {columns} columns evenly")
    return -(-columns // count)


def _order(of_column: torch.Tensor, columns: int, count: int, group: int) -> torch.Tensor | None:
    """The group of each column, or None where they lie side by side."""
    if of_column.shape != (columns,):
        raise _Unfit(f"its g_idx names groups of {of_column.numel()} columns of {columns}")
    if int(of_column.min()) < 0 or int(of_column.max()) >= count:
        if bool((of_column == -1).all()):  # as it is initialized, where nothing was ordered
            return None
        raise _Unfit(f"its g_idx names groups beyond its {count}")
    side_by_side = torch.arange(columns, device=of_column.device) // group
    return None if torch.equal(of_column.long(), side_by_side) else of_column.to(torch.int32)


def _zeros(kind: str, zeros: torch.Tensor | None, half: int, scales: torch.Tensor) -> torch.Tensor | None:
    """The zero points in as few bytes as they take: none where all are half of what the bits of the kind can count."""
    middle = 1 << (groups.BITS[kind] - 1)
    if zeros is None:
        return None if half == middle else torch.full(scales.shape, half, dtype=torch.uint8, device=scales.device)
    if bool((zeros == middle).all()):
        return None
    return (zeros.to(torch.uint8) if int(zeros.max()) < 256 else zeros).contiguous()


def _checked(name: str, parts: Parts, rows: int, columns: int) -> Parts:
    fine = True
    if parts.kind == "mxfp4":
        fine = bool((parts.scales < 255).all())
    elif parts.kind == "nvfp4":
        fine = bool((parts.scales & 127 != 127).all()) and bool(parts.middle.isfinite().all())  # type: ignore[union-attr]
    else:
        fine = bool(parts.scales.isfinite().all())
    if not fine:
        raise ModelError(f"model.name: the scales of {visible(name)} are not finite.", "The files may be damaged.")
    return parts


def _experts(each: list[Parts], shape: tuple[int, int], dtype: torch.dtype) -> PackedExperts:
    """The weight of all experts from the parts of each; one of a matrix."""
    first, (rows, columns) = each[0], shape

    def stacked(which: str) -> torch.Tensor:
        return torch.stack([getattr(parts, which) for parts in each])

    if first.kind in groups.BITS:
        zeros = None if first.zeros is None else stacked("zeros")
        of_column = None if first.of_column is None else stacked("of_column")
        return of_groups(
            first.kind,
            stacked("numbers"),
            stacked("scales"),
            first.group,
            columns,
            dtype,
            zeros=zeros,
            of_column=of_column,
        )
    middle = None if first.middle is None else torch.cat([parts.middle for parts in each])  # type: ignore[misc]
    held = Held(stacked("numbers").flatten(1), stacked("scales").flatten(1), middle)
    return PackedExperts(held, Form(first.kind, rows, columns, False, first.group, 1, dtype, True))


class PackedLinear(torch.nn.Linear):
    """A frozen linear layer whose weight stays packed: `x @ unpacked(weight).T + bias`.

    `weight` is its bytes, [rows, ...] uint8; gradients reach x alone. `compute_dtype` tells PEFT the format of an adapter
    beside it. Casts of the module leave scales and zero points as they are: they would change the numbers.
    """

    form: Form
    weight_scale: torch.Tensor
    weight_zero: torch.Tensor | None
    weight_of_column: torch.Tensor | None
    weight_middle: torch.Tensor | None

    def __init__(self, layer: torch.nn.Linear) -> None:
        """The layer without its weight, which `fill` gives it."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.compute_dtype = layer.weight.dtype
        self.register_parameter("weight", None)
        self.bias = layer.bias
        self.train(layer.training)

    def fill(self, parts: Parts) -> None:
        """Takes its weight."""
        packed = _experts([parts], (self.out_features, self.in_features), self.compute_dtype)
        self.form, held = packed.form, packed.held
        self.weight = torch.nn.Parameter(held.numbers.view(self.out_features, -1), requires_grad=False)
        self.weight.form = self.form  # type: ignore[attr-defined]  # what counts weights reads it
        self.register_buffer("weight_scale", held.scales)
        self.register_buffer("weight_zero", held.zeros)
        self.register_buffer("weight_of_column", held.of_column)
        self.register_buffer("weight_middle", held.middle)

    def _held(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.weight_scale, self.weight_middle, self.weight_zero, self.weight_of_column

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """What its weight stands for, made anew for whoever asks."""
        return _wide(self._held(), self.form, dtype)

    @property
    def packed_bytes(self) -> int:
        """Bytes that its weight takes."""
        return sum(each.numel() * each.element_size() for each in (self.weight, *self.buffers()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            form = self.form
            packing = form.kind, form.rows, form.columns, form.block, form.scale_block
            out = _in_graph(input, *packing, *self._held())
        else:
            out = _Product.apply(input, self.form, *self._held())
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        kinds = {}
        for name, value in list(self._buffers.items()):
            if value is not None and value.is_floating_point():
                kinds[name] = value.dtype
                self._buffers[name] = value.view({2: torch.int16, 4: torch.int32}[value.element_size()])
        super()._apply(fn, recurse)
        for name, dtype in kinds.items():
            value = self._buffers[name]
            assert value is not None
            self._buffers[name] = value.view(dtype)
        if self.weight is not None:
            self.weight.form = self.form  # type: ignore[attr-defined]
        return self


def leave_to_each_process(model: torch.nn.Module) -> None:
    """Has data-parallel training not send FP8 weights, packed layers and packed experts to the other processes at its start:
    some it cannot, and each process has read the same files; nor experts that are this process's alone, whose gradients it must
    not average either. Marks the instance that will be wrapped, where it has such weights."""
    names = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Fp8Linear)]
    for path, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            names += [f"{path}.weight", *(f"{path}.{name}" for name, _ in layer.named_buffers())]
    names += [
        name
        for name, weight in model.named_parameters()
        if isinstance(weight, PackedExperts) or share_of(weight) is not None
    ]
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


class _Product(torch.autograd.Function):
    """Keeps the packed numbers for the backward pass, not the wide ones, which are made again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, form: Form, *held: torch.Tensor | None) -> torch.Tensor:
        ctx.form = form
        ctx.save_for_backward(*held)
        return torch.nn.functional.linear(x, _wide(held, form, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ _wide(ctx.saved_tensors, ctx.form, gradient.dtype), *(None,) * 6


class _Traced(torch.autograd.Function):
    """The same for code that is being compiled, where unpacking is a node of its own, forward and again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packing: tuple[str, int, int, int, int], *held: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.packing = packing
        ctx.save_for_backward(*held)
        return torch.nn.functional.linear(x, matrix_unpacked_op(*held, *packing, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        wide = matrix_unpacked_op(*ctx.saved_tensors, *ctx.packing, gradient.dtype, gradient)
        return gradient @ wide, *(None,) * 6


@torch.compiler.allow_in_graph
def _in_graph(
    x: torch.Tensor, kind: str, rows: int, columns: int, block: int, scale_block: int, *held: torch.Tensor | None
) -> torch.Tensor:
    """One node for the first half of the compiler, so that a checkpoint around it reaches its operations with torch 2.11 too."""
    out: torch.Tensor = _Traced.apply(x, (kind, rows, columns, block, scale_block), *held)
    return out


def _wide(held: tuple[torch.Tensor | None, ...], form: Form, dtype: torch.dtype) -> torch.Tensor:
    numbers, scales, middle, zeros, of_column = held
    assert numbers is not None
    assert scales is not None
    return matrix_unpacked(
        Held(numbers.detach().view(1, -1), scales, middle, zeros=zeros, of_column=of_column), form._replace(dtype=dtype)
    )


@dataclass
class _Places:
    """Where the packed weights of the files belong in a model."""

    layers: dict[str, str] = field(default_factory=dict)
    """A layer's path in the model, by its name in the files."""
    joined: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = field(default_factory=dict)
    """By the path of a weight that joins several: its conversion, and the names in the files of each of its sources."""
    zero_biases: bool = False
    """Whether the files hold biases of zeros beside some of them."""

    def others(self) -> Iterator[str]:
        """Names in the files of what is joined."""
        return (name for _, sources in self.joined.values() for names in sources.values() for name in names)


class _Later(QuantizationConfigMixin):
    """Has `from_pretrained` leave out the weights that are filled in afterwards."""

    def __init__(self, places: _Places) -> None:
        self.quant_method = _BY  # type: ignore[assignment]
        self.places = places


@register_quantizer(_BY)
class _LeavesOut(HfQuantizer):
    """Does what `_Later` says."""

    quantization_config: _Later
    requires_calibration = False
    is_trainable = True

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **more: Any) -> None:
        for path in self.quantization_config.places.layers.values():
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, PackedLinear(model.get_submodule(path)))  # type: ignore[arg-type]
        ends = "|".join((*_ENDS, *(("bias",) if self.quantization_config.places.zero_biases else ())))
        layers = (*self.quantization_config.places.layers, *self.quantization_config.places.others())
        patterns = {rf"\.({ends})$", *(rf"^{re.escape(name)}\.weight$" for name in layers)}
        known = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(known or ()), *patterns}
        for name in self.quantization_config.places.joined:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            module.register_parameter(leaf, None)
            module._is_hf_initialized = True  # type: ignore[assignment]  # a model's own beginning would write to it

    def postprocess_model(self, model: PreTrainedModel, **more: Any) -> None:
        self.remove_quantization_config(model)


def load_packed(
    loader: Any, stored: StoredPacked, settings: dict[str, Any], head: Head, *, keep: bool, experts: bool = False
) -> tuple[PreTrainedModel, HeldPacked]:
    """The model with its packed weights, and what became of them; `keep` leaves linear layers packed, and `experts` those of
    a mixture.

    Raises ModelError for packed numbers that do not fit the model or each other, and for weights that are missing.
    """
    entries = Entries(folder_of(stored.source, stored.revision), stored.note)
    with torch.device("meta"):
        shell = loader.from_config(stored.config, dtype=settings["dtype"])
    places = _placed(entries, shell)
    if not places.layers and not places.joined:
        raise ModelError(
            f"model.name: {visible(stored.source)} says that it is stored by {stored.method} and holds no such numbers."
        )
    own = {**settings, "config": stored.config, "quantization_config": _Later(places)}
    model = load_strictly(loader, stored.source, head, **own)
    told = settings.get("device_map")
    device = told[""] if isinstance(told, dict) and "" in told else torch.device("cpu")
    held = HeldPacked(stored.method, keep)
    outputs = model.get_output_embeddings()
    for name, path in places.layers.items():
        module: Any = model.get_submodule(path)
        module.fill(entries.parts(name, device, (module.out_features, module.in_features)))
        _refuse_added_bias(entries, name, module)
        if keep and module is not outputs:
            held.layers, held.packed_bytes = held.layers + 1, held.packed_bytes + module.packed_bytes
            continue
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _plain(module, settings["dtype"]))
        held.widened += 1
    for name, (converter, sources) in places.joined.items():
        owner, _, leaf = name.rpartition(".")
        like = shell.get_parameter(name)
        if keep and experts:
            refuse_unserved(shell.get_submodule(owner), name)
            packed = _joined(entries, name, converter, sources, like, device)
            held.experts, held.packed_bytes = held.experts + 1, held.packed_bytes + packed.packed_bytes
            weight = torch.nn.Parameter(packed, requires_grad=False)
        else:
            weight = torch.nn.Parameter(_joined_wide(entries, name, converter, sources, like, model, device))
            held.widened += 1
        model.get_submodule(owner).register_parameter(leaf, weight)
    model.tie_weights()
    return model, held


def _plain(module: PackedLinear, dtype: torch.dtype) -> torch.nn.Linear:
    made = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    made.weight, made.bias = torch.nn.Parameter(module.wide(dtype)), module.bias
    return made.train(module.training)


def _refuse_added_bias(entries: Entries, name: str, module: PackedLinear) -> None:
    """Older tools write a bias of zeros for each layer; one that is not zero belongs to another model."""
    bias = entries.bias(name) if module.bias is None else None
    if bias is not None and bool(bias.any()):
        raise ModelError(f"model.name: {visible(name)} has a bias in the files, for which the model has no place.")


def _placed(entries: Entries, shell: PreTrainedModel) -> _Places:
    """Where each packed weight belongs, by transformers' own names and conversions. Raises ModelError for those without a place."""
    mapping = get_model_conversion_mapping(shell)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_source = {source: each for each in converters for source in each.source_patterns}
    state, found = shell.state_dict(), _Places(zero_biases=bool(entries.zero_biases))
    ignored = [*(shell._keys_to_ignore_on_load_unexpected or ())]
    for name in entries:
        key = f"{name}.weight"
        target, source = rename_source_key(key, renamings, converters, shell.base_model_prefix, state)
        if any(re.search(pattern, key) for pattern in ignored) or (name == "lm_head" and target not in state):
            continue
        path = target.removesuffix(".weight")
        module = _module(shell, path)
        if target not in state or (source is None and type(module) is not torch.nn.Linear):
            kind = "" if target not in state else f", which is a {type(module).__name__} there"
            raise ModelError(f"model.name: the model has no place for the packed {visible(name)}{kind}.")
        if source is None:
            found.layers[name] = path
            continue
        converter = by_source[source]
        if len(converter.target_patterns) > 1:
            raise ModelError(
                f"model.name: transformers takes {visible(name)} apart, which cannot be done while it is packed.",
                "Take the model that it was made from, and model.quantization: nf4 holds it in as few bits.",
            )
        found.joined.setdefault(target, (converter, {}))[1].setdefault(source, []).append(name)
    return found


def _joined(
    entries: Entries, name: str, converter: WeightConverter, sources: dict[str, list[str]], like: torch.Tensor,
    device: torch.device,
) -> PackedExperts:  # fmt: skip
    """The weight of all experts from each one's packed parts, put under each other. Raises ModelError for parts that are not
    alike, and for conversions that do more."""
    for operation in converter.operations:
        if (kind := type(operation).__name__) not in ("MergeModulelist", "Concatenate"):
            _stays_wide(name, f"{kind} of transformers moves numbers, and not their scales")
    count, rows, columns = like.shape
    made: list[Parts] = []
    for expert in range(count):
        each = [
            _part_of(entries, name, names, expert, count, columns, device) for names in _in_turn(converter, sources)
        ]
        joined = _under_each_other(name, each)
        if len(joined.numbers) != rows:
            raise ModelError(
                f"model.name: {visible(name)} has {len(joined.numbers)} rows an expert, and {rows} are wanted."
            )
        made.append(joined)
    zeroed = any(parts.zeros is not None for parts in made)
    made = [_with_zeros(parts) if zeroed else parts for parts in made]
    ordered = any(parts.of_column is not None for parts in made)
    made = [_with_order(parts, columns) if ordered else parts for parts in made]
    if len({(parts.kind, parts.group, parts.scales.shape, parts.scales.dtype) for parts in made}) > 1:
        _stays_wide(name, "its experts are not all held in the same bits and groups")
    return _experts(made, (rows, columns), like.dtype)


def _in_turn(converter: WeightConverter, sources: dict[str, list[str]]) -> list[list[str]]:
    """The names of each source in the order in which the conversion joins them."""
    return [sources[source] for source in converter.source_patterns if source in sources]


def _part_of(
    entries: Entries, name: str, names: list[str], expert: int, count: int, columns: int, device: torch.device
) -> Parts:
    if len(names) != count:
        raise ModelError(
            f"model.name: the files hold {len(names)} packed parts of {visible(name)} for {count} experts."
        )
    rows = entries.shape(names[expert])[0]
    return entries.parts(names[expert], device, (rows, columns))


def _under_each_other(name: str, each: list[Parts]) -> Parts:
    if len(each) == 1:
        return each[0]
    if any(parts.zeros is not None for parts in each):
        each = [_with_zeros(parts) for parts in each]
    first = each[0]
    for other in each[1:]:
        alike = (first.kind, first.group, first.scales.dtype) == (other.kind, other.group, other.scales.dtype)
        orders = first.of_column, other.of_column
        same_order = orders == (None, None) or (None not in orders and torch.equal(*orders))  # type: ignore[arg-type]
        middles = first.middle, other.middle
        if not alike or not (middles == (None, None) or torch.equal(*middles)):  # type: ignore[arg-type]
            _stays_wide(name, "the parts of an expert are held in other bits, groups or scales than each other")
        if not same_order:
            _stays_wide(name, "the parts of an expert have their columns in other orders")
    zeros = None if first.zeros is None else torch.cat([parts.zeros for parts in each])  # type: ignore[misc]
    return first._replace(
        numbers=torch.cat([parts.numbers for parts in each]),
        scales=torch.cat([parts.scales for parts in each]),
        zeros=zeros,
    )


def _with_zeros(parts: Parts) -> Parts:
    if parts.kind not in groups.BITS:
        return parts
    half = 1 << (groups.BITS[parts.kind] - 1)
    zeros = torch.full(parts.scales.shape, half, device=parts.scales.device) if parts.zeros is None else parts.zeros
    return parts._replace(zeros=zeros.to(torch.int16))


def _with_order(parts: Parts, columns: int) -> Parts:
    if parts.of_column is not None:
        return parts
    return parts._replace(of_column=(torch.arange(columns, device=parts.scales.device) // parts.group).to(torch.int32))


def _joined_wide(
    entries: Entries, name: str, converter: WeightConverter, sources: dict[str, list[str]], like: torch.Tensor,
    model: PreTrainedModel, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """What all experts' weight stands for."""
    out = torch.empty(like.shape, dtype=like.dtype, device=device)
    for expert, room in enumerate(out):
        parts = {}
        for source, names in ((each, sources[each]) for each in converter.source_patterns if each in sources):
            if len(names) != len(out):
                raise ModelError(
                    f"model.name: the files hold {len(names)} packed parts of {visible(name)} for {len(out)} experts."
                )
            parts[source] = [entries.wide(names[expert], like.dtype, device)]
        room.copy_(converted(converter, parts, name, like, model.config))
    return out


def _stays_wide(name: str, reason: str) -> NoReturn:
    raise ModelError(
        f"model.quantize_moe_experts: {visible(name)} cannot stay packed: {reason}.",
        "Set model.quantize_moe_experts to false.",
    ).mended_by({"model.quantize_moe_experts": False})


def _module(model: torch.nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def folder_of(source: str, revision: str | None) -> Path:
    """The folder of a model's weights, fetched where it is a name on a hub."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        wanted = ["model*.safetensors", "model.safetensors.index.json"]
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    return folder
