"""The way back: every command that is told can be typed where the person stands; a config opens with settings beside it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.run.store import create

Spawn = Callable[..., Any]
SCRIPT = f"#!{sys.executable}\nimport sys\nfrom workbench.__main__ import main\nsys.exit(main())\n"
TOLD = re.compile(rb"`([^`]*workbench[^`]*)`")


def script(folder: str) -> Path:
    """The console script as pip writes it, in a folder of the working directory."""
    place = Path(folder) / "workbench"
    place.parent.mkdir(parents=True)
    place.write_text(SCRIPT)
    place.chmod(0o755)
    return place


def run_of(folder: str, state: str = "running") -> Any:
    run = create(folder, "version: 1\n", {"name": "dates"})
    run.update_json(state=state)
    return run


def told(terminal: Any) -> list[str]:
    assert terminal.exit_code() == 0
    after = terminal.seen.rpartition(b"\x1b[?1049l")[2]
    return [each.decode() for each in TOLD.findall(after)]


@pytest.mark.parametrize("folder", [".venv/bin", "my env/bin"])
def test_quitting_tells_a_command_that_works_from_here(spawn: Spawn, folder: str) -> None:
    place = script(folder)
    run = run_of("runs")
    elsewhere = run_of("other")
    elsewhere.update_json(state="finished")
    terminal = spawn(str(place), str(run.path))
    terminal.wait_for(b"dates-0001")
    terminal.settle()
    terminal.type(b"\x11")
    (way,) = set(told(terminal))
    assert way == f"{shlex.quote(str(place))} dates-0001"
    done = subprocess.run(["sh", "-c", f"{way} --nonsense"], capture_output=True, text=True)
    assert "No such option" in done.stderr, "the shell finds the program"


def test_on_the_path_it_is_called_by_its_name_and_without_a_run_it_still_says_how_to_come_back(spawn: Spawn) -> None:
    place = script("bin").absolute()
    terminal = spawn(str(place), PATH=f"{place.parent}{os.pathsep}{os.environ['PATH']}")
    terminal.wait_for(b"New config")
    terminal.settle()
    terminal.type(b"\x11")
    assert told(terminal) == ["workbench"]


def test_a_run_elsewhere_is_told_by_its_folder(spawn: Spawn) -> None:
    place = script("bin")
    run = run_of("other runs", "finished")
    terminal = spawn(str(place), str(run.path))
    terminal.wait_for(b"dates-0001")
    terminal.settle()
    terminal.type(b"\x11")
    assert told(terminal) == ["bin/workbench 'other runs/dates-0001'"]


def test_a_command_tells_others_as_they_can_be_called_and_a_log_keeps_their_names(spawn: Spawn) -> None:
    place = script("bin")
    terminal = spawn(str(place), "runs", "--runs", ".")
    assert terminal.exit_code() == 0
    assert b"`bin/workbench demo` makes one" in terminal.seen
    done = subprocess.run([str(place), "runs", "--runs", "."], capture_output=True, text=True)
    assert "`workbench demo` makes one" in done.stdout


def test_settings_beside_a_config_open_it_with_them_as_changes_not_saved(
    spawn: Spawn, workbench_command: list[str]
) -> None:
    text = "version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"
    Path("my.yaml").write_text(text)
    terminal = spawn(*workbench_command, "my.yaml", "optim.max_steps=23", "run.name=other")
    terminal.wait_for(b"my.yaml")
    terminal.type(b"1")
    terminal.wait_for(b"other")
    terminal.type(b"6")
    terminal.wait_for(b"takes 23 steps")
    terminal.settle()
    terminal.type(b"\x11")
    terminal.wait_for(b"not saved")
    terminal.type(b"\x1b[B\r")  # leave without saving
    assert terminal.exit_code() == 0
    assert Path("my.yaml").read_text() == text


@pytest.mark.parametrize("word", ["train", "max_steps"])
def test_another_word_beside_a_config_names_the_way(spawn: Spawn, workbench_command: list[str], word: str) -> None:
    Path("my.yaml").write_text("version: 1\n")
    terminal = spawn(*workbench_command, "my.yaml", word)
    assert terminal.exit_code() == 2
    assert b"is not a command" not in terminal.seen
    assert word.encode() in terminal.seen
    assert b"workbench train my.yaml" in terminal.seen
