"""torch's writer of sharded safetensors, its files written by safetensors itself and several side by side.

torch has each file made in memory and then writes that: twice as much main memory as the shares take, by one thread that keeps
the interpreter for as long, so the training beside it stands still. safetensors writes tensors from where they lie and keeps
nothing meanwhile. Names and headers of the files are torch's, so its reader and its consolidation take them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILE_BYTES = 2 << 30
"""From so many bytes on a rank begins another file."""
AT_ONCE = 4
"""Files that a rank writes side by side: one thread copies 1 GiB/s, where a disk or main memory takes more."""
_NUMBER = re.compile(r"\(os error (\d+)\)")


class ShardWriter(HuggingFaceStorageWriter):
    """Writes what one rank holds of tensors and shares (DTensors) below a folder, durably."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raises OSError where the disk took no more or failed."""
        files = in_files(plan.items)
        shard = plan.storage_data["shard_index"]
        paths = [self._folder / _gen_file_name(number, len(files), shard) for number in range(1, len(files) + 1)]
        with ThreadPoolExecutor(AT_ONCE, "save-file") as pool:
            list(pool.map(lambda path, items: _write(path, items, planner), paths, files))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _bytes(item), None) for item in plan.items])
        return done


def in_files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items in their order, a file of at most `FILE_BYTES` or of one item each."""
    files: list[list[WriteItem]] = []
    room = 0
    for item in items:
        if not files or _bytes(item) > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(item)
        room -= _bytes(item)
    return files


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None  # a checkpoint in shares holds tensors alone
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _write(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> None:
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, dict[str, Sequence[int]]] = {}
    for item in items:
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        assert item.tensor_data is not None
        tensors[item.index.fqn] = data.detach().cpu().contiguous()
        places[item.index.fqn] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
    header = {CUSTOM_METADATA_KEY: json.dumps(places), DCP_VERSION_KEY: str(HF_DCP_VERSION), FORMAT_KEY: FORMAT_VALUE}
    try:
        save_file(tensors, path, header)
    except SafetensorError as problem:
        if (number := _NUMBER.search(str(problem))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from problem
    with path.open("rb") as file:
        os.fsync(file.fileno())
