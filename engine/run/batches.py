"""Which rows made the batch of a step: the newest `batch` event of that step, and its ids from `batches.bin`.

The file of events is searched from its end, because a resumed run notes a step again and the newest is what was
trained. Nothing is found for a step that was not noted (long runs note every few steps, up to a cap).
"""

from __future__ import annotations

import json
import mmap
import os
from array import array

from engine.errors import WorkbenchError
from engine.run import inside
from engine.run.in_flight import in_flight
from engine.run.store import RunFolder
from engine.run.tail import parse

MOST = 100_000  # ids of one batch that are ever read


def rows_of(folder: RunFolder, step: int) -> list[int] | None:
    """The row numbers of this step's batch, counted over all sources of `data.train`; nothing where it was not noted. Of the
    step in which a run ended those that it had reached.

    Raises WorkbenchError when the files cannot be read.
    """
    try:
        event = _event(folder, step)
        if event is None:
            last = in_flight(folder)
            return last[1] if last is not None and last[0] == step else None
        handle = inside.open_file(folder, folder.batches)
        try:
            data = os.pread(handle, 8 * event[1], 8 * event[0])
        finally:
            os.close(handle)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise WorkbenchError(f"run {folder.id}: its batches cannot be read: {problem.strerror}.") from problem
    ids = array("q", data[: len(data) // 8 * 8])
    return ids.tolist()


def _event(folder: RunFolder, step: int) -> tuple[int, int] | None:
    """(offset, count) of the newest batch event of a step."""
    wanted = f'"kind":"batch","step":{json.dumps(step)},'.encode()
    handle = inside.open_file(folder, folder.events)
    try:
        size = os.fstat(handle).st_size
        if not size:
            return None
        with mmap.mmap(handle, size, access=mmap.ACCESS_READ) as data:
            end = size
            while (at := data.rfind(wanted, 0, end)) >= 0:
                start = data.rfind(b"\n", 0, at) + 1
                stop = data.find(b"\n", at)
                event = parse(data[start : size if stop < 0 else stop])
                if event is not None and event["kind"] == "batch" and event.get("step") == step:
                    offset, count = event.get("offset"), event.get("count")
                    if isinstance(offset, int) and isinstance(count, int) and offset >= 0 and 0 <= count <= MOST:
                        return offset, count
                end = start
    finally:
        os.close(handle)
    return None
