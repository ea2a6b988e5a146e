"""The child that renders: an error of ours is asked once more, what a question brings about is told as what it was."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest

from engine.data import rendering
from engine.data.rendering import Child, RenderingEnded


class Served:
    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def answer(self, name: str, *arguments: object) -> object:
        with self.notes.open("a") as file:
            file.write(f"{name}\n")
        if name == "slow":
            with rendering.limited():
                while True:
                    pass
        if name in ("waits", "waits on"):
            with rendering.limited():
                time.sleep(0.6 if name == "waits" else 60)
        if name == "large":
            raise MemoryError
        if name == "broken" or (name == "broken once" and self.notes.read_text().count(name) == 1):
            raise OSError("a file was closed")
        return [os.getpid(), *arguments]


def asked(child: Child, name: str) -> object:
    try:
        return child.ask(name, "x")
    except RenderingEnded as ended:
        return ended.slow


def test_an_error_of_ours_is_asked_once_more_of_a_new_child(tmp_path: Path) -> None:
    child = Child(lambda: Served(tmp_path / "notes"))
    first, word = child.ask("plain", "x")
    assert (word, first == os.getpid()) == ("x", False)
    second, _ = child.ask("broken once", "x")
    assert second != first
    assert asked(child, "broken") is False
    assert (tmp_path / "notes").read_text().split("\n")[:-1] == [
        "plain", "broken once", "broken once", "broken", "broken",
    ]  # fmt: skip


def test_what_a_question_brings_about_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.2)
    child = Child(lambda: Served(tmp_path / "notes"))
    assert asked(child, "large") is False
    assert asked(child, "slow") is True
    assert (tmp_path / "notes").read_text() == "large\nslow\n"
    assert child.ask("plain", "y")[1] == "y"


def test_a_process_of_many_open_files_is_answered_too(tmp_path: Path) -> None:
    """`select` knows no file beyond the first 1,024; a training that maps many weights has more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1200)]
    try:
        assert Child(lambda: Served(tmp_path / "notes")).ask("plain", "x")[1] == "x"
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_sent_ahead_is_answered_whatever_is_asked_meanwhile(tmp_path: Path) -> None:
    child = Child(lambda: Served(tmp_path / "notes"))
    sent = child.send("ahead", "x" * 300_000)
    assert child.ask("plain", "y")[1] == "y"
    assert child.take(sent)[1] == "x" * 300_000
    later = child.send("later", "z")
    latest = child.send("latest", "w")
    assert [child.take(sent)[1] for sent in (later, latest)] == ["z", "w"]
    assert (tmp_path / "notes").read_text().split() == ["ahead", "plain", "later", "latest"]


def test_what_gets_no_processor_has_more_time_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.2)
    monkeypatch.setattr(rendering, "LONGEST", 2.0)
    child = Child(lambda: Served(tmp_path / "notes"))
    assert child.ask("waits", "x")[1] == "x"
    assert asked(child, "waits on") is True


@pytest.mark.parametrize("name", ["slow", "large", "broken"])
def test_what_ends_the_child_has_no_answer_and_the_next_question_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.2)
    child = Child(lambda: Served(tmp_path / "notes"))
    assert child.take(child.send(name, "x")) is None
    assert child.ask("plain", "y")[1] == "y"


def test_what_is_too_large_is_not_sent_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "AHEAD", 1000)
    child = Child(lambda: Served(tmp_path / "notes"))
    assert child.take(child.send("ahead", "x" * 1000)) is None
    assert not (tmp_path / "notes").exists()


def test_a_process_that_was_forked_asks_a_child_of_its_own(tmp_path: Path) -> None:
    child = Child(lambda: Served(tmp_path / "notes"))
    sent = child.send("ahead", "x")
    pid = os.fork()
    if not pid:
        os._exit(0 if child.take(sent) is None and child.ask("plain", "y")[1] == "y" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert child.take(sent)[1] == "x"


@pytest.mark.timeout(60)
def test_the_child_ends_though_another_process_holds_its_pipe_open(tmp_path: Path) -> None:
    """As processes of a loader do, which are forked while it is there."""
    child = Child(lambda: Served(tmp_path / "notes"))
    pid, _ = child.ask("plain", "x")
    holder = os.fork()
    if not holder:
        time.sleep(120)
        os._exit(0)
    try:
        assert child._end is not None
        begun = time.monotonic()
        child._end()
        assert time.monotonic() - begun < 20
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
