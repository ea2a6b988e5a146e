"""Layers as bitsandbytes' files hold them: in four bits (NF4, FP4) with a scale for each block, or in eight with one for each row.

Four bits are `weight` [bytes, 1], two numbers in each, the first in the high half; `weight.absmax` has the scale of each block of
the numbers in order, itself in eight bits where `weight.nested_absmax` is there; what else is told (shape, sizes of blocks, the
scales' offset) is JSON in bytes, `weight.quant_state.bitsandbytes__nf4`. Eight bits are `weight` [out, in] int8 and `SCB` [out],
127 times a row's step. Nothing here calls bitsandbytes, which reads what is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.errors import ModelError, visible
from engine.model_files import header, weight_files
from engine.models.stored_packed.entries import OpenFiles

STATE = "quant_state.bitsandbytes__"
_OF_4_BITS = "absmax", "quant_map", "nested_absmax", "nested_quant_map"
_OF_8_BITS = "SCB", "weight_format"


class BitsAndBytes:
    """The weights in few bits of a folder's files, by the names of their layers, read one at a time."""

    def __init__(self, folder: Path) -> None:
        every = {key: (file, each) for file in weight_files(folder) for key, each in header(file).items()}
        fours = {key.partition(f".weight.{STATE}")[0] for key in every if f".weight.{STATE}" in key}
        eights = {key.removesuffix(".SCB") for key in every if key.endswith(".SCB")}
        self._files: dict[str, dict[str, tuple[Path, tuple[int, ...]]]] = {name: {} for name in fours | eights}
        for key, (file, each) in every.items():
            name, end = self._split(key)
            if name in self._files and (end in ("weight", *_OF_8_BITS) or end.startswith("weight.")):
                self._files[name][end] = file, each.shape
        self._open = OpenFiles()

    @staticmethod
    def _split(key: str) -> tuple[str, str]:
        """The layer and the end of an entry's name: of four bits the end has a dot in it."""
        name, _, last = key.rpartition(".")
        if last in _OF_4_BITS or last.startswith(STATE.rpartition(".")[2]):
            middle = name.removesuffix(".quant_state")
            if middle.endswith(".weight"):
                layer = middle.removesuffix(".weight")
                return layer, key[len(layer) + 1 :]
        return name, last

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def layer_of(self, key: str) -> str:
        """The layer whose entry of the files this is."""
        return self._split(key)[0]

    def holds(self, key: str) -> bool:
        """Whether this entry of the files is a part of a weight in few bits."""
        name, end = self._split(key)
        return end in self._files.get(name, ())

    def leads(self, key: str) -> bool:
        """Whether this entry of the files holds the numbers themselves."""
        return self.holds(key) and self._split(key)[1] == "weight"

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a layer's weight."""
        if "SCB" in self._files[name]:
            high, wide = self._files[name]["weight"][1]
            return high, wide
        shape = self._quant_state(name).get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(each) is int for each in shape):
            raise ModelError(f"model.name: {visible(name)}.weight cannot be read: its files do not tell its shape.")
        return shape[0], shape[1]

    def read(self, name: str, end: str) -> torch.Tensor:
        """A part of a layer. Raises ModelError for one that is not there."""
        if end not in self._files[name]:
            raise ModelError(f"model.name: the files hold no {visible(name)}.{end}.", "They may be incomplete.")
        return self._open.read(self._files[name][end][0], f"{name}.{end}")

    def close(self) -> None:
        """Closes the files; one that is read again is opened anew."""
        self._open.close()

    def dequantize(
        self, name: str, dtype: torch.dtype, changed: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What a layer's weight stands for, [rows, columns], also with other tensors in place of some by their ends."""
        rows, columns = self.shape(name)
        changed = changed or {}
        numbers = changed.get("weight", self.read(name, "weight"))
        if "SCB" in self._files[name]:
            scales = changed.get("SCB", self.read(name, "SCB"))
            return (numbers.float() * (scales.float() / 127)[:, None]).to(dtype)
        code = self.read(name, "weight.quant_map").float()
        pairs = numbers.contiguous().flatten().view(torch.uint8)
        each = code[torch.stack([pairs >> 4, pairs & 15], 1).flatten().long()][: rows * columns]
        scales = self._scales(name, changed).repeat_interleave(self._block(name))[: rows * columns]
        return (each * scales).view(rows, columns).to(dtype)

    def requantized(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a layer, by the ends of their names, that change where it is to hold `weight` [rows, columns], float32.

        A block or row keeps its scale, or takes that of its new largest number, whichever is nearer in squares.
        """
        if "SCB" in self._files[name]:
            return self._in_eights(name, weight)
        block, code = self._block(name), self.read(name, "weight.quant_map").float()
        flat = weight.flatten()
        blocks = F.pad(flat, (0, -flat.numel() % block)).view(-1, block)
        held, scales = self._held_scales(name, self._scales(name), blocks.abs().amax(1))
        least: torch.Tensor | None = None
        codes = torch.empty(0)
        for place, step in enumerate(scales):
            found = nearest(torch.where(step[:, None] > 0, blocks / step[:, None], 0.0), code)
            error = (code[found] * step[:, None] - blocks).square().sum(1)
            if least is None:
                least, codes, chosen = error, found, torch.zeros(len(blocks), dtype=torch.long)
                continue
            better = error < least
            least, codes = torch.where(better, error, least), torch.where(better[:, None], found, codes)
            chosen = torch.where(better, place, chosen)
        own = torch.stack([each for each, _ in held], 1).gather(1, chosen[:, None])[:, 0]
        old = self.read(name, "weight")
        half = codes.flatten()[: flat.numel()].to(torch.uint8)
        pairs = F.pad(half, (0, half.numel() % 2)).view(-1, 2)
        whole = (pairs[:, 0] << 4 | pairs[:, 1]).view(old.dtype).view(old.shape)
        nested = {} if held[0][1] is None else {"weight.nested_absmax": held[0][1]}
        return {"weight": whole, "weight.absmax": own, **nested}

    def _held_scales(
        self, name: str, before: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], list[torch.Tensor]]:
        """How the scales of before and the `wanted` ones are held, each with the scales of scales, and what they stand for. The
        latter grow where a wanted one reaches further; what is told of the offset stays."""
        old = self.read(name, "weight.absmax")
        if "weight.nested_absmax" not in self._files[name]:
            return [(old, None), (wanted.to(old.dtype), None)], [before, wanted.to(old.dtype).float()]
        offset, size = self._offset(name), self._size(name, "nested_blocksize")
        code, steps = self.read(name, "weight.nested_quant_map").float(), self.read(name, "weight.nested_absmax")
        reach = F.pad((wanted - offset).abs(), (0, -wanted.numel() % size)).view(-1, size).amax(1)
        steps = torch.maximum(steps.float(), reach).to(steps.dtype)
        of_each = steps.float().repeat_interleave(size)[: wanted.numel()]
        found = [nearest((each - offset) / of_each.clamp(min=1e-38), code) for each in (before, wanted)]
        return [(each.to(torch.uint8), steps) for each in found], [code[each] * of_each + offset for each in found]

    def _in_eights(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        old = self.read(name, "SCB").float()
        largest = weight.abs().amax(1)
        found = []
        for scales in (old, largest):
            step = (scales / 127)[:, None]
            numbers = torch.where(step > 0, weight / step, 0.0).round().clamp(-127, 127)
            found.append((numbers, (numbers * step - weight).square().sum(1)))
        better = found[1][1] < found[0][1]
        numbers = torch.where(better[:, None], found[1][0], found[0][0]).to(torch.int8)
        return {"weight": numbers, "SCB": torch.where(better, largest, old).to(self.read(name, "SCB").dtype)}

    def _scales(self, name: str, changed: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """What each block of a layer in four bits is multiplied with, float32."""
        changed = changed or {}
        held = changed.get("weight.absmax", self.read(name, "weight.absmax"))
        if "weight.nested_absmax" not in self._files[name]:
            return held.float()
        code = self.read(name, "weight.nested_quant_map").float()
        steps = changed.get("weight.nested_absmax", self.read(name, "weight.nested_absmax")).float()
        of_each = steps.repeat_interleave(self._size(name, "nested_blocksize"))[: held.numel()]
        return code[held.long()] * of_each + self._offset(name)

    def _quant_state(self, name: str) -> dict[str, Any]:
        end = next((each for each in self._files[name] if each.startswith(f"weight.{STATE}")), "weight.quant_state")
        try:
            told = json.loads(bytes(self.read(name, end).tolist()))
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise ModelError(f"model.name: {visible(name)}.weight cannot be read: its {STATE} is no JSON.")
        return told

    def _size(self, name: str, what: str) -> int:
        found = self._quant_state(name).get(what)
        if type(found) is not int or found < 1:
            raise ModelError(f"model.name: {visible(name)}.weight cannot be read: its {what} is {visible(str(found))}.")
        return found

    def _block(self, name: str) -> int:
        return self._size(name, "blocksize")

    def _offset(self, name: str) -> float:
        found = self._quant_state(name).get("nested_offset")
        if not isinstance(found, (int, float)):
            raise ModelError(f"model.name: {visible(name)}.weight cannot be read: its nested_offset is no number.")
        return float(found)


def nearest(values: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The place in the table `code` of what is nearest to each of the values."""
    ordered, places = code.sort()
    return places[torch.bucketize(values, (ordered[1:] + ordered[:-1]) / 2)]
