"""What all processes of a run must see alike before they train: the checkpoint that they go on from, and the rows.

Those of other machines see the run's folder over a network file system, which may tell late what another machine renamed, and
read rows that may lie on a disk of their own. Processes that went on from other steps, or learned from other rows, would train
all the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from engine.errors import WorkbenchError, visible
from engine.run import checkpoint
from engine.run.store import RunFolder
from engine.trainers.sharded import place_of

if TYPE_CHECKING:
    from engine.data.prepare import Prepared

SEEN_SECONDS = 150.0
"""How long a process looks for the checkpoint that the first one found: NFS keeps for a minute what a folder held."""


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _gather(own: Any) -> list[Any]:
    """What each process says; all call it together."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def newest_of_all(run: RunFolder) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint as the first process finds it, and those that it skips, on the first process alone. It alone
    reads all of it for its hashes; the others look whether each file is there. All processes call it together.

    Raises WorkbenchError, on all of them, where one does not come to see it.
    """
    if not _several():
        return checkpoint.newest_valid(run)
    newest, skipped = checkpoint.newest_valid(run) if dist.get_rank() == 0 else (None, [])
    name = [None if newest is None else newest.name]
    dist.broadcast_object_list(name)
    if name[0] is None:
        return None, skipped
    path = run.checkpoints / name[0]
    reasons = _gather("" if newest is not None else _unseen(path))
    for rank, reason in enumerate(reasons):
        if reason:
            raise WorkbenchError(
                f"{path.name} is whole for {place_of(0)}, and for {place_of(rank)} it is not: {reason}.",
                "All machines of a run must see the same folder of runs.",
            )
    return path, skipped


def _unseen(path: Path) -> str:
    """Why this process cannot use the checkpoint, after a while; empty as soon as it can."""
    give_up = time.monotonic() + SEEN_SECONDS
    while (reason := checkpoint.problem_with(path)) and time.monotonic() < give_up:
        time.sleep(0.2)
    return reason


def require_same_rows(now: Mapping[str, Prepared | None]) -> None:
    """Raises WorkbenchError, on all processes, where one has prepared other rows than the first. All call it together."""
    if not _several():
        return
    splits = {split: _digest(prepared) for split, prepared in now.items() if prepared is not None}
    each = _gather(splits)
    for rank, theirs in enumerate(each):
        for split, (digest, rows) in each[0].items():
            if theirs.get(split, ("", 0))[0] != digest:
                other = theirs.get(split, ("", 0))[1]
                counts = f"{other:,} and {rows:,}" if other != rows else f"{rows:,} each, but not the same"
                raise WorkbenchError(
                    f"data.{visible(split)}: {place_of(rank)} has other rows than {place_of(0)}: {counts}.",
                    "All machines of a run must read the same files with the same tokenizer.",
                )


def _digest(prepared: Prepared) -> tuple[str, int]:
    """A hash of all that is trained on, in order, as far as it is known before the first step; and how many rows it is."""
    hashes, rows = prepared.hashes, len(prepared.dataset)
    layout = "" if prepared.stream is None else prepared.stream.layout
    digest = hashlib.sha256(f"{rows} {prepared.fingerprint} {hashes.rest} {layout}".encode())
    for column in (hashes.numbers, hashes.hashes):
        digest.update(column.tobytes())
    return digest.hexdigest(), rows
