"""An adapter merged into a base that others quantized, in the base's own packed format.

What the adapter changes is added up in float32 and rounded anew (`engine.models.stored_packed.requantize`), a weight at a time; all
else is copied as it lies, with its scales, zero points and note, so that whoever opens the base opens the result. Few bits may round
away much of what was trained, so for each kind of weight it is told how much of it is there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine import model_files
from engine.config.tree import RunConfig
from engine.errors import ModelError, WorkbenchError, visible
from engine.export.merge import (
    Plan,
    added_weights,
    merged_weight,
    plan,
    refuse_left_over,
    shape_of,
    size_of_weights,
    write_safetensors,
)
from engine.export.stored import dequantized_header, dequantized_weights, packed_in, read_weight
from engine.facts.stored import ROUNDED_TO, block_of, stored_as, with_note
from engine.kernels.experts.packed import of_mxfp4
from engine.models.stored_fp8 import widened
from engine.models.stored_packed.entries import Entries, OpenFiles
from engine.models.stored_packed.in_bitsandbytes import BitsAndBytes
from engine.models.stored_packed.requantize import nearest_fp8, nearest_mxfp4, requantized

Report = Callable[[str, int, int], None]


@dataclass
class Rounded:
    """What rounding a merged weight to the base's format did, of all weights of a kind."""

    kind: str
    weights: int = 0
    error: float = 0.0
    """Distance from the exact merge as a share of its size."""
    kept: float = 0.0
    """Size of what the weights moved by, as a share of what the adapter asked for."""
    cosine: float = 0.0
    """How much it points the same way: 1 where all of it is there, 0 where none is."""
    sums: dict[str, float] = field(default_factory=dict, repr=False)

    def add(self, base: torch.Tensor, merged: torch.Tensor, result: torch.Tensor) -> None:
        """Counts one more weight, each of them in float32."""
        moved, asked = result - base, merged - base
        found = {
            "error": (result - merged).double().square().sum(), "size": merged.double().square().sum(),
            "moved": moved.double().square().sum(), "asked": asked.double().square().sum(),
            "along": (moved.double() * asked.double()).sum(),
        }  # fmt: skip
        self.sums = {name: self.sums.get(name, 0.0) + float(value) for name, value in found.items()}
        self.weights += 1
        sums = {name: max(value, 1e-150) if name != "along" else value for name, value in self.sums.items()}
        self.error = math.sqrt(self.sums["error"] / sums["size"])
        if self.sums["asked"] == 0:  # of nothing, all is there
            self.kept = self.cosine = 1.0
            return
        self.kept = math.sqrt(self.sums["moved"] / sums["asked"])
        self.cosine = sums["along"] / math.sqrt(sums["moved"] * sums["asked"])

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "sums"}


def refuse_unserved(config: RunConfig, base: Path) -> str:
    """The base's format. Raises WorkbenchError where there is none into which a merged weight is rounded."""
    told = stored_as(with_note(base, model_files.read_json(base / "config.json")).get("quantization_config"))
    if told not in ROUNDED_TO:
        held = f"held in {visible(told)}, into which nothing is rounded" if told else "held in plain numbers"
        raise WorkbenchError(f"packed: {model_files.place(base)} is {held}.", "Export with --to safetensors.")
    if config.model.quantization != "none":
        raise WorkbenchError(
            f"packed: training held this base in {config.model.quantization}, and its files hold it in {visible(told)}.",
            "Export with --to safetensors, or the adapter itself (--to adapter).",
        )
    return told


class Weights:
    """The weights of a folder in packed formats, in float32, and the entries of its files that hold each."""

    def __init__(self, folder: Path) -> None:
        self.every = model_files.stored_weights(folder)
        note = with_note(folder, model_files.read_json(folder / "config.json")).get("quantization_config")
        self.block = block_of(note) if isinstance(note, Mapping) else None
        self.entries: Entries | BitsAndBytes | None = packed_in(folder)
        self._files = {key: file for file in model_files.weight_files(folder) for key in model_files.header(file)}
        self._of_layer: dict[str, list[str]] = {}
        self._open = OpenFiles()
        for key in self.every:
            if self.entries is not None and self.entries.holds(key):
                self._of_layer.setdefault(self.entries.layer_of(key), []).append(key)
        self.owners = {key: name for name in dequantized_weights(folder) for key in self._keys(name)}
        """By the name of an entry the weight, by its name in `dequantized_weights`, that changes with it; none for plain ones."""

    def _keys(self, name: str) -> list[str]:
        layer, _, end = name.rpartition(".")
        if end == "weight" and layer in self._of_layer:
            return self._of_layer[layer]
        if f"{name}_blocks" in self.every:
            return [f"{name}_blocks", f"{name}_scales"]
        if name in self.every and self.every[name].dtype in ("F8_E4M3", "F8_E5M2"):
            return [key for key in (name, f"{name}_scale_inv", f"{name}_scale") if key in self.every]
        return []

    def raw(self, key: str) -> torch.Tensor:
        """An entry of the files as it lies; not to be changed in place."""
        return self._open.read(self._files[key], key)

    def close(self) -> None:
        """Closes the files."""
        self._open.close()
        if self.entries is not None:
            self.entries.close()

    def refuse_unserved(self, name: str) -> None:
        """Raises ModelError for a packed weight whose numbers `rounded` cannot write anew."""
        keys = self._keys(name)
        if name not in keys or len(self.every[name].shape) == 2:
            return
        scale = self.every[keys[1]].shape if len(keys) > 1 else ()
        if not scale or scale[0] != self.every[name].shape[0]:
            raise ModelError(
                f"packed: {visible(name)} has one scale for all experts, which are rounded one by one.",
                "Export with --to safetensors.",
            )

    def read(self, name: str, changed: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """A packed weight, with `changed` entries by their names, in the shape of `dequantized_weights`, float32."""
        changed = changed or {}

        def raw(key: str) -> torch.Tensor:
            return changed[key] if key in changed else self.raw(key)

        keys, layer = self._keys(name), name.rpartition(".")[0]
        if self.entries is not None and layer in self._of_layer:
            own = {key.removeprefix(f"{layer}."): value for key, value in changed.items()}
            return self.entries.dequantize(layer, torch.float32, changed=own)
        if f"{name}_blocks" in keys:
            return of_mxfp4(raw(keys[0]), raw(keys[1]), torch.float32, turned=True).all_unpacked()
        return widened(name, raw(name), raw(keys[1]) if len(keys) > 1 else None, self.block, torch.float32)

    def rounded(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The entries that change, by their names, where a packed weight is to be this one."""
        keys, layer = self._keys(name), name.rpartition(".")[0]
        if self.entries is not None and layer in self._of_layer:
            return {f"{layer}.{end}": value for end, value in requantized(self.entries, layer, weight).items()}
        if f"{name}_blocks" in keys:
            blocks, scales = self.raw(keys[0]).clone(), self.raw(keys[1]).clone()
            for expert, each in enumerate(weight):
                numbers, scales[expert] = nearest_mxfp4(each.T.contiguous(), scales[expert])
                blocks[expert] = numbers.view_as(blocks[expert])
            return {keys[0]: blocks, keys[1]: scales}
        scale = self.raw(keys[1]) if len(keys) > 1 else None
        return dict(zip(keys, self._in_fp8(name, weight, self.raw(name), scale), strict=True))

    def _in_fp8(
        self, name: str, weight: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if weight.dim() == 2:
            return nearest_fp8(name, weight, numbers, scale, self.block)
        self.refuse_unserved(name)
        assert scale is not None
        every = [
            nearest_fp8(name, part, old, own, self.block) for part, old, own in zip(weight, numbers, scale, strict=True)
        ]
        return torch.stack([each for each, _ in every]), torch.stack([each for _, each in every])


@dataclass
class Written:
    """What was written: by kind what rounding did, and by the name of each weight that changed what it is now."""

    kinds: dict[str, Rounded] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, base: torch.Tensor, merged: torch.Tensor, result: torch.Tensor) -> None:
        kind = kind_of(name)
        self.kinds.setdefault(kind, Rounded(kind)).add(base, merged, result)
        self.digests[name] = digest(result)

    def compare(self, folder: Path) -> int:
        """How many weights are, read back, what they were rounded to. Raises ModelError for one that is not."""
        with closing(Weights(folder)) as weights:
            for name, wanted in self.digests.items():
                if digest(weights.read(name)) != wanted:
                    raise ModelError(f"packed: {visible(name)} is read back as other numbers than were written.")
        return len(self.digests)


def kind_of(name: str) -> str:
    """The kind of a weight: the name of its layer, of experts with `experts.` before it."""
    parts = name.removesuffix(".weight").split(".")
    return f"experts.{parts[-1]}" if "experts" in parts[:-1] else parts[-1]


def digest(value: torch.Tensor) -> str:
    """A hash of the numbers; zeros of either sign are the same."""
    plain = torch.where(value == 0, 0.0, value).contiguous()
    return hashlib.sha256(plain.flatten().view(torch.uint8).numpy().data).hexdigest()


def write(config: RunConfig, base: Path, adapter: Path, into: Path, report: Report) -> Written:
    """Writes the merged weights in the base's format, and their index, into the folder `into`; what rounding did.

    Raises ModelError, with nothing written, where a weight of the adapter has no place in the base's files or cannot be rounded.
    """
    with closing(Weights(base)) as weights:
        return _write(config, base, adapter, into, weights, report)


def _write(config: RunConfig, base: Path, adapter: Path, into: Path, weights: Weights, report: Report) -> Written:
    made, wide = plan(config, base, adapter), dequantized_weights(base)
    added = added_weights(made, wide)
    refuse_left_over(made, wide, added)
    for name in {*weights.owners.values()}:
        if made.changes(name):
            weights.refuse_unserved(name)
    out, files = Written(), model_files.weight_files(base)
    dropped = {key for key, name in weights.owners.items() if name in made.left_out} | made.left_out
    with safe_open(adapter / model_files.ADAPTER_WEIGHTS, "pt") as trained:
        entries = _Changed(config, made, weights, trained, out)
        total, done = sum(file.stat().st_size for file in files), 0
        for number, file in enumerate(files):
            header = {key: each for key, each in model_files.header(file).items() if key not in dropped}
            last = added if number == len(files) - 1 else {}
            plain = dequantized_header(file, weights.every)

            def tensors(
                header: Mapping[str, model_files.Tensor] = header,
                last: Mapping[str, str] = last,
                plain: Mapping[str, model_files.Tensor] = plain,
            ) -> Iterator[torch.Tensor]:
                nonlocal done
                for key in header:
                    value = entries.take(key, plain=key in plain)
                    done += value.nbytes
                    yield value
                    report("Merging", done, total)
                for name, origin in last.items():
                    value = read_weight(base, origin) if origin else trained.get_tensor(made.trained[name])
                    yield merged_weight(config, made, name, value, trained) if origin else value

            shapes = header | {name: shape_of(made, name, origin, wide, trained) for name, origin in last.items()}
            if shapes:
                write_safetensors(into / file.name, shapes, tensors())
    _write_index(base, into, dropped, dict.fromkeys(added, files[-1].name))
    return out


class _Changed:
    """Entries of the base's files as they are with the adapter merged in."""

    def __init__(self, config: RunConfig, made: Plan, weights: Weights, trained: Any, out: Written) -> None:
        self.config, self.made, self.weights, self.trained, self.out = config, made, weights, trained, out
        self._waiting: dict[str, torch.Tensor] = {}
        """Changed with another of the same weight, and not taken yet."""

    def take(self, key: str, *, plain: bool) -> torch.Tensor:
        name = self.weights.owners.get(key)
        if name is None:
            value = self.weights.raw(key)
            return merged_weight(self.config, self.made, key, value, self.trained) if plain else value
        if self.made.changes(name) and name not in self.out.digests:
            base = self.weights.read(name)
            merged = merged_weight(self.config, self.made, name, base.clone(), self.trained)
            changed = self.weights.rounded(name, merged)
            self.out.add(name, base, merged, self.weights.read(name, changed))
            self._waiting |= changed
        return self._waiting.pop(key) if key in self._waiting else self.weights.raw(key)


def _write_index(base: Path, into: Path, dropped: set[str], added: Mapping[str, str]) -> None:
    path = base / model_files.INDEX
    if not path.is_file():
        return
    content = model_files.read_json(path)
    content["weight_map"] = {key: file for key, file in content["weight_map"].items() if key not in dropped}
    content["weight_map"] |= added
    content.setdefault("metadata", {})["total_size"] = size_of_weights(into)
    (into / model_files.INDEX).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
