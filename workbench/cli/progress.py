"""Progress of a long task as one line on stderr; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from engine.errors import visible


def on_stderr(state: Mapping[str, Any]) -> None:
    """Show `what: done of total`, over the line before."""
    if sys.stderr.isatty():
        total = state.get("total")
        of = f" of {total:,}" if isinstance(total, int) else ""
        click.echo(f"\r\x1b[2K{visible(str(state.get('what', '')))}: {state.get('done', 0):,}{of}", nl=False, err=True)


def doing(what: str) -> None:
    """Show what is being done, over the line before."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[2K{visible(what)}", nl=False, err=True)


def done() -> None:
    """Clear the line."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[2K", nl=False, err=True)
