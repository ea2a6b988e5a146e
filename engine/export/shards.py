"""Full weights that the processes of a run wrote in shares, put together as one folder that transformers opens.

torch's own consolidation reads the shares where they lie and writes each weight to its place: none of them is in memory whole.
A model that its files hold in other pieces than it has them in memory (each expert of a mixture by itself) goes through
transformers' own saving, a layer at a time.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import model_files
from engine.errors import ModelError, first_line, visible
from engine.export.parity import differs
from engine.export.places import Source, need_room, not_written, parents

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from transformers import PreTrainedModel

FILE_BYTES = 5_000_000_000
"""How long a file of a folder may become, as transformers writes them."""


@contextlib.contextmanager
def put_together(source: Source, beside: Path) -> Iterator[Source]:
    """The source, its weights put together in a hidden folder beside the place `beside` where they are in shares; that
    folder is gone afterwards. Raises WorkbenchError where the disk lacks room for it."""
    shares = source.checkpoint / model_files.SHARES
    if not shares.is_dir():
        yield source
        return
    for left in beside.parent.glob(f".{beside.name}.whole-*"):  # of an export that was killed
        shutil.rmtree(left, ignore_errors=True)
    needed = sum(file.stat().st_size for file in shares.iterdir())
    need_room(beside, needed)
    room = beside.parent / f".{beside.name}.whole-{secrets.token_hex(4)}"
    with parents(beside):
        try:
            folder = room / source.checkpoint.name
            _together(source.checkpoint, shares, folder, beside, needed)
            yield replace(source, checkpoint=folder, shares=shares)
        finally:
            shutil.rmtree(room, ignore_errors=True)


def _together(checkpoint: Path, shares: Path, folder: Path, beside: Path, needed: int) -> None:
    """Raises WorkbenchError where the disk takes no more."""
    try:
        folder.mkdir(parents=True)
        _weights(shares, folder, _skeleton(checkpoint))
        for file in checkpoint.iterdir():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    except OSError as problem:
        raise not_written(beside, needed, problem) from problem


def _weights(shares: Path, into: Path, skeleton: PreTrainedModel | None) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    held = _held(shares)
    if skeleton is not None and (pieces := _pieces(skeleton, held)):
        _in_pieces(shares, into, skeleton, pieces)
        return
    files = _files({name: stored.size.numel() * stored.properties.dtype.itemsize for name, stored in held.items()})
    consolidate_safetensors_files(str(shares), str(into), files)


def _held(shares: Path) -> dict[str, TensorStorageMetadata]:
    """Size and format of each weight, by its name in the model."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    held: dict[str, TensorStorageMetadata] = {}
    for name, stored in HuggingFaceStorageReader(str(shares)).read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name}: shares hold tensors alone"
        held[name] = stored
    return held


def take_weights(model: PreTrainedModel, shares: Path) -> None:
    """Gives a model the weights as training wrote them, whatever files were made of them, a layer in memory at a time. Raises
    ModelError where they do not fit."""
    held, own = _held(shares), model.state_dict()
    places: dict[int, set[str]] = {}
    for name, value in own.items():
        places.setdefault(value.data_ptr(), set()).add(name)
    lacking = [name for name, value in own.items() if not places[value.data_ptr()] & held.keys()]
    if wrong := [*sorted(held.keys() - own.keys()), *lacking]:
        raise ModelError(f"the model that opens does not fit its shares: {visible(wrong[0])} ({len(wrong)} in all).")
    for _, names in groupby(sorted(held, key=_layer), key=_layer):
        layer = _read(shares, {name: (held[name].size, held[name].properties.dtype) for name in names})
        for name, value in layer.items():
            own[name].copy_(value)


def compare(folder: Path, shares: Path) -> int | None:
    """How many weights the files of a folder hold to the bit as training wrote them, shares and files read by different readers, a
    layer in memory at a time; None for files that hold other pieces (`take_weights` gives those to compare). Raises ParityError."""
    import torch
    from safetensors import safe_open

    held, stored = _held(shares), model_files.stored_weights(folder)
    if held.keys() != stored.keys():
        return None
    files = {name: file for file in model_files.weight_files(folder) for name in model_files.header(file)}
    for _, names in groupby(sorted(held, key=_layer), key=_layer):
        layer = _read(shares, {name: (held[name].size, held[name].properties.dtype) for name in names})
        for name, trained in layer.items():
            with safe_open(files[name], "pt") as file:
                value = file.get_tensor(name)
            if value.dtype != trained.dtype or not torch.equal(_bits(value), _bits(trained)):
                raise differs("safetensors", f"{visible(name)} is not as training wrote it")
    return len(held)


def _bits(value: torch.Tensor) -> torch.Tensor:
    import torch

    return value.contiguous().flatten().view(torch.uint8)


def _read(shares: Path, wanted: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    state = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in wanted.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(shares)), no_dist=True)
    return state


def _files(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of the file that each weight goes into, by its bytes."""
    files: dict[str, int] = {}
    size, number = 0, 1
    for name, bytes_ in sizes.items():
        if size and size + bytes_ > FILE_BYTES:
            size, number = 0, number + 1
        size += bytes_
        files[name] = number
    return files


def _skeleton(checkpoint: Path) -> PreTrainedModel | None:
    """The model without memory, by which transformers knows how its files hold it; None for a class that it lacks."""
    import torch
    import transformers

    model_files.refuse_what_it_names(checkpoint)
    shape = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    kind: Any = getattr(transformers, (shape.architectures or [""])[0], None)
    if kind is None:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = kind._from_config(shape)
    return model


def _layer(name: str) -> str:
    """The layer that a weight is of; empty for one beside all layers."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


Pieces = list[tuple[dict[str, "torch.Tensor"], dict[str, "torch.Tensor"]]]
"""Weights that are saved together, by their names in the model and by those in files, without memory."""


def _pieces(skeleton: PreTrainedModel, held: Mapping[str, TensorStorageMetadata]) -> Pieces:
    """The weights of each layer, as the model and as its files hold them; empty where these are alike."""
    import torch

    every = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta") for name, stored in held.items()
    }
    whole = _saved(skeleton, every)
    if whole.keys() == every.keys() and all(whole[name].shape == value.shape for name, value in every.items()):
        return []
    made: Pieces = []
    for _, names in groupby(sorted(every, key=_layer), key=_layer):
        layer = {name: every[name] for name in names}
        made.append((layer, _saved(skeleton, layer)))
    apart = {name: value for _, saved in made for name, value in saved.items()}
    alike = apart.keys() == whole.keys() and all(whole[name].shape == value.shape for name, value in apart.items())
    return made if alike else [(every, whole)]  # a weight is made of several layers'


def _saved(skeleton: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers' saving makes of weights."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(skeleton, weights))
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, RuntimeError) as problem:
        first = visible(first_line(problem))[:200]
        raise ModelError(f"the installed transformers cannot say how files hold this model ({first}).") from problem


def _in_pieces(shares: Path, into: Path, skeleton: PreTrainedModel, pieces: Pieces) -> None:
    """Writes the files of a model, of which no more than a layer is in memory."""
    from engine.export.merge import NAMES, write_safetensors

    values = {name: value for _, saved in pieces for name, value in saved.items()}
    files = _files({name: value.nbytes for name, value in values.items()})
    count = max(files.values())
    weights = _converted(shares, skeleton, pieces)
    weight_map = {name: f"model-{number:05d}-of-{count:05d}.safetensors" for name, number in files.items()}
    for number in range(1, count + 1):
        own = [name for name, of in files.items() if of == number]
        shapes = {name: model_files.Tensor(NAMES[values[name].dtype], tuple(values[name].shape)) for name in own}
        write_safetensors(into / weight_map[own[0]], shapes, (next(weights) for _ in own))
    total = sum(value.nbytes for value in values.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (into / model_files.INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _converted(shares: Path, skeleton: PreTrainedModel, pieces: Pieces) -> Iterator[torch.Tensor]:
    """The weights of the files one after the other, a layer read at a time."""
    for layer, saved in pieces:
        state = _read(shares, {name: (value.shape, value.dtype) for name, value in layer.items()})
        made = _saved(skeleton, state)
        del state
        for name in saved:
            yield made.pop(name)
