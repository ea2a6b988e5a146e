"""`workbench evaluate RUN`: the held-out metrics of a checkpoint, measured now, beside the base on request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from engine.config.kinds import BUILTIN_ROWS
from engine.errors import UsageError, redact, visible
from engine.figures import progress
from engine.run import store
from engine.run.curves import format_metric, ordered, titled
from engine.run.evaluations import Evaluation, step_of, tasks_of
from workbench.cli.output import clear, echo, print_json, rewrite
from workbench.cli.places import to_read


@click.command(short_help="Measure a checkpoint on held-out rows.")
@click.argument("name", metavar="RUN")
@click.option(
    "--checkpoint", "wanted", metavar="N|best", help="The checkpoint of step N, or the best; else the newest whole one."
)
@click.option("--base", is_flag=True, help="Measure the model as training began with it, too.")
@click.option(
    "--data", "data", metavar="FILE", help="Rows to measure, not the run's own; or those held out of builtin/dates."
)
@click.option(
    "--tasks",
    "tasks",
    multiple=True,
    metavar="FILE",
    help="A task of lm-evaluation-harness (YAML); may be given often.",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu", help="Where the model computes.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    name: str,
    wanted: str | None,
    base: bool,
    data: str | None,
    tasks: tuple[str, ...],
    device: str,
    runs: str | None,
    as_json: bool,
) -> int:
    """Measure a checkpoint as the run's trainer measures held-out rows, in a process of its own.

    \b
    workbench evaluate my-0001
    workbench evaluate my-0001 --checkpoint best --base
    workbench evaluate my-0001 --data unseen.jsonl
    workbench evaluate my-0001 --tasks dates.yaml --base
    """
    run = store.find(name, store.runs_dir(runs))
    rows = rows_of(data)
    if tasks and data is not None:
        raise UsageError("--tasks: a task names its own rows; got --data beside it.", "Leave one of them out.")
    files = tasks_of(tasks)
    step = step_of(run, wanted)

    def show(message: dict[str, Any]) -> None:
        state = message["progress"]
        rewrite(state["what"] + (f" {progress({**state, 'unit': 'rows'})} rows" if state["total"] > 1 else " …"))

    try:
        record, path = Evaluation(run, step, base=base, data=rows, tasks=files, device=device).measure(show)
    finally:
        clear()
    if as_json:
        print_json({"ok": True, "run": run.id, **record, "path": str(path)})
    else:
        for line in lines(run.id, record):
            echo(line)
        echo(f"kept in {visible(redact(str(path)))}", err=True)
    return 0


def rows_of(data: str | None) -> str | None:
    """What --data names: a file by its whole path, built-in rows by their name. Raises UsageError where neither is there."""
    if data is None or data in BUILTIN_ROWS:
        return data
    file = Path(data).expanduser().absolute()
    way = "Give its path, or leave --data out for the rows that the run held out."
    builtin = data.startswith("builtin/") and not os.path.lexists(file)
    if builtin:
        way = f"Give {' or '.join(BUILTIN_ROWS)}, or a file."
    to_read(Path(data) if builtin else file, "a file with rows", way, flag="--data", folder=True)
    return str(file)


def lines(name: str, record: dict[str, Any]) -> list[str]:
    """What was measured as a table, the base beside the checkpoint where it was asked for."""
    rows = f"{record['rows']:,} row{'' if record['rows'] == 1 else 's'} of {visible(redact(str(record['data'])))}"
    before = "as it began" if record.get("begins_from") else "base"
    sides = [record["checkpoint"], *([before] if record["base"] is not None else [])]
    names = ordered(record["method"], list(record["metrics"]))
    table = [["", *sides]]
    for metric in names:
        values = [record["metrics"][metric], *([record["base"].get(metric)] if record["base"] is not None else [])]
        table.append(
            [titled(metric), *("not finite" if value is None else format_metric(metric, value) for value in values)]
        )
    first = max(len(row[0]) for row in table)
    widths = [max(len(row[column]) for row in table) for column in range(1, len(table[0]))]
    text = [f"{visible(name)}, {rows}"]
    for row in table:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))
        text.append(f"  {row[0].ljust(first)}  {'  '.join(cells)}")
    return text
