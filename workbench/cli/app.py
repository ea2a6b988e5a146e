"""`workbench`: opens the app. With a run it shows the run, with a config file it opens it in the form.

Owns the decision what to open and the words after leaving. The terminal is judged before Textual is imported.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.errors import UsageError, visible
from workbench.guard import guarded_terminal
from workbench.terminal import require_terminal

if TYPE_CHECKING:
    from engine.run.store import RunFolder

CONFIGS = (".yaml", ".yml")


@click.command(short_help="Open the app.")
@click.argument("run", required=False, metavar="[RUN | FILE]")
@click.argument("more", nargs=-1, metavar="")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
def command(run: str | None = None, more: tuple[str, ...] = (), runs: str | None = None) -> int:
    """Open the app: on a run, on a config file, or on the first step.

    \b
    workbench              build a config, step by step
    workbench my.yaml      open a config in the form
    workbench dates-0001   open a run
    """
    if more:
        close = _command_like(str(run))
        hint = f"Did you mean the command `workbench {close}`?" if close else "`workbench --help` lists the commands."
        raise UsageError(f"{visible(str(run))} is not a command, and the app opens one run or file.", hint)
    if run is not None and (Path(run).suffix.lower() in CONFIGS or Path(run).is_file()):
        return open_app(config=Path(run), runs_dir=runs)
    return open_app(run=run, runs_dir=runs)


def open_app(
    *,
    run: str | RunFolder | None = None,
    config: Path | None = None,
    recipe: str | None = None,
    runs_dir: str | Path | None = None,
) -> int:
    """Open the app and return its exit code. What cannot be opened is said before the screen changes.

    Raises UsageError in an unfit terminal, RunNotFound, ConfigUnreadable.
    """
    folder = _find(run, runs_dir)
    require_terminal()
    # A size that something exported once would hold the app at that size, however the window changes.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # Nothing that is imported now becomes garbage; looking for it is a tenth of the time to the first frame.
    gc.disable()
    draft = None
    if config is not None or recipe is not None:
        from engine.config.draft import Draft

        draft = Draft.open(config) if config is not None else Draft.new(recipe)
    with guarded_terminal():
        from workbench.app import WorkbenchApp

        first = draft is None and folder is None and _any_alive(runs_dir)
        app = WorkbenchApp(draft, folder, runs_dir, runs_first=first)
        app.run()
    for line in app.goodbye:
        click.echo(visible(line))
    # Whatever ended it otherwise was an error, also where the library counts it as none.
    return (app.return_code or 0) if app.left else (app.return_code or 1)


def _find(run: str | RunFolder | None, runs_dir: str | Path | None) -> RunFolder | None:
    if run is None or not isinstance(run, str):
        return run
    from engine.errors import RunNotFound
    from engine.run.store import find
    from engine.run.store import runs_dir as default_runs_dir

    try:
        return find(run, default_runs_dir(runs_dir))
    except RunNotFound:
        if Path(run).suffix or "/" in run:
            raise
        close = _command_like(run)
        if close:
            hint = f"Did you mean the command `workbench {close}`?"
            raise UsageError(f"{visible(run)} is neither a command nor a run here.", hint) from None
        raise


def _command_like(word: str) -> str | None:
    """The command that was probably meant."""
    from engine.errors import nearest
    from workbench.__main__ import COMMANDS

    return nearest(word, COMMANDS)


def _any_alive(runs_dir: str | Path | None) -> bool:
    """Whether a run goes on: whoever comes back then wants to see it first."""
    from engine.run.store import runs_dir as default_runs_dir
    from workbench.screens.leave import alive

    return any(True for _ in alive(default_runs_dir(runs_dir)))
