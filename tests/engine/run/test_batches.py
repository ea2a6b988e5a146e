"""Which rows made a step: the newest word counts, and what is missing or damaged is nothing, not an error."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest

from engine.errors import WorkbenchError
from engine.run.batches import rows_of
from engine.run.events import EventWriter
from engine.run.store import create


def test_the_rows_of_a_step_and_the_newest_word_of_a_resumed_run(tmp_path: Path) -> None:
    run = create(tmp_path, "version: 1\n", {"name": "a"})
    with EventWriter(run) as writer:
        for step in range(1, 50):
            writer.write("batch", step=step, offset=2 * (step - 1), count=2)
            writer.write("metrics", step=step, loss=1.0)
        writer.write("batch", step=4, offset=100, count=3)
    run.batches.write_bytes(array("q", range(200)).tobytes())
    assert rows_of(run, 1) == [0, 1]
    assert rows_of(run, 49) == [96, 97]
    assert rows_of(run, 4) == [100, 101, 102]
    assert rows_of(run, 50) is None


def test_missing_and_damaged_files_give_nothing(tmp_path: Path) -> None:
    run = create(tmp_path, "version: 1\n", {"name": "a"})
    assert rows_of(run, 1) is None
    run.events.write_bytes(b"")
    assert rows_of(run, 1) is None
    run.events.write_bytes(
        b'{"kind":"batch","step":1,"offset":0,"count":2}\n'
        b'{"kind":"batch","step":1,"offset":-5,"count":2}\n{"kind":"batch","step":1,"off'
    )
    assert rows_of(run, 1) is None
    run.batches.write_bytes(array("q", [7, 8]).tobytes() + b"\1\2")
    assert rows_of(run, 1) == [7, 8]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    run = create(tmp_path, "version: 1\n", {"name": "a"})
    run.events.write_bytes(b'{"kind":"batch","step":1,"offset":0,"count":2}\n')
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 16)
    os.symlink(secret, run.batches)
    with pytest.raises(WorkbenchError, match="symbolic link"):
        rows_of(run, 1)
