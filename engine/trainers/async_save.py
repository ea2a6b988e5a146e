"""A sharded checkpoint that is written beside the training: copied to main memory first, which is all that steps wait for.

Each rank has a thread and, for torch DCP's own messages, a process group apart from the training's. One checkpoint is under
way at a time: the next one, the end of the run, and a person who asked for one wait for it. What goes wrong is raised where
the training waits for it or takes its next step. A checkpoint is committed once every rank has written; until then it is
absent, as one that is written at once.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.compat.staging import copy_into, local, room_for
from engine.hardware import free_memory_bytes

ROOM = 0.5
"""Share of the main memory that is free which copies of the shares may take."""


class AsyncSave:
    """`copy` what is to be saved, `begin` to write it beside the training, `settle` to wait until that is done."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is how long ranks wait for each other at most."""
        self._seconds = seconds
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[str, torch.Tensor] | None = None
        self._room: threading.Thread | None = None
        """Makes room for the copies."""
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def has_room(self, state: dict[str, torch.Tensor], device: torch.device) -> bool:
        """Whether the copies of all ranks of this machine fit beside what is in its memory; the same on all ranks, which ask
        together. Once there is room, it stays."""
        if self._room is not None:
            return True
        own = sum(local(each).nbytes for each in state.values())
        together = own * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        fits = torch.tensor(int(together <= ROOM * free_memory_bytes()), device=device)
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        return bool(fits.item())

    def make_room(self, state: dict[str, torch.Tensor]) -> None:
        """Asks the machine for the memory of the copies, on a thread: tens of GiB are touched and locked, which takes as many
        seconds, and a first copy that had to would keep the training waiting for them."""
        if self._room is None:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._room = threading.Thread(target=self._make_room, args=(state, device), name="save-room", daemon=True)
            self._room.start()

    def _make_room(self, state: dict[str, torch.Tensor], device: int | None) -> None:
        # What the machine does not give here, the copy asks for again and says.
        with contextlib.suppress(MemoryError, RuntimeError):
            if device is not None:
                torch.cuda.set_device(device)
            self._copies = room_for(state)

    def await_room(self, state: dict[str, torch.Tensor]) -> None:
        """Has the room for copies made where it is not yet, and waits for it."""
        self.make_room(state)
        assert self._room is not None
        self._room.join()
        if self._copies is None or self._copies.keys() != state.keys():
            self._copies = room_for(state)

    def copy(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The shares as they are now, in main memory; in the same place each time."""
        self.await_room(state)
        assert self._copies is not None
        copy_into(self._copies, state)
        return self._copies

    def begin(self, write: Callable[[dist.ProcessGroup], None]) -> None:
        """Have this done on a thread, with a process group of its own. All ranks call it together."""
        assert self._thread is None
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._seconds))
        self._thread = threading.Thread(target=self._work, args=(write, self._group), name="late-save", daemon=True)
        self._thread.start()

    def _work(self, write: Callable[[dist.ProcessGroup], None], group: dist.ProcessGroup) -> None:
        try:
            write(group)
        except BaseException as problem:  # noqa: BLE001 - the thread's boundary: it is raised where somebody waits
            self._problem = problem

    @property
    def failed(self) -> bool:
        """Whether what was begun has failed; `settle` raises it."""
        return self._problem is not None

    def settle(self) -> None:
        """Waits until what was begun is done, and raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (problem := self._problem) is not None:
            self._problem = None
            raise problem
