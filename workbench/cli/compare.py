"""`workbench compare RUN RUN ...`: the ends of the curves, the settings that differ, the answers to the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from engine.errors import UsageError, visible
from engine.run import store
from engine.run.compare import MOST, answers, differences, extremes, shared_curves
from engine.run.index import open_view
from engine.run.store import RunFolder
from engine.run.view import RunView

CURVES = 6
"""Curves of the table; `--json` has all of them."""


@click.command(short_help="What differs between runs.")
@click.argument("names", nargs=-1, metavar="RUN RUN...")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(names: tuple[str, ...], runs: str | None, as_json: bool) -> int:
    """Lay two to four runs beside each other: curves, settings that differ, answers to the same prompts."""
    root = store.runs_dir(runs)
    folders = [store.find(name, root) for name in names if name]
    different = {folder.path.resolve() for folder in folders}
    if not 2 <= len(different) <= MOST or len(different) < len(names):
        got = " ".join(visible(name) or "''" for name in names) or "none"
        raise UsageError(f"RUN: must be two to {MOST} different runs; got {got}.", "`workbench runs` lists them.")
    views = [_whole(folder) for folder in folders]
    from engine.config.files import load

    changed = differences([load(folder.config).mapping for folder in folders])
    found = _as_data(views, changed)
    click.echo(json.dumps(found)) if as_json else _show(found)
    return 0


def _whole(folder: RunFolder) -> RunView:
    """The run with its whole curves."""
    watch = open_view(folder)
    try:
        while watch.loading < 1 and watch.poll():
            pass
        return watch.view.copy()
    finally:
        watch.close()


def _as_data(views: Sequence[RunView], changed: list[tuple[str, tuple[Any, ...]]]) -> dict[str, Any]:
    runs = [{"id": v.id, "state": v.state, "method": v.method, "step": v.step, "max_steps": v.max_steps} for v in views]
    curves: dict[str, list[dict[str, float | None] | None]] = {}
    for name in shared_curves(views):
        ends = [extremes(view.series[name]) if name in view.series else None for view in views]
        curves[name] = [
            {"last": view.latest.get(name), "lowest": end[0], "highest": end[1]} if end else None
            for view, end in zip(views, ends, strict=True)
        ]
    asked = [
        {"prompt": prompt, "answers": [sample and {"step": sample["step"], "text": sample["completion"]} for sample in samples]}
        for prompt, samples in answers(views)
    ]  # fmt: skip
    settings = [{"path": path, "values": list(values)} for path, values in changed]
    return {"runs": runs, "curves": curves, "settings": settings, "answers": asked}


def _show(found: dict[str, Any]) -> None:
    rows = [["", *(visible(run["id"]) for run in found["runs"])]]
    rows.append(["state", *(visible(run["state"]) for run in found["runs"])])
    rows.append(["step", *(f"{run['step']:,}" for run in found["runs"])])
    if len({run["method"] for run in found["runs"]}) > 1:  # whose losses are not the same quantity
        rows.append(["method", *(visible(run["method"] or "-") for run in found["runs"])])
    for name, ends in list(found["curves"].items())[:CURVES]:
        cells = [
            f"{_figure(end['last'])} ({_figure(end['lowest'])} to {_figure(end['highest'])})" if end else "-"
            for end in ends
        ]
        rows.append([visible(name), *cells])
    rows.append([])
    rows += [[visible(row["path"]), *(_value(value) for value in row["values"])] for row in found["settings"]]
    if not found["settings"]:
        rows.append(["settings", *("the same" for _ in found["runs"])])
    widths = [max(len(row[column]) for row in rows if row) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    for asked in found["answers"]:
        click.echo(f"\n{visible(asked['prompt'])}")
        for run, answer in zip(found["runs"], asked["answers"], strict=True):
            text = (
                f"step {answer['step']:,}: {visible(answer['text']) if answer['text'].strip() else 'no words'}"
                if answer
                else "was not asked"
            )
            click.echo(f"  {visible(run['id']).ljust(widths[1])}  {text}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _value(value: Any) -> str:
    from engine.config.findings import shown

    if isinstance(value, list) and value and all(isinstance(entry, dict) and entry.get("path") for entry in value):
        return ", ".join(visible(str(entry["path"])) for entry in value)
    return "-" if value is None else shown(value)
