"""`workbench mcp`: configs and runs for coding assistants, over the Model Context Protocol on standard input and output."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from engine.errors import UsageError, visible
from engine.hardware import installed
from engine.run import store
from engine.run.inside import READ_WITHIN
from workbench.cli.output import print_json
from workbench.cli.places import PATH

INSTALL = "pip install 'finetuning-workbench[mcp]'"
OLDEST, BELOW = (2, 1), (3, 0)
"""Releases of the library, as pyproject.toml has them."""


@click.command(short_help="Serve configs and runs to a coding assistant.")
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="DIR",
    type=PATH,
    help="A folder to look into, again and again for several; without it the one where this was started.",
)
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--allow-launch", is_flag=True, help="Start and stop runs unasked where the client cannot ask you.")
@click.option("--json", "as_json", is_flag=True, help="Print the entry for an assistant's settings, and return.")
def command(roots: tuple[Path, ...], runs: str | None, allow_launch: bool, as_json: bool) -> int:
    """Serve configs and runs to a coding assistant: read, check, preview, estimate, launch, watch. It is the assistant that
    starts this, and speaks with it on standard input and output; no port is opened.

    \b
    workbench mcp --root ~/project --json   the entry for the assistant's settings

    Nothing outside the roots and the folder of runs is read, and no link is followed out of them. A run starts or stops once
    you have agreed: the assistant's client asks you, and one that cannot is given the command for you to type.
    """
    _require_library()
    from workbench.assistants.roots import root_of

    folders = [root_of(root) for root in roots or (Path.cwd(),)]
    if as_json:
        print_json({"mcpServers": {"workbench": _entry(folders, runs, allow_launch)}})
        return 0
    if sys.stdin.isatty():
        raise UsageError(
            "Standard input is a terminal: an assistant starts this and speaks with it.",
            "`workbench mcp --json` prints the entry for its settings.",
        )
    named = str(store.runs_dir(runs)) if runs is not None else None
    os.chdir(folders[0])  # where relative paths of the assistant begin, and those of the config's folder of runs
    return _serve(folders, named, allow_launch)


def _require_library() -> None:
    """Raises UsageError without the library, and with a release of it that has not what is needed."""
    version = installed("mcp")
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) < BELOW:
        got = f"; {visible(version)} is installed" if version else ", which is not installed"
        needed = f"mcp {'.'.join(map(str, OLDEST))} or newer, below {BELOW[0]}" if version else "mcp"
        raise UsageError(f"This needs the library {needed}{got}.", f"Install it with `{INSTALL}`.")


def _serve(folders: list[Path], runs: str | None, allow_launch: bool) -> int:
    """Serve until the assistant leaves."""
    from workbench.assistants.desk import Desk
    from workbench.assistants.roots import Roots
    from workbench.assistants.server import Server

    gc.enable()  # off since the command started, and this goes on for days
    roots = Roots(folders, store.runs_dir(runs))
    os.environ[READ_WITHIN] = json.dumps([str(root) for root in roots.all])
    Server(Desk(roots, runs, allow_launch)).run("stdio")
    return 0


def _entry(roots: list[Path], runs: str | None, allow_launch: bool) -> dict[str, Any]:
    """How an assistant starts this very installation."""
    words = ["mcp"]
    for root in roots:
        words += ["--root", str(root)]
    words += ["--runs", str(store.runs_dir(runs))] if runs is not None else []
    words += ["--allow-launch"] if allow_launch else []
    beside = Path(sys.executable).with_name("workbench")
    if beside.is_file():
        return {"command": str(beside), "args": words}
    return {"command": sys.executable, "args": ["-m", "workbench", *words]}
