"""What a supervisor writes into run.json, and what becomes of it where nothing can be written."""

from __future__ import annotations

import errno
import os

import pytest

from engine.run.state_file import StateFile
from engine.run.store import RunFolder


def test_a_word_names_who_wrote_it_and_is_written_once(run):
    state = StateFile(run)
    state.write(state="running")
    values, written = run.read_json(), (run.path / "run.json").stat().st_mtime_ns
    assert (values["state"], values["supervisor_pid"]) == ("running", os.getpid())
    state.write(state="running")
    state.update()
    assert (run.path / "run.json").stat().st_mtime_ns == written


def test_what_a_full_disk_did_not_take_is_written_with_the_next_word_and_complained_of_once(run, monkeypatch, capfd):
    def full(self: RunFolder, **changes: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state, write = StateFile(run), RunFolder.update_json
    monkeypatch.setattr(RunFolder, "update_json", full)
    state.update(state="stopping")
    state.update(message="SIGTERM")
    with pytest.raises(OSError, match="No space left"):
        state.write(state="stopping")
    monkeypatch.setattr(RunFolder, "update_json", write)
    state.settle(5.0)
    values = run.read_json()
    assert (values["state"], values["message"]) == ("stopping", "SIGTERM")
    assert capfd.readouterr().err.count("No space left") == 1


def test_a_run_that_was_deleted_is_not_waited_for(run, monkeypatch):
    state = StateFile(run)
    monkeypatch.setattr(StateFile, "write", lambda self, **changes: (_ for _ in ()).throw(OSError("gone")))
    state.update(state="failed")
    run.path.rename(run.path.with_name("elsewhere"))
    state.settle(3600.0)
