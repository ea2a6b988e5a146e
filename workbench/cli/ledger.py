"""A ledger on a terminal: by what became of the keys, the gravest first, the reason below each; and where it may write."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from engine.bridge.ledger import Ledger, Row
from engine.errors import visible
from workbench.cli.output import echo, print_json, styled

_MARKS = {"unsupported": ("x", "red"), "changed": ("~", "yellow"), "mapped": ("=", "green"), "needless": (".", "")}


def show(ledger: Ledger, *, only: Sequence[Row] | None = None) -> None:
    """Every row on standard error, or some, and how many there are of each sort."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for heading, rows in ledger.by_outcome() if only is None else [("", list(only))]:
        if heading:
            echo(styled(heading, bold=True), err=True)
        if heading == "Not needed":
            _show_needless(rows, width)
            continue
        for key, there, here, row in ledger.grouped(rows):
            mark, colour = _MARKS[row.outcome]
            change = f" -> {here}" if here else ""
            echo(styled(mark, fg=colour or None), f" {key}: {there}{change}", err=True)
            for line in textwrap.wrap(row.reason, width - 4):
                echo(styled(f"    {line}", dim=True), err=True)
    if only is None:
        echo(ledger.summary(), err=True)


def _show_needless(rows: Sequence[Row], width: int) -> None:
    """Keys that need nothing, those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(f"{row.key}: {row.there}")
    for reason, keys in by_reason.items():
        for line in textwrap.wrap(", ".join(keys), width - 2, break_long_words=False):
            echo(f". {line}", err=True)
        echo(styled(f"    {reason}", dim=True), err=True)


def deliver(ledger: Ledger, output: Path | None, place: Path | None, *, as_json: bool, after: str = "") -> None:
    """Write the config to its place or print it, with the ledger; `after` is said behind what was written."""
    text = ledger.text()
    if place is not None:
        from engine.session.draft import write

        write(place, text)
    if as_json:
        print_json({"path": str(place) if place else None, "text": text, **ledger.as_json()})
        return
    if place is None:
        echo(text.removesuffix("\n"), lines=True)
    show(ledger)
    if place is not None:
        echo(f"Wrote {visible(str(output))}.{after}", err=True)
