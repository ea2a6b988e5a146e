"""What is not saved outlives a window that is killed: kept whole, offered once, and the terminal is given back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config.tree import fields
from engine.run.process import identity
from engine.session.draft import Draft, FileChanged
from workbench.unsaved import Unsaved

BETA = fields.optim.learning_rate.path


@pytest.fixture
def changed() -> Draft:
    draft = Draft.new("demo")
    draft.set(BETA, "0.0123")
    return draft


def gone(unsaved: Unsaved) -> dict[str, Any]:
    """As if its window had ended: the owner becomes a process that is no more."""
    place = unsaved._place
    said = json.loads(place.read_text())
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    said["owner"]["pid"] = ended.pid
    ended.wait()
    place.write_text(json.dumps(said))
    return said


def test_what_a_dead_window_left_is_offered_once_and_lies_in_a_file(tmp_path: Path, changed: Draft) -> None:
    first = Unsaved(tmp_path / "cache", tmp_path / "state")
    first.write(first.entry(changed))
    assert first._place.stat().st_mode & 0o777 == 0o600
    second = Unsaved(tmp_path / "cache", tmp_path / "state")
    assert second.left(None) == []  # its window is open
    gone(first)
    (kept,) = second.left(None)
    assert kept.text == changed.text() == kept.place.read_text()
    assert kept.recipe == "demo"
    assert second.left(None) == []
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_file_that_was_changed_after_its_window_died_is_not_replaced_unasked(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("version: 1\nrun: {seed: 1}\n")
    draft = Draft.open(mine)
    draft.set("run.seed", 2)
    unsaved = Unsaved(tmp_path / "cache", tmp_path / "state")
    unsaved.write(unsaved.entry(draft))
    gone(unsaved)
    (kept,) = unsaved.left(mine)
    mine.write_text("version: 1\nrun: {seed: 3}\n")
    with pytest.raises(FileChanged):
        kept.draft().save()
    mine.write_text("version: 1\nrun: {seed: 1}\n")
    assert kept.draft().save() == mine
    assert "seed: 2" in mine.read_text()


def test_a_window_in_another_container_is_known_by_its_lock(tmp_path: Path, changed: Draft) -> None:
    unsaved = Unsaved(tmp_path / "cache", tmp_path / "state")
    unsaved.write(unsaved.entry(changed))
    said = json.loads(unsaved._place.read_text())
    said["owner"]["boot"] = f"{said['owner']['boot'].split()[0]} pid:[1]"
    with open(unsaved._place, "r+") as file:
        file.write(json.dumps(said))
    second = Unsaved(tmp_path / "cache", tmp_path / "state")
    assert second.left(None) == []
    os.close(unsaved._open)  # as its end does
    unsaved._open = -1
    (kept,) = second.left(None)
    assert kept.text == changed.text()


def test_what_was_left_last_is_offered_first(tmp_path: Path, changed: Draft) -> None:
    unsaved = Unsaved(tmp_path / "cache", tmp_path / "state")
    unsaved.write(unsaved.entry(changed))
    said = gone(unsaved)
    unsaved._place.unlink()
    for pid, when in ((1, 20.0), (2, 30.0), (3, 10.0)):
        (unsaved._folder / f"{pid}.json").write_text(json.dumps({**said, "when": when}))
    assert [kept.when for kept in unsaved.left(None)] == [30.0, 20.0, 10.0]


def test_a_file_that_is_opened_gets_its_own_back_and_no_other(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    mine.write_text("version: 1\n")
    draft = Draft.open(mine)
    draft.set(BETA, "0.5")
    unsaved = Unsaved(tmp_path / "cache", tmp_path / "state")
    unsaved.write(unsaved.entry(draft))
    gone(unsaved)
    assert unsaved.left(other) == []
    (kept,) = unsaved.left(mine)
    assert kept.path == mine


def test_what_is_saved_or_given_up_is_not_kept(tmp_path: Path, changed: Draft) -> None:
    unsaved = Unsaved(tmp_path / "cache", tmp_path / "state")
    unsaved.write(unsaved.entry(changed))
    changed.save(tmp_path / "saved.yaml")
    unsaved.write(unsaved.entry(changed))
    assert not unsaved._place.exists()
    changed.set(BETA, "0.5")
    unsaved.give_up()
    unsaved.write(unsaved.entry(changed))  # a thread that was on its way
    assert not unsaved._place.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"owner": 3, "text": "x"}', b'{"text": 5}'])
def test_a_damaged_entry_is_passed_over(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "cache" / "unsaved"
    folder.mkdir(parents=True)
    (folder / "1.json").write_bytes(content)
    assert Unsaved(tmp_path / "cache", tmp_path / "state").left(None) == []


def test_what_cannot_be_taken_out_is_offered_at_the_next_start(tmp_path: Path, changed: Draft) -> None:
    unsaved = Unsaved(tmp_path / "cache", tmp_path / "state")
    unsaved.write(unsaved.entry(changed))
    gone(unsaved)
    (tmp_path / "state").write_text("a file in its place")
    assert unsaved.left(None) == []
    (tmp_path / "state").unlink()
    (kept,) = unsaved.left(None)
    assert kept.text == changed.text()


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path, changed: Draft) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    unsaved = Unsaved(tmp_path / "cache", tmp_path / "state")
    with pytest.raises(OSError):
        unsaved.write(unsaved.entry(changed))


def _app_below_a_shell(terminal: Any) -> psutil.Process:
    """The app, which a shell has started and waits for."""
    own = identity(terminal.pid)
    assert own is not None
    return next(child for child in psutil.Process(terminal.pid).children() if "workbench" in " ".join(child.cmdline()))


def test_a_killed_app_gives_the_terminal_back_and_the_next_start_offers_the_config(
    spawn: Callable[..., Any], workbench_command: list[str], tmp_path: Path
) -> None:
    command = " ".join(workbench_command)
    terminal = spawn("sh", "-c", f"{command}; echo shell again $?; sleep 20")
    terminal.wait_for(b"New config")
    terminal.type(b"n")
    terminal.wait_for(b"Launch", b"Training data")
    terminal.type(b"4jj")
    terminal.wait_for(b"Epochs")
    terminal.settle()
    terminal.type(b"\x7f")  # back to the default: a change that no file holds
    terminal.wait_for(b"->")
    end = time.monotonic() + 15
    while not list((tmp_path / "cache").rglob("unsaved/*.json")):
        assert time.monotonic() < end, "it was not kept"
        terminal.read(0.1)
    assert not termios.tcgetattr(terminal.fd)[3] & termios.ISIG
    before = len(terminal.seen)
    os.kill(_app_below_a_shell(terminal).pid, signal.SIGKILL)
    terminal.wait_for(b"has been given back", b"shell again 137")
    for sequence in (b"\x1b[?1049l", b"\x1b[?1003l", b"\x1b[?25h", b"\x1b[?2004l", b"\x1b[<u", b"\x1b[?2048l"):
        assert sequence in terminal.seen[before:]
    assert terminal.seen.rindex(b"\x1b[?7h") > terminal.seen.rindex(b"\x1b[?7l"), (
        "long lines of the shell are wrapped again"
    )
    flags = termios.tcgetattr(terminal.fd)[3]
    assert flags & termios.ISIG
    assert flags & termios.ICANON
    assert flags & termios.ECHO

    again = spawn(*workbench_command)
    again.wait_for(b"Not saved", b"was not saved", b"recipe demo")
    again.type(b"g\r")
    again.wait_for(b"Launch", b"Training data")
    again.settle()
    again.type(b"4")
    again.wait_for(b"->")  # the change is there
    again.settle()
    again.type(b"\x11")
    again.wait_for(b"not saved", b"Leave without saving")
    again.type(b"\x1b[B\r")
    assert again.exit_code() == 0
    assert not list((tmp_path / "cache").rglob("unsaved/*"))
    third = spawn(*workbench_command)
    third.wait_for(b"New config")
    third.settle(1.0)
    third.type(b"\x11")
    assert third.exit_code() == 0
    assert b"not saved" not in third.seen


def test_an_app_that_leaves_by_its_door_leaves_no_guard_behind(
    spawn: Callable[..., Any], workbench_command: list[str]
) -> None:
    terminal = spawn(*workbench_command)
    terminal.wait_for(b"New config")
    guards = psutil.Process(terminal.pid).children()
    assert guards
    terminal.type(b"\x11")
    assert terminal.exit_code() == 0
    assert b"given back" not in terminal.seen
    assert not any(guard.is_running() and guard.status() != psutil.STATUS_ZOMBIE for guard in guards)
