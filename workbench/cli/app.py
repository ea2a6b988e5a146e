"""`workbench`: opens the app. With a run it shows the run, with a config file it opens it in the form.

Owns the decision what to open and the words after leaving. The terminal is judged before Textual is imported.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import RunNotFound, UsageError, nearest, visible
from workbench.calling import run_name
from workbench.cli.output import echo
from workbench.guard import guarded_terminal
from workbench.terminal import PLAIN, PLAIN_CHAT, require_terminal

if TYPE_CHECKING:
    from engine.bridge.ledger import Ledger
    from engine.run.store import RunFolder
    from engine.session.chat import ChatSession
    from engine.session.draft import Draft

CONFIGS = (".yaml", ".yml")


@click.command(short_help="Open the app.")
@click.argument("run", required=False, metavar="[RUN | FILE]")
@click.argument("more", nargs=-1, metavar="")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
def command(run: str | None = None, more: tuple[str, ...] = (), runs: str | None = None) -> int:
    """Open the app: on what there is to come back to, on a run, or on a config file.

    \b
    workbench              what goes on, what was done last, ways to begin
    workbench my.yaml      open a config at its first open question; settings beside it, KEY=VALUE, are changes not saved yet
    workbench dates-0001   open a run
    """
    is_file = run is not None and (Path(run).suffix.lower() in CONFIGS or Path(run).is_file())
    if more and not is_file:
        close = _command_like(str(run))
        hint = f"Did you mean the command `workbench {close}`?" if close else "`workbench --help` lists the commands."
        raise UsageError(f"{visible(str(run))} is not a command, and the app opens one run or file.", hint)
    wrong = next((word for word in more if "=" not in word), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong}: must be a setting, KEY=VALUE, beside the config {run}.",
            f"`workbench train {run}` starts a run of it, `workbench check {run}` judges it; both take settings, too.",
        )
    if run is not None and is_file:
        return open_app(config=Path(run), settings=more, runs_dir=runs)
    return open_app(run=run, runs_dir=runs)


def open_app(
    *,
    run: str | RunFolder | None = None,
    config: Path | None = None,
    settings: Sequence[str] = (),
    runs_dir: str | Path | None = None,
    chat: ChatSession | None = None,
) -> int:
    """Open the app and return its exit code. What cannot be opened is said before the screen changes.

    Raises UsageError in an unfit terminal, RunNotFound, ConfigUnreadable.
    """
    folder = _find(run, runs_dir)
    require_terminal(plain=_without(folder, chat))
    # A size that something exported once would hold the app at that size, however the window changes.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # Nothing that is imported now becomes garbage; looking for it is a tenth of the time to the first frame.
    gc.disable()
    draft, ledger = _opened(config, settings)
    with guarded_terminal():
        from workbench.app import WorkbenchApp

        start = draft is None and folder is None and ledger is None and chat is None
        step = _first_step(draft, config)
        app = WorkbenchApp(draft, folder, runs_dir, start=start, step=step, ledger=ledger, chat=chat)
        if config is not None:
            app.history.recent.note(config)
        app.run()
    for line in app.ending.messages():
        echo(line)
    # Whatever ended it otherwise was an error, also where the library counts it as none.
    return (app.return_code or 0) if app.left else (app.return_code or 1)


def _opened(config: Path | None, settings: Sequence[str]) -> tuple[Draft | None, Ledger | None]:
    """The draft of a file with these settings, or what becomes of a config of another tool.

    Raises ConfigUnreadable, UsageError.
    """
    if config is None:
        return None, None
    from engine.session.draft import Draft
    from engine.session.opening import open_config

    opened = open_config(config)
    if not isinstance(opened, Draft):
        if settings:
            raise UsageError(
                f"{settings[0]}: must be left out beside {visible(str(config))}, a config of {opened.title}.",
                "Take it over first, then change its settings.",
            )
        return None, opened
    for path, value in _pairs(settings):
        opened.set(path, value)
    return opened, None


def _pairs(settings: Sequence[str]) -> list[tuple[str, Any]]:
    """Path and value of each KEY=VALUE, as the other commands read them."""
    from workbench.cli.reading import placed_override

    return [placed_override(pair) for pair in settings]


def _find(run: str | RunFolder | None, runs_dir: str | Path | None) -> RunFolder | None:
    if run is None or not isinstance(run, str):
        return run
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
    from workbench.__main__ import COMMANDS

    return nearest(word, COMMANDS)


def _first_step(draft: Draft | None, config: Path | None) -> str:
    """Where the form begins: at a file's first open question, else at the goal."""
    if draft is None or config is None:
        return "goal"
    from engine.session.opening import open_step

    return open_step(draft)


def _without(folder: RunFolder | None, chat: ChatSession | None) -> str:
    """The command that shows the same without the app."""
    if chat is not None:
        return PLAIN_CHAT
    return PLAIN if folder is None else f"Without the app: `workbench watch {run_name(folder)}`."
