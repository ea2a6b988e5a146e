"""The app and the terminal: refusals, signals, bad bytes, hostile text, colours. All in real processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UsageError
from engine.run.store import create
from workbench.cli.app import open_app
from workbench.terminal import PLAIN_CHAT, few_colours, require_terminal, settle_colour, speaks_unicode, wants_light

Spawn = Callable[..., Any]
READY = (b"Launch", b"Training data")


def to_form(terminal: Any) -> None:
    """From what the app opens on to a new config."""
    terminal.wait_for(b"New config")
    terminal.type(b"n")
    terminal.wait_for(*READY)


RESET = (b"\x1b[?1049l", b"\x1b[?1003l", b"\x1b[?25h", b"\x1b[?2004l", b"\x1b[<u")
HOSTILE = "evil\x1b]0;stolen\x07\x1b[31m[red]name[/red]\u202eexe"


def test_without_a_terminal_it_says_what_to_use_instead() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workbench"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert "not a terminal" in done.stderr
    assert "workbench train my.yaml" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"TERM": "dumb"}, b"TERM is dumb"),
        ({"LC_ALL": "C"}, b"The locale is C, and the app writes UTF-8"),
        ({"WORKBENCH_IMAGES": "iterm"}, b"WORKBENCH_IMAGES is 'iterm'"),
    ],
)
def test_an_unfit_terminal_is_refused_before_anything_is_drawn(
    spawn: Spawn, workbench_command: list[str], env: dict[str, str], words: bytes
) -> None:
    terminal = spawn(*workbench_command, **env)
    assert terminal.exit_code() == 2
    assert words in terminal.seen
    assert b"\x1b[?1049h" not in terminal.seen


def test_the_terminal_is_judged_by_what_it_says() -> None:
    assert speaks_unicode({"LANG": "de_DE.UTF-8"})
    assert not speaks_unicode({"LANG": "de_DE.UTF-8", "LC_ALL": "C"})
    assert few_colours({"TERM": "xterm"})
    assert not few_colours({"TERM": "xterm", "COLORTERM": "truecolor"})
    assert not few_colours({"TERM": "tmux-256color"})
    assert wants_light({"COLORFGBG": "0;15"})
    assert not wants_light({"COLORFGBG": "15;0"})
    assert wants_light({"WORKBENCH_THEME": "light", "COLORFGBG": "15;0"})
    empty = {"NO_COLOR": ""}
    assert not settle_colour(empty)
    assert empty == {}
    assert settle_colour({"NO_COLOR": "1"})
    with pytest.raises(UsageError) as refused:
        require_terminal({"TERM": "xterm"}, plain=PLAIN_CHAT)  # a test's own input is no terminal
    assert refused.value.hint == PLAIN_CHAT


def test_without_a_terminal_a_run_is_watched(tmp_path: Path) -> None:
    run = create(tmp_path, "version: 1\n", {"name": "mine", "method": "sft", "model": "builtin/tiny"})
    with pytest.raises(UsageError, match="not a terminal") as refused:
        open_app(run=run)
    assert refused.value.hint == f"Without the app: `workbench watch {run.path}`."


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGHUP, 129)]
)
def test_a_signal_gives_the_terminal_back_and_keeps_the_draft(
    spawn: Spawn, workbench_command: list[str], tmp_path: Path, number: int, code: int
) -> None:
    terminal = spawn(*workbench_command)
    to_form(terminal)
    terminal.type(b"4jj")
    terminal.wait_for(b"Epochs")
    terminal.settle()
    terminal.type(b"\x7f")  # back to the default: a change that no file holds
    terminal.wait_for(b"->")
    terminal.settle()
    terminal.signal(number)
    assert terminal.exit_code() == code
    for sequence in RESET:
        assert sequence in terminal.seen
    kept = list((tmp_path / "state").rglob("unsaved-*.yaml"))
    assert len(kept) == 1
    assert "learning_rate" not in kept[0].read_text()
    assert str(kept[0]).encode() in re.sub(rb"\s", b"", terminal.seen)


def test_a_closed_terminal_ends_the_process(spawn: Spawn, workbench_command: list[str]) -> None:
    import os

    terminal = spawn(*workbench_command)
    to_form(terminal)
    os.close(terminal.fd)
    import time

    end = time.monotonic() + 15
    pid = 0
    while not pid and time.monotonic() < end:
        pid, status = os.waitpid(terminal.pid, os.WNOHANG)
        time.sleep(0.1)
    assert pid, "the app goes on without a terminal"
    terminal.status = status


UNDER_MAKE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGHUP, lambda *_: None)  # as make does, which waits for what it started
app = subprocess.Popen(sys.argv[2:])
open(sys.argv[1], "w").write(str(app.pid))
app.wait()
"""


def test_a_closed_terminal_ends_the_app_also_where_make_alone_is_told(
    spawn: Spawn, workbench_command: list[str], tmp_path: Path
) -> None:
    import os
    import time

    noted = tmp_path / "pid"
    terminal = spawn(sys.executable, "-c", UNDER_MAKE, str(noted), *workbench_command)
    to_form(terminal)
    app = int(noted.read_text())
    os.close(terminal.fd)
    end = time.monotonic() + 15
    try:
        while (ended := os.waitpid(terminal.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < end, "the app goes on without a terminal"
            time.sleep(0.1)
        terminal.status = ended[1]
    finally:
        if terminal.status is None:
            os.kill(app, signal.SIGKILL)


def test_a_byte_that_is_no_utf8_does_not_end_the_app(spawn: Spawn, workbench_command: list[str]) -> None:
    terminal = spawn(*workbench_command)
    to_form(terminal)
    terminal.type(b"\xe9\xff")
    terminal.settle(0.3)
    terminal.type(b"4")
    terminal.wait_for(b"Epochs")
    terminal.type(b"q")
    terminal.settle(0.3)
    terminal.type(b"q")  # the form is left, then what it was opened from
    assert terminal.exit_code() == 0


def test_hostile_names_and_rows_reach_no_terminal(spawn: Spawn, workbench_command: list[str]) -> None:
    """Escape sequences, a title, markup and a bidi override in the config, the rows and the file's name."""
    rows = Path("rows\x1b]0;stolen\x07.jsonl")
    rows.write_text(
        '{"messages": [{"role": "user", "content": "\\u001b]0;stolen\\u0007[b]hi[/b]"}, {"role": "assistant", "content": "\\u202e\\u009b31m"}]}\n'
    )
    name = HOSTILE.replace("\x1b", "\\e").replace("\x07", "\\a").replace("\u202e", "\\u202e")
    text = (
        f'version: 1\nmodel: {{name: builtin/tiny}}\ndata: {{train: [{{path: "{rows!s}"}}]}}\nrun: {{name: "{name}"}}\n'
    )
    config = Path("conf\x1b[31mig.yaml")
    config.write_text(text.replace("\x1b", "\\e").replace("\x07", "\\a"))
    terminal = spawn(*workbench_command, str(config))
    terminal.wait_for(b"Launch")
    for step in (b"3", b"6", b"7", b"/", b"\x1b", b"!", b"\x1b", b"w", b"\x1b"):
        terminal.type(step)
        terminal.settle(0.4)
    terminal.type(b"\x11")
    terminal.exit_code()
    assert b"stolen" in terminal.seen  # it is shown
    assert b"\x1b]0;" not in terminal.seen  # and never sent
    assert b"stolen\x07" not in terminal.seen
    assert "\u202e".encode() not in terminal.seen
    assert b"\xc2\x9b" not in terminal.seen
    assert b"[red]" in terminal.seen
    assert "␛".encode() in terminal.seen


def test_no_color_sends_no_colour(spawn: Spawn, workbench_command: list[str]) -> None:
    terminal = spawn(*workbench_command, NO_COLOR="1")
    to_form(terminal)
    terminal.type(b"4")
    terminal.wait_for(b"Epochs")
    codes = {code for found in re.findall(rb"\x1b\[([0-9;]*)m", terminal.seen) for code in found.split(b";")}
    colours = {code for code in codes if re.fullmatch(rb"(3[0-8]|4[0-8]|9[0-7]|10[0-7])", code)}
    assert not colours
    assert "›".encode() in terminal.seen  # the place in focus does not need colour


def test_an_error_of_ours_exits_1_and_shows_no_local_variables(spawn: Spawn, tmp_path: Path) -> None:
    code = (
        "import workbench.screens.build as build\n"
        "steps = build.BuildScreen.action_steps\n"
        "def boom(self, what):\n"
        "    if what != 'fold':\n"
        "        return steps(self, what)\n"
        "    hf_token = 'hf_' + 'A' * 30\n"
        "    raise RuntimeError('it broke with ' + hf_token)\n"
        "build.BuildScreen.action_steps = boom\n"
        "import sys\n"
        "from pathlib import Path\n"
        "from engine.session.draft import Draft\n"
        "Path('my.yaml').write_text(Draft.new('demo').text())\n"
        "from workbench.cli.app import open_app\n"
        "sys.exit(open_app(config=Path('my.yaml')))\n"
    )
    terminal = spawn(sys.executable, "-c", code)
    terminal.wait_for(b"Launch")
    terminal.type(b"3")
    terminal.wait_for(b"Training data")
    terminal.type(b"z")
    assert terminal.exit_code() == 1
    assert b"The app stopped on RuntimeError" in terminal.seen
    assert b"AAAAAAAA" not in terminal.seen
    log = next((tmp_path / "state").rglob("app.log")).read_text()
    assert "RuntimeError" in log
    assert "AAAAAAAA" not in log
    for sequence in RESET:
        assert sequence in terminal.seen


def test_the_app_imports_no_heavy_library() -> None:
    code = (
        "import sys, workbench.app, workbench.screens.start\n"
        "early = {'pydantic', 'ruamel', 'engine.rules', 'engine.config.tree'} & set(sys.modules)\n"
        "assert not early, early  # the first lines wait for nothing that knows configs\n"
        "import workbench.screens.build, workbench.screens.start, engine.session.first_rows, engine.data.gather_facts, engine.client\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'datasets', 'trl'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["chekc"], ["chekc", "my.yaml"]])
def test_a_mistyped_command_is_not_taken_for_a_run(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "workbench", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Did you mean the command `workbench check`?" in done.stderr
