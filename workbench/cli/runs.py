"""`workbench runs`: every run of a folder, newest last, with its state and where it stands."""

from __future__ import annotations

import time
from typing import Any

import click

from engine.errors import visible
from engine.figures import brief
from engine.run import launch, silence, store
from engine.run.index import peek
from workbench.cli.following import COLOURS, state_text, summary
from workbench.cli.output import echo, print_json, styled, terminal_width
from workbench.cli.places import runs_folder, shown

MODEL, LEAST_MODEL = 3, 12
"""The column that gives way in a narrow terminal, and how far."""


@click.command(short_help="List runs.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(runs: str | None, as_json: bool) -> int:
    """List the runs of a folder. A run whose supervisor died gets a new one, so that its state is true."""
    root = runs_folder(runs)
    folders = list(store.runs_in(root))
    listed = [summary(peek(run, problem=launch.attend_or_report(run))) for run in folders]
    if as_json:
        print_json(listed)
        return 0
    if not listed:
        echo(f"No runs in {shown(root)}. `workbench demo` makes one.")
        return 0
    show(sorted(listed, key=lambda entry: entry["started"] or 0))
    return 0


def show(listed: list[dict[str, Any]]) -> None:
    told = "LOSS" if all(entry["reward"] is None for entry in listed) else "LOSS OR REWARD"
    rows = [("RUN", "STATE", "METHOD", "MODEL", "STEP", told, "AGE")]
    for entry in listed:
        of = f" of {entry['max_steps']}" if entry["max_steps"] else ""
        # Where answers are sampled the loss begins at nothing and says little.
        value = f"reward {entry['reward']:z.4f}" if entry["reward"] is not None else "-"
        if value == "-" and entry["loss"] is not None:
            value = f"{entry['loss']:z.4f}"
        rows.append(
            (
                visible(entry["id"]),
                state_text(entry["state"]),
                visible(entry["method"]),
                _short(visible(entry["model"]), 32),
                f"{entry['step']}{of}",
                value,
                brief(max(0.0, time.time() - entry["started"])) if entry["started"] else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    over = sum(widths) + 2 * (len(widths) - 1) - (terminal_width() or 1 << 16)
    widths[MODEL] = max(min(LEAST_MODEL, widths[MODEL]), widths[MODEL] - max(0, over))
    for number, row in enumerate(rows):
        cells = [_short(cell, widths[MODEL]) if place == MODEL else cell for place, cell in enumerate(row)]
        name, state, *rest = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        entry = listed[number - 1] if number else {}
        echo(f"{name}  ", styled(state, fg=COLOURS.get(entry.get("state", ""))), "  " + "  ".join(rest).rstrip())
        if entry.get("silent_seconds") is not None:
            echo(styled("  " + silence.advice(row[0], entry["silent_seconds"]), fg="yellow"), hang=2)
        if entry and entry["state"] != "stopped" and entry["cause"]:
            echo(f"  {entry['cause']}", hang=2)
        elif entry and entry["restarts"]:
            times = "once" if entry["restarts"] == 1 else f"{entry['restarts']} times"
            echo(f"  its worker died and was started again {times}")
        elif entry and entry["diverged_at"] is not None:
            echo(f"  diverged: numbers of step {entry['diverged_at']} were not finite")


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else "…" + name[-(most - 1) :]
