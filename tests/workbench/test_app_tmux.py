"""The app in a real tmux of 80x24: opened, used by keys, left; what is on the screen is what a person sees."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config.draft import Draft

Tmux = Callable[..., Any]


def command(*arguments: str) -> str:
    return " ".join(["LC_ALL=C.UTF-8", sys.executable, "-m", "workbench", *arguments, "; echo left with $?; sleep 60"])


def test_a_config_is_opened_changed_saved_and_left(tmux: Tmux) -> None:
    Path("my.yaml").write_text(
        "# mine\nversion: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"
        "optim:\n  num_train_epochs: 1  # once\n"
    )
    server = tmux(command("my.yaml"))
    screen = server.wait_for("my.yaml", "Launch", "Learning rate")
    assert all(len(line) <= 80 for line in screen.splitlines())
    server.keys("4")
    server.wait_for("Epochs")
    server.keys("j", "j", "j", "Enter", "BSpace", "3", "Enter")
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
    server.wait_for("Launch", "Learning rate")
    server.run("resize-window", "-x", "50", "-y", "12")
    server.wait_for("60 columns and 16 rows")
    server.run("resize-window", "-x", "100", "-y", "30")
    server.wait_for("What shall the model learn?", "effective batch")
    server.keys("q")
    server.wait_for("left with 0")
