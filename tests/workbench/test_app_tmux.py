"""The app in a real tmux of 80x24: opened, used by keys, left; what is on the screen is what a person sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.run.store import RunFolder
from engine.session.draft import Draft

Tmux = Callable[..., Any]


def command(*arguments: str) -> str:
    return " ".join(["LC_ALL=C.UTF-8", sys.executable, "-m", "workbench", *arguments, "; echo left with $?; sleep 60"])


def test_a_config_is_opened_changed_saved_and_left(tmux: Tmux) -> None:
    Path("my.yaml").write_text(
        "# mine\nversion: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"
        "optim:\n  num_train_epochs: 1  # once\n"
    )
    server = tmux(command("my.yaml"))
    screen = server.wait_for("my.yaml", "Launch", "Ready to start")  # nothing is open: it begins at the review
    assert all(len(line) <= 80 for line in screen.splitlines())
    server.keys("4")
    server.wait_for("Epochs")
    for _ in range(9):
        if "›Epochs" in server.screen():
            break
        server.keys("j")
    server.keys("Enter")
    server.wait_for("leave as it was")
    server.keys("BSpace", "3", "Enter")
    server.wait_for("my.yaml *")
    server.keys("w")
    server.wait_for("Save the config as")
    server.keys("Enter")
    server.wait_for("Saved in")
    server.keys("q")
    server.wait_for("left with 0")
    assert Draft.open("my.yaml").config.optim.num_train_epochs == 3
    assert "# once" in Path("my.yaml").read_text()


def test_nothing_leaks_through_resizing_and_coming_back(tmux: Tmux) -> None:
    server = tmux(command())
    server.wait_for("The demo", "New config")
    server.keys("n")
    server.wait_for("Launch", "Training data")
    server.run("resize-window", "-x", "50", "-y", "12")
    server.wait_for("60 columns and 16 rows")
    server.keys("q", "?", "F2")  # nothing is opened over what is not seen
    server.run("resize-window", "-x", "100", "-y", "30")
    server.wait_for("What shall the model learn?", "effective batch")
    server.keys("q")
    server.wait_for("Open a file")
    server.keys("q")
    server.wait_for("left with 0")


@pytest.mark.slow
def test_a_run_is_started_from_the_form_and_outlives_the_app(tmux: Tmux) -> None:
    """Enter on Launch starts a real run; the app is killed without warning; the run finishes by itself."""
    Path("quick.yaml").write_text(
        "version: 1\nmodel: {name: builtin/tiny}\n"
        "data: {train: [{path: builtin/dates, rows: 600}], max_length: 128}\n"
        "optim: {max_steps: 12, per_device_train_batch_size: 8}\nrun: {name: quick, save_steps: 6}\n"
    )
    server = tmux(command("quick.yaml"))
    server.wait_for("Launch", "Ready to start")
    server.keys("7")
    server.wait_for("Start the run")
    server.keys("Enter")
    server.wait_for("quick-0001")
    app = server.run("list-panes", "-F", "#{pane_pid}").strip()
    children = subprocess.run(["pgrep", "-P", app], capture_output=True, text=True).stdout.split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    folder = RunFolder(Path.cwd() / "runs" / "quick-0001")
    end = time.monotonic() + 180
    while folder.state not in ("finished", "failed", "lost", "stopped") and time.monotonic() < end:
        time.sleep(0.5)
    assert folder.state == "finished", folder.read_json()
