"""What `--help` and `check` take of a processor and import is held to bounds: it crept up once, a little with each change."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MOST = {"--help": 1.4, "check": 2.8}
"""Times what the imports of the benchmark take: 1.2 and 2.1 when this was written, 1.5 and 4.2 when nobody had looked."""
MODULES = {"--help": 98, "check": 310}
"""92 and 280 when this was written, 104 and 404 before. One more is no harm; fifty are a week's."""
COUNT = """
import atexit, os, sys
before, sys.argv = set(sys.modules), ["workbench", *sys.argv[1:]]
from workbench.__main__ import main
atexit.register(lambda: os.write(2, str(len(set(sys.modules) - before)).encode()))
main()
"""


@pytest.mark.alone
@pytest.mark.parametrize("command", MOST)
def test_commands_start_soon(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    cli_start = importlib.import_module("cli_start")
    cli_start.prepare(tmp_path)
    ours, theirs, mark = cli_start.COMPARED[command]
    cli_start.once(ours, tmp_path)  # compiles what was never imported
    pairs = [(cli_start.once(ours, tmp_path)[1], cli_start.once(theirs, tmp_path)[1]) for _ in range(5)]
    mine, bare = (min(column) for column in zip(*pairs, strict=True))
    assert mine < MOST[command] * bare, f"{1000 * mine:.0f} ms of a processor, {mine / bare:.2f} of {theirs[-1]}"
    assert MOST[command] < mark


@pytest.mark.parametrize("command", MODULES)
def test_commands_import_no_more_than_they_need(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    cli_start = importlib.import_module("cli_start")
    cli_start.prepare(tmp_path)
    words = cli_start.COMPARED[command][0][3:]
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *words], cwd=tmp_path, capture_output=True, check=True, timeout=60
    )
    assert 50 < int(done.stderr) < MODULES[command]
