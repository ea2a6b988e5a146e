"""The packed weights of a folder's files, read one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import dot_natural_key

from engine.errors import ModelError, visible
from engine.model_files import header, weight_files
from engine.models.stored_packed.formats import (
    Parts,
    Unfit,
    checked,
    note_bits,
    of_awq,
    of_compressed_tensors,
    of_gptq,
    of_model_optimizer,
    weight_of,
)  # fmt: skip

LEADS = "qweight", "weight_packed"
ENDS = (
    *LEADS, "qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
    "weight_global_scale", "input_global_scale", "input_scale", "input_zero_point", "weight_scale_2", "k_scale", "v_scale",
)  # fmt: skip


class OpenFiles:
    """Tensors of safetensors files, each of which is opened, and its header read, once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._opened = contextlib.ExitStack()

    def read(self, file: Path, key: str) -> torch.Tensor:
        """A tensor as it lies in its file; who changes it in place changes what is read next."""
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = self._opened.enter_context(safe_open(file, "pt"))
        value: torch.Tensor = self._open[file].get_tensor(key)
        return value

    def close(self) -> None:
        """Closes the files; one that is read again is opened anew."""
        self._open.clear()
        self._opened.close()


class Entries:
    """The packed weights of a folder's files, by the names of their layers, read one at a time."""

    def __init__(self, folder: Path, note: Mapping[str, Any]) -> None:
        self.note = note
        self._files: dict[str, dict[str, tuple[Path, tuple[int, ...]]]] = {}
        self._open = OpenFiles()
        # What lies under the name of a plain weight, by its format.
        lead = {"compressed-tensors": "I8", "modelopt": "U8"}.get(str(note.get("quant_method")))
        for file in weight_files(folder):
            for key, each in header(file).items():
                name, _, end = key.rpartition(".")
                if name and (end in ENDS or end == "bias" or (end == "weight" and each.dtype == lead)):
                    self._files.setdefault(name, {})[end] = file, each.shape
        self._files = {name: ends for name, ends in self._files.items() if {*LEADS, "weight"} & ends.keys()}
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

    def layer_of(self, key: str) -> str:
        """The layer whose entry of the files this is."""
        return key.rpartition(".")[0]

    def holds(self, key: str) -> bool:
        """Whether this entry of the files is a part of a packed weight, or a bias that says nothing."""
        name, _, end = key.rpartition(".")
        return end in self._files.get(name, ()) and (end != "bias" or name in self.zero_biases)

    def leads(self, key: str) -> bool:
        """Whether this entry of the files holds the numbers themselves."""
        return self.holds(key) and key.rpartition(".")[2] in (*LEADS, "weight")

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of what a layer's weight stands for, as far as its own tensors and the note tell."""
        ends = self._files[name]
        if "qweight" in ends:
            high, wide = ends["qweight"][1]
            if self.note.get("quant_method") == "awq":
                return wide * 8, high
            return wide, ends["g_idx"][1][0] if "g_idx" in ends else high * 32 // note_bits(self.note)
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
        if end not in self._files[name]:
            return None
        return self._open.read(self._files[name][end][0], f"{name}.{end}")

    def close(self) -> None:
        """Closes the files; one that is read again is opened anew."""
        self._open.close()

    def parts(
        self,
        name: str,
        device: torch.device | str = "cpu",
        shape: tuple[int, int] | None = None,
        changed: Mapping[str, torch.Tensor] | None = None,
    ) -> Parts:
        """The weight of a layer of this shape, laid out as it is held, with other tensors in place of some by their `changed`
        ends. Raises ModelError for tensors that do not fit."""
        rows, columns = shape or self.shape(name)

        def read(end: str) -> torch.Tensor | None:
            found = (changed or {}).get(end, self.maybe(name, end))
            return None if found is None else found.to(device)

        ends = self._files[name]
        try:
            if "qweight" in ends:
                if self.note.get("quant_method") == "awq":
                    return checked(name, of_awq(read, rows, columns), rows, columns)
                return checked(name, of_gptq(read, rows, columns, self.note), rows, columns)
            if self.note.get("quant_method") == "modelopt":
                return checked(name, of_model_optimizer(read, rows, columns), rows, columns)
            return checked(name, of_compressed_tensors(read, rows, columns, self.note), rows, columns)
        except Unfit as problem:
            raise ModelError(f"model.name: {visible(name)} cannot be read: {problem}.") from problem

    def dequantize(
        self,
        name: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        changed: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """What a layer's weight stands for, [rows, columns], also with other tensors in place of some."""
        return weight_of([self.parts(name, device, changed=changed)], self.shape(name), dtype).unpack(0)


def folder_of(source: str, revision: str | None) -> Path:
    """The folder of a model's weights, fetched where it is a name on a hub."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        wanted = ["model*.safetensors", "model.safetensors.index.json"]
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    return folder
