"""`workbench receipt RUN`: what was really done for every feature that was asked for."""

from __future__ import annotations

import click

from engine.errors import visible
from engine.figures import plain
from engine.run import store
from engine.run.index import peek
from workbench.cli.output import columns, echo, print_json


@click.command(short_help="What was really done in a run.")
@click.argument("run")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(run: str, runs: str | None, as_json: bool) -> int:
    """Show a run's receipt: requested and effective, how many, and the detail."""
    folder = store.find(run, store.runs_dir(runs))
    view = peek(folder).view
    if as_json:
        print_json({"id": view.id, "state": view.state, "entries": view.receipt})
        return 0
    if not view.receipt:
        echo(f"{folder.id} has no receipt yet; it is written before the first step.")
        return 0
    parts = ("feature", "requested", "effective", "count", "detail")
    rows = [["-" if entry[part] is None else visible(plain(entry[part])) for part in parts] for entry in view.receipt]
    for line in columns([["FEATURE", "REQUESTED", "EFFECTIVE", "COUNT", ""], *rows], widest=40):
        echo(line)
    return 0
