"""`workbench runs`: every run of a folder, newest last, with its state and where it stands."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from engine.errors import UsageError, visible
from engine.run import launch, store
from engine.run.index import peek
from workbench.cli.following import COLOURS, state_text, summary


@click.command(short_help="List runs.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(runs: str | None, as_json: bool) -> int:
    """List the runs of a folder. A run whose supervisor died gets a new one, so that its state is true."""
    root = store.runs_dir(runs)
    if runs is not None and not root.is_dir():
        what = "a file" if root.exists() else "nothing there"
        raise UsageError(f"--runs: must be a folder that holds runs; got {what}: {visible(str(root))}. Check the path.")
    found = list(store.runs_in(root))
    for run in found:
        if launch.unattended(run):
            launch.attend(run)
    listed = [summary(peek(run)) for run in found]
    if as_json:
        click.echo(json.dumps(listed))
        return 0
    if not listed:
        click.echo(f"No runs in {visible(str(root))}. `workbench demo` makes one.")
        return 0
    show(sorted(listed, key=lambda entry: entry["started"] or 0))
    return 0


def show(listed: list[dict[str, Any]]) -> None:
    rows = [("RUN", "STATE", "METHOD", "MODEL", "STEP", "LOSS", "AGE")]
    for entry in listed:
        of = f" of {entry['max_steps']}" if entry["max_steps"] else ""
        loss = f"{entry['loss']:.4f}" if entry["loss"] is not None else "-"
        rows.append(
            (
                entry["id"],
                state_text(entry["state"]),
                visible(entry["method"]),
                _short(visible(entry["model"])),
                f"{entry['step']}{of}",
                loss,
                _age(entry["started"]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if number:
            cells[1] = click.style(cells[1], fg=COLOURS.get(listed[number - 1]["state"]))
        click.echo("  ".join(cells).rstrip())
        if number and listed[number - 1]["state"] in ("failed", "lost"):
            click.echo(f"  {visible(listed[number - 1]['cause'] or '')}")


def _short(name: str) -> str:
    return name if len(name) <= 32 else "…" + name[-31:]


def _age(started: float | None) -> str:
    if not started:
        return "-"
    seconds = max(0.0, time.time() - started)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
