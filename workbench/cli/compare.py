"""`workbench compare RUN RUN ...`: the ends of the curves, the settings that differ, the answers to the same prompts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import click

from engine.errors import visible
from engine.figures import count
from engine.run import store
from engine.run.compare import describe_identical, fit_to_compare, format_value, summary, unique_names
from engine.run.curves import format_metric, titled
from engine.run.index import open_view
from engine.run.store import RunFolder
from engine.run.view import RunView
from workbench.cli.following import state_text
from workbench.cli.output import echo, print_json
from workbench.panels.columns import GAP, beside

CURVES = 6
"""Curves of the table; `--json` has all of them."""
ENDLESS = 100_000
"""Columns of an output that is no terminal: each setting stays on one line, for `grep` and `less -S`."""


@click.command(short_help="What differs between runs.")
@click.argument("names", nargs=-1, metavar="RUN RUN...")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(names: tuple[str, ...], runs: str | None, as_json: bool) -> int:
    """Lay two to eight runs beside each other: curves, settings that differ, answers to the same prompts."""
    fit_to_compare(names)
    root = store.runs_dir(runs)
    folders = [store.find(name, root) for name in names]
    called = unique_names(folders)
    views = _complete_views(folders)
    from engine.config.files import parse

    comparison = summary(called, views, [parse(folder.read_config(), path=folder.config).mapping for folder in folders])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else ENDLESS
    if as_json:
        print_json(comparison)
        return 0
    for line in lines(comparison, width):
        echo(line)
    return 0


def _complete_views(folders: Sequence[RunFolder]) -> list[RunView]:
    """The runs with their whole curves, which are read side by side."""
    with ExitStack() as stack:
        watches = [stack.enter_context(open_view(folder)) for folder in folders]
        for watch in watches:
            watch.read_completely()
        return [watch.view.copy() for watch in watches]


def lines(comparison: dict[str, Any], width: int) -> list[str]:
    """All of it in so many columns; runs are called by number where their names do not fit side by side."""
    runs = comparison["runs"]
    rows = [
        (titled(name), [_ends(name, end) for end in ends]) for name, ends in list(comparison["curves"].items())[:CURVES]
    ]
    rows.append(("", []))
    rows += [(visible(row["path"]), [format_value(value) for value in row["values"]]) for row in comparison["settings"]]
    if not comparison["settings"]:
        rows.append(("settings", ["the same" for _ in runs]))
    made = _table([visible(run["id"]) for run in runs], _standing(runs), rows, width)
    if comparison["identical"]:
        made += ["", *describe_identical(comparison["identical"])]
    longest = max(len(visible(run["id"])) for run in runs)
    for asked in comparison["answers"]:
        made += ["", visible(asked["prompt"])]
        for run, answer in zip(runs, asked["answers"], strict=True):
            made.append(f"  {visible(run['id']).ljust(longest)}  {_answer(answer)}")
    return made


Rows = list[tuple[str, list[str]]]


def _standing(runs: Sequence[dict[str, Any]]) -> Rows:
    rows = [("state", [state_text(visible(run["state"])) for run in runs])]
    rows.append(("step", [count(run["step"]) for run in runs]))
    if len({run["method"] for run in runs}) > 1:  # whose losses are not the same quantity
        rows.append(("method", [visible(run["method"] or "-") for run in runs]))
    return rows


def _table(names: Sequence[str], standing: Rows, rows: Rows, width: int) -> list[str]:
    everything = [("", list(names)), *standing, *rows]
    first = min(max(18, width // 3), max(len(label) for label, _ in everything) + GAP)
    wide = max(len(cell) for _, cells in everything for cell in cells) + GAP
    width = min(width, first + len(names) * wide)
    numbers = [str(number) for number in range(1, len(names) + 1)]
    if len(beside("", names, numbers, first, width)) == 1:
        made, shown = [], everything
    else:
        labelled = [[f"step {cell}" if label == "step" else cell for cell in cells] for label, cells in standing]
        where = [", ".join(words) for words in zip(*labelled, strict=True)]
        longest = max(map(len, names))
        made = [
            f"{number}  {name.ljust(longest)}  {words}"
            for number, name, words in zip(numbers, names, where, strict=True)
        ]
        made.append("")
        shown = [("", numbers), *rows]
    for label, cells in shown:
        block = beside(label, cells, numbers, first, width) if cells else [("", "")]
        made += [f"{begin}{text}".rstrip() for begin, text in block]
    return made


def _ends(name: str, ends: dict[str, float | None] | None) -> str:
    if ends is None:
        return "-"
    last, lowest, highest = (format_metric(name, ends[end]) for end in ("last", "lowest", "highest"))
    return f"{last} ({lowest} to {highest})"


def _answer(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "was not asked"
    return f"step {answer['step']:,}: {visible(answer['text']) if answer['text'].strip() else 'no words'}"
