"""`workbench guide [ROWS]`: the guided first run without a screen: what is taught page by page, and a rehearsal that proves it."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import click

from engine.client import Inspector
from engine.config.kinds import BUILTIN_ROWS
from engine.errors import WorkbenchError
from engine.hardware import this_machine
from engine.run.index import open_view
from engine.run.view import RunView
from engine.session.first_run import TINY, TITLES, FirstRun
from engine.session.guided_rehearsal import DATES, STEPS, Verdict, examine
from engine.session.pages import Block
from workbench.calling import run_name
from workbench.cli.output import echo, print_json, rewrite, styled
from workbench.cli.places import PATH, to_read, to_write

_ROWS = "Name a JSON, JSONL or CSV file of questions and answers, or none for the built-in rows."
_LOOKS: dict[str, dict[str, Any]] = {
    "title": {"bold": True},
    "dim": {"dim": True},
    "warn": {"fg": "yellow"},
    "bad": {"fg": "red"},
}


@click.command(short_help="A guided first run, on your own rows.")
@click.argument("rows", default=DATES, metavar="[ROWS]")
@click.option(
    "--model", default=TINY, show_default=True, metavar="MODEL", help="A folder, a hub model or builtin/tiny."
)
@click.option("--save", "save", metavar="FILE", type=PATH, help="Keep the config of the real run.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(rows: str, model: str, save: Path | None, runs: str | None, as_json: bool) -> int:
    """See a model learn a few rows by heart, and know why it did.

    ROWS is a JSON, JSONL or CSV file of questions and answers, the built-in ones without it. The rehearsal stops by
    itself once the model answers up to three of their questions word for word; if it never does, the step that failed is
    named.
    """
    if save is not None:
        to_write(save, flag="--save", way="Name another one.")
    if rows not in BUILTIN_ROWS:
        to_read(Path(rows).expanduser(), "a file of questions and answers", _ROWS)
    inspector = Inspector()
    try:
        first = FirstRun(inspector.ask, rows=rows, model=model, runs=runs)
        first.examined = examine(rows, first.base)
        if first.examined.problem:
            raise WorkbenchError(first.examined.problem, _ROWS)
        first.row = _first_row(first)
        if not as_json:
            for page in ("machine", "goal", "rows", "tokens"):
                _print_page(page, first.page(page, this_machine()))
        run = first.launch()
        with open_view(run) as watch:
            try:
                verdict = _rehearse(first, watch, quiet=as_json)
            except KeyboardInterrupt:
                words = f"{run.id} goes on to its end, at most step {STEPS}."
                raise WorkbenchError(words, f"`workbench watch {run_name(run)}` shows it.", exit_code=130) from None
            view = watch.view.copy()
    finally:
        inspector.close()
    if as_json:
        print_json(
            {
                "id": run.id,
                "learned": verdict.state == "learned",
                "words": verdict.message,
                "page": verdict.page or None,
                "todo": verdict.todo or None,
                "step": view.step,
                "samples": view.samples,
            }
        )
    else:
        _print_page("rehearsal", first.page("rehearsal", view=view))
        _print_page("next", first.page("next", view=view))
    if verdict.state != "learned":
        return 1
    if save is not None:
        first.real().save(save)
    if not as_json:
        echo(f"  its run: `workbench {run_name(run)}`")
        if save is not None:
            echo(f"  the real run: `workbench check {save}`, then `workbench train {save}`")
        else:
            echo("  the real run: the same command with `--save my.yaml` keeps its config")
    return 0


def _first_row(first: FirstRun) -> dict[str, Any]:
    """The first row as tokens. Raises WorkbenchError where it cannot be prepared."""
    answers: queue.SimpleQueue[dict[str, Any] | WorkbenchError] = queue.SimpleQueue()
    first.ask_tokens(answers.put)
    row = answers.get()
    if isinstance(row, WorkbenchError):
        raise row
    return row


def _rehearse(first: FirstRun, watch: Any, *, quiet: bool) -> Verdict:
    """Follow the rehearsal to its end."""
    while True:
        watch.poll()
        view: RunView = watch.view
        verdict = first.follow(watch.folder, view)
        if not quiet:
            rewrite(f"{view.phase or 'rehearsal'}: step {view.step}")
        if view.over:
            return verdict
        time.sleep(0.1)


def _print_page(page: str, blocks: list[Block]) -> None:
    """A page as text: its title, then its blocks."""
    echo(styled(TITLES[page], bold=True, underline=True))
    for block in blocks:
        for label, value in block.rows:
            echo(styled(f"  {label:<10}", dim=True), value.replace("\n", "\n" + " " * 12), lines=True, hang=12)
        if block.rows:
            continue
        indent = "  " if block.kind == "code" else ""
        echo(indent, styled(block.text, **_LOOKS.get(block.kind, {})), hang=None if block.kind == "code" else 0)
    echo()
