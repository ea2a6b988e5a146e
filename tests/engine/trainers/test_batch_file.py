"""The rows of each batch on a disk that takes no more: one sentence, and no half of a batch before those that follow."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import psutil
import pytest

from engine.run import store
from engine.run.batches import rows_of
from engine.run.disk import StorageError
from engine.run.events import EventWriter
from engine.trainers import watching
from tests.engine.trainers.conftest import CONVERSATIONS


def test_a_full_disk_is_said_in_a_sentence_and_leaves_no_half_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.create(tmp_path, "version: 1\n", {"name": "my"})
    batches = watching._BatchFile(run)
    first = batches.add(1, [3, 1, 2])
    room = [12]  # bytes: one row and a half
    real = os.write

    def scant(handle: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(handle, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(watching.os, "write", scant)
    with pytest.raises(StorageError, match=r"batches\.bin: the disk is full: 24 B needed") as refusal:
        batches.add(2, [7, 8, 9])
    assert (refusal.value.cause, run.batches.stat().st_size) == ("disk full", 24)
    monkeypatch.setattr(watching.os, "write", real)
    again = batches.add(2, [4, 5, 6])
    with EventWriter(run) as pen:
        for payload in (first, again):
            assert payload is not None
            pen.write("batch", **payload)
    assert rows_of(run, 1) == [3, 1, 2]
    assert rows_of(run, 2) == [4, 5, 6]


def test_a_process_that_trains_a_second_run_holds_no_file_of_the_first(train, source):
    first, second = (train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1}) for _ in range(2))
    gc.collect()
    held = [Path(file.path).parent for file in psutil.Process().open_files()]
    assert first.path not in held
    assert second.path in held, "where its stack is written when asked"
