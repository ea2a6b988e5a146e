"""`workbench receipt RUN`: what was really done for every feature that was asked for."""

from __future__ import annotations

import json
from typing import Any

import click

from engine.errors import visible
from engine.run import store
from engine.run.index import peek
from workbench.cli.output import echo, print_json


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
    rows = [("FEATURE", "REQUESTED", "EFFECTIVE", "COUNT", "")]
    for entry in view.receipt:
        rows.append(
            (
                visible(entry["feature"]),
                _cell(entry["requested"]),
                _cell(entry["effective"]),
                _cell(entry["count"]),
                visible(entry["detail"]),
            )
        )
    widths = [min(40, max(len(row[column]) for row in rows)) for column in range(5)]
    for row in rows:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return visible(value if isinstance(value, str) else json.dumps(value))
