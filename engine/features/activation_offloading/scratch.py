"""Saved tensors on disk: written as the forward pass makes them, read back as the backward pass asks for them.

One file holds all of them, opened for its owner alone in a private folder and unlinked at once: it has no name that
another process could open, plant or leave behind, and the kernel frees it when the descriptor closes, whatever ends the
process. It holds raw bytes of known length, so reading it can run nothing. Weights and small tensors stay where they
are; a tensor that several operations save is written once. The folder lies in the run's own or, where the machine has a
faster disk than that, below $WORKBENCH_SCRATCH; no config can name another place. Messages show last parts of paths alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from engine.errors import WorkbenchError, visible

FOLDER = "scratch"
"""One of these a process, its rank behind it, in the run folder."""
ELSEWHERE = "WORKBENCH_SCRATCH"
"""The environment's word for a folder to hold all runs' scratch folders."""
SMALLEST = 16 << 10
"""Bytes below which a tensor stays in memory: moving it costs a call and saves next to nothing."""


class Scratch:
    """The private folder and its nameless file. `close` gives both back."""

    def __init__(self, inside: Path, rank: int = 0) -> None:
        clear(inside, rank)
        self.folder = _folder(inside, rank)
        self._file = _nameless(self.folder)
        self._end = self._alive = 0

    def write(self, content: memoryview) -> int:
        """Appends and returns where; the file begins anew when nothing in it is needed any more."""
        if self._alive == 0:
            self._end = 0
        place, done = self._end, 0
        try:
            while done < len(content):
                done += os.pwrite(self._file, content[done:], place + done)
        except OSError as problem:
            raise WorkbenchError(
                f"memory.activation_offloading: the folder {visible(self.folder.name)} cannot take {len(content):,} bytes more "
                f"({problem.strerror}).",
                "Make room on that disk, or set activation_offloading to cpu or leave it out.",
            ) from problem
        self._end += len(content)
        self._alive += 1
        return place

    def read(self, content: memoryview, place: int) -> None:
        """Fills `content` from `place`."""
        done = 0
        while done < len(content):
            count = os.preadv(self._file, [content[done:]], place + done)
            if count == 0:
                raise WorkbenchError("memory.activation_offloading: the scratch file ended before its time.")
            done += count

    def release(self) -> None:
        """One written tensor is no longer needed."""
        self._alive -= 1

    def close(self) -> None:
        """The disk's room and the folder are given back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            shutil.rmtree(self.folder, ignore_errors=True)


def _folder(inside: Path, rank: int) -> Path:
    """In the run folder, or below $WORKBENCH_SCRATCH by a name that only this run has."""
    elsewhere = os.environ.get(ELSEWHERE)
    if not elsewhere:
        return inside / f"{FOLDER}-{rank}"
    run = inside.absolute()
    mark = hashlib.sha256(os.fsencode(run)).hexdigest()[:12]
    return Path(elsewhere).absolute() / f"{run.name}-{mark}-{FOLDER}-{rank}"


def _nameless(folder: Path) -> int:
    """A descriptor of a new file in this new folder, which only its owner can open and no name leads to."""
    place = folder / "activations"
    try:
        os.mkdir(folder, 0o700)
        opened = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        elsewhere = ELSEWHERE in os.environ
        where = f"${ELSEWHERE} ({visible(folder.parent.name)})" if elsewhere else "the run folder"
        way_out = (
            f"Let {ELSEWHERE} name a folder that you can write to, or unset it." if elsewhere else "Mend its rights."
        )
        sentence = f"memory.activation_offloading: no scratch folder can be made in {where}: {problem.strerror}."
        raise WorkbenchError(sentence, way_out) from problem
    os.unlink(place)
    return opened


def clear(inside: Path, rank: int = 0) -> None:
    """Removes what a killed run left, never following a link out of the run. Raises WorkbenchError for a link."""
    folder = _folder(inside, rank)
    try:
        mode = os.lstat(folder).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        raise WorkbenchError(
            f"memory.activation_offloading: {visible(folder.name)} must be a folder of the run's own; it leads elsewhere.",
            "Remove it and start again.",
        )
    try:
        shutil.rmtree(folder)
    except OSError as problem:
        raise WorkbenchError(
            f"memory.activation_offloading: {visible(folder.name)} of an earlier start cannot be removed: "
            f"{problem.strerror}.",
            "Remove it and start again.",
        ) from problem


class _Parked:
    """A tensor on disk: where, and how to lay it out again."""

    __slots__ = ("__weakref__", "device", "dtype", "loaded", "place", "scratch", "shape", "stride")

    def __init__(self, scratch: Scratch, place: int, tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
        self.scratch, self.place = scratch, place
        self.shape, self.stride, self.dtype, self.device = tensor.shape, stride, tensor.dtype, tensor.device
        self.loaded: weakref.ref[torch.Tensor] | None = None

    def __del__(self) -> None:
        self.scratch.release()


class SavedOnDisk(saved_tensors_hooks):
    """A context for one forward pass: what autograd saves inside goes to `scratch`. `written` counts bytes."""

    def __init__(self, scratch: Scratch, weights: Iterable[torch.Tensor]) -> None:
        self.scratch, self.written = scratch, 0
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._written: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_Parked]]] = {}
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._written.clear()
        super().__enter__()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Parked:
        if (
            tensor.numel() * tensor.element_size() < SMALLEST
            or tensor.layout is not torch.strided
            or type(tensor) is not torch.Tensor
            or tensor.untyped_storage().data_ptr() in self._weights
        ):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._written.get(key)
        if known is not None and known[0]() is storage and (parked := known[1]()) is not None:
            return parked
        stride = tensor.stride()
        dense = tensor.is_contiguous() or _in_one_piece(tensor)
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)) if dense else tensor.detach().reshape(-1)
        content = flat.cpu().contiguous().view(torch.uint8).numpy().data
        place = self.scratch.write(content)
        self.written += len(content)
        parked = _Parked(self.scratch, place, tensor, stride if dense else _rows(tensor.shape))
        self._written[key] = weakref.ref(storage), weakref.ref(parked)
        return parked

    def _unpack(self, saved: torch.Tensor | _Parked) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = saved.loaded() if saved.loaded is not None else None
        if tensor is None:
            flat = torch.empty(saved.shape.numel(), dtype=saved.dtype)
            saved.scratch.read(flat.view(torch.uint8).numpy().data, saved.place)
            tensor = flat.to(saved.device).as_strided(saved.shape, saved.stride)
            saved.loaded = weakref.ref(tensor)
        return tensor


def _in_one_piece(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _rows(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
