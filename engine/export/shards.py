"""Full weights that the processes of a run wrote in shares, put together as one folder that transformers opens.

torch's own consolidation reads the shares where they lie and writes each weight to its place: none of them is in memory whole.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine import model_files
from engine.export.places import Source, need_room, not_written, parents

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
            yield replace(source, checkpoint=folder)
        finally:
            shutil.rmtree(room, ignore_errors=True)


def _together(checkpoint: Path, shares: Path, folder: Path, beside: Path, needed: int) -> None:
    """Raises WorkbenchError where the disk takes no more."""
    try:
        folder.mkdir(parents=True)
        _weights(shares, folder)
        for file in checkpoint.iterdir():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    except OSError as problem:
        raise not_written(beside, needed, problem) from problem


def _weights(shares: Path, into: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    files: dict[str, int] = {}
    size, number = 0, 1
    for name, stored in HuggingFaceStorageReader(str(shares)).read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name}: shares hold tensors alone"
        bytes_ = stored.size.numel() * stored.properties.dtype.itemsize
        if size and size + bytes_ > FILE_BYTES:
            size, number = 0, number + 1
        size += bytes_
        files[name] = number
    consolidate_safetensors_files(str(shares), str(into), files)
