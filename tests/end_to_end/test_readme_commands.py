"""The two commands that a newcomer types, as the README has them: `make workbench` opens the form, `make demo` trains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.run import checkpoint
from engine.run.store import runs_in
from tests.caches import own_cache
from tests.end_to_end.conftest import Desk
from tests.workbench.conftest import Terminal

ROOT = Path(__file__).parents[2]
HERE = Path(sys.prefix)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def made(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`make` in the checkout with the environment of this very test taken as made; runs and state lie apart."""
    for name in ("STATE", "CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(desk.root / name))
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(desk.root / "cache"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(desk.root / "runs"))
    monkeypatch.setenv("WORKBENCH_THEME", "dark")
    return ["make", "-C", str(ROOT), f"VENV={HERE}", "-o", str(HERE / ".installed")]


def test_make_workbench_opens_on_the_ways_to_begin_and_starts_nothing(made: list[str], desk: Desk) -> None:
    terminal = Terminal([*made, "workbench"], 80, 24, {})
    try:
        terminal.wait_for(b"The demo", b"New config", timeout=60)
        terminal.type(b"j\r")
        terminal.wait_for(b"Start the run")
        terminal.type(b"\x11")
        assert terminal.exit_code(30) == 0
    finally:
        terminal.close()
    assert list(runs_in(desk.root / "runs")) == []


def test_make_demo_trains_before_ones_eyes_and_saves_when_it_is_interrupted(
    made: list[str], desk: Desk, until: Callable[..., None]
) -> None:
    said = desk.root / "said.txt"
    with said.open("wb") as out:
        command = subprocess.Popen([*made, "demo"], stdout=out, stderr=out, start_new_session=True)
    until(lambda: b"loss" in said.read_bytes(), "the first steps are told")
    os.killpg(command.pid, signal.SIGINT)
    command.wait(60)
    (run,) = runs_in(desk.root / "runs")
    told = said.read_text("utf-8")
    assert "What is 3 March 2021 in ISO form?" in told
    assert f"`workbench resume {run.id}` goes on." in told
    until(lambda: run.state == "stopped", "the supervisor has seen it end")
    newest, skipped = checkpoint.newest_valid(run)
    assert (newest is not None, skipped) == (True, [])
