"""Ranks that wait for each other for too long: which one is named, and what is not taken for a hang."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config.tree import fields
from engine.run import hang
from engine.run.beat import Beat, Collective
from engine.run.cause import passes
from engine.run.hang import Hang, Rank, patience_of, verdict
from engine.run.inside import UnsafeRunFile
from engine.run.process import identity
from engine.run.store import RunFolder


def rank(
    number: int, *, waits: str = "", still: float = 0.0, begun: float = 7, silent: float = 0.0, **more: Any
) -> Rank:
    said = {"pid": 100 + number, "host": "box", "at": "rows.py:3 read", "stack": ["rows.py:3 read", "main.py:9 main"]}
    return Rank({**said, "waits": waits, "still": still, "number": begun, **more}, silent, reporting=True)


def test_the_rank_that_says_nothing_any_more_is_named() -> None:
    found = verdict({0: rank(0, waits="all_reduce", still=31), 1: rank(1, waits="all_reduce", silent=33)}, 30)
    assert found is not None
    assert found.cause == "hang"
    assert found.message == (
        "Rank 1 (process 101 on box) hangs: it does not answer and was at rows.py:3 read 33 s ago; rank 0 (process 100 on box) "
        "has waited in all_reduce for 31 s, longer than distributed.ddp_timeout allows."
    )
    assert found.lines[0] == "rank 0, process 100 on box, waits in all_reduce:"
    assert "  rows.py:3 read" in found.lines


def test_a_rank_that_is_stopped_before_its_first_heartbeat_is_named() -> None:
    """Rank 0 alone waits, which is not for itself; what a file holds of an earlier start is told of nobody."""
    for left in ({}, {"pid": 7, "host": "box", "at": "old.py:1 before"}):
        found = verdict({0: rank(0, waits="all_to_all", still=15), 1: Rank(left, silent=16)}, 15)
        assert found is not None
        assert found.message.startswith(
            "Rank 1 hangs: nothing was heard of it; rank 0 (process 100 on box) has waited in"
        )


def test_a_rank_that_waits_for_nobody_is_named_by_where_it_is() -> None:
    found = verdict(
        {0: rank(0, still=40), 1: rank(1, waits="barrier", still=31), 2: rank(2, waits="barrier", still=30)}, 30
    )
    assert found is not None
    assert "Rank 0 (process 100 on box) hangs: it is at rows.py:3 read; rank 1" in found.message


def test_of_ranks_that_all_wait_the_one_that_is_behind_is_named() -> None:
    ranks = {0: rank(0, waits="all_gather", still=31, begun=9), 1: rank(1, waits="barrier", still=31, begun=8)}
    found = verdict(ranks, 30)
    assert found is not None
    assert (
        "Rank 1 (process 101 on box) hangs: it waits in barrier (collective 8), which the others have left"
        in found.message
    )
    same = {0: rank(0, waits="all_reduce", still=31), 1: rank(1, waits="all_reduce", still=31)}
    found = verdict(same, 30)
    assert found is not None
    assert (
        "All ranks wait for each other (rank 0 in all_reduce, rank 1 in all_reduce), and no message comes"
        in found.message
    )


@pytest.mark.parametrize(
    "ranks",
    [
        {0: rank(0, waits="all_reduce", still=29), 1: rank(1, silent=33)},
        {0: rank(0, still=500), 1: rank(1, still=500)},
        {0: rank(0, silent=500), 1: rank(1, silent=500)},
        {0: rank(0, waits="all_reduce", still=31, over=True), 1: rank(1)},
        {0: rank(0, still=500), 1: Rank({}, silent=500)},
    ],
    ids=["not for so long", "nobody waits", "all are stopped", "it is done", "one is still to come"],
)
def test_what_is_no_hang(ranks: dict[int, Rank]) -> None:
    assert verdict(ranks, 30) is None


def test_the_time_that_is_waited_is_the_configs(run: RunFolder) -> None:
    assert fields.distributed.ddp_timeout.default == hang.TIMEOUT_SECONDS == patience_of(run)
    run.config.write_text("version: 1\ndistributed: {ddp_timeout: 77}\n")
    assert patience_of(run) == 77
    for text in ("'7200'", "7200.0", "7_200"):
        run.config.write_text(f"version: 1\ndistributed: {{ddp_timeout: {text}}}\n")
        assert patience_of(run) == 7200, f"written by hand as {text}, which the config takes"
    run.config.write_text("version: 1\ndistributed:\n")
    assert patience_of(run) == hang.TIMEOUT_SECONDS


def test_a_run_that_hung_may_be_started_again() -> None:
    assert passes({"kind": "failed", "cause": hang.CAUSE, "message": "Rank 1 hangs."})


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets the reader's clock go on by so many seconds."""
    clock = [time.monotonic()]
    monkeypatch.setattr(hang.time, "monotonic", lambda: clock[0])

    def later(seconds: float) -> None:
        clock[0] += seconds

    return later


def test_a_beat_tells_how_long_its_process_stands_at_one_place_and_in_which_collective(
    run: RunFolder, now: Callable[[float], None]
) -> None:
    last: list[Collective | None] = [Collective("all_reduce", 3, active=True)]
    beat = Beat(run, 0, lambda: last[0])
    (run.path / "beats").mkdir()
    listener = Hang(run, 2)

    def look(times: int = 1) -> dict[str, Any]:
        for _ in range(times):
            beat.sample(1.0)
            now(1.0)
            listener.poll()
        return listener.ranks[0].report

    said = look(4)
    assert (said["waits"], said["number"], said["pid"]) == ("all_reduce", 3, os.getpid())
    assert said["still"] == 2.0, "the first look sees a new place, the second a new collective"
    assert any("test_hang.py" in frame for frame in said["stack"])
    last[0] = Collective("all_reduce", 4, active=True)
    assert look()["still"] == 0.0, "another collective is another wait"
    beat.tick()
    assert look()["waits"] == "", "a new batch is a new place"
    last[0] = None
    assert look(3)["waits"] == "", "this is no function of torch's"
    for _ in range(30):
        now(1.0)
        listener.poll()
    assert listener.ranks[0].is_silent
    assert not listener.ranks[1].reporting


def test_records_that_cannot_be_read_do_not_silence_a_rank(run: RunFolder, now: Callable[[float], None]) -> None:
    def unreadable() -> Collective | None:
        raise KeyError("record_id")

    (run.path / "beats").mkdir()
    beat, listener = Beat(run, 0, unreadable), Hang(run, 2)
    for _ in range(12):
        beat.sample(1.0)
        now(1.0)
        listener.poll()
    assert listener.ranks[0].at_work
    assert not listener.ranks[0].is_silent


def test_a_beat_follows_no_link(run: RunFolder, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "0.json").write_text("years of work")
    (run.path / "beats").symlink_to(precious)
    beat = Beat(run, 0, lambda: None)
    beat.sample(1.0)
    with pytest.raises(UnsafeRunFile, match="symbolic link"):
        beat.__enter__()
    assert [path.name for path in precious.iterdir()] == ["0.json"]
    assert (precious / "0.json").read_text() == "years of work"


def test_what_a_file_says_that_is_no_number_ends_nothing(run: RunFolder) -> None:
    odd = rank(1, silent=33, pid=math.nan, start=math.inf)
    found = verdict({0: rank(0, waits="all_reduce", still=31, begun=math.inf), 1: odd}, 30)
    assert found is not None
    assert "Rank 1 (process 0 on box) hangs" in found.message


def test_a_reader_that_slept_does_not_take_that_for_silence(run: RunFolder, now: Callable[[float], None]) -> None:
    listener = Hang(run, 2)
    now(3600.0)
    listener.poll()
    assert listener.ranks[0].silent <= 2.0


def test_a_stopped_process_is_named_as_that(run: RunFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        who = identity(child.pid)
        assert who is not None
        ranks = {0: rank(0, waits="all_reduce", still=31), 1: rank(1, silent=33, **who.as_json())}
        found = verdict(ranks, 30)
        child.kill()
    assert found is not None
    assert "it is stopped by a signal (SIGSTOP) and was at rows.py:3 read 33 s ago" in found.message
