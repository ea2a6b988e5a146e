"""`workbench preview FILE [KEY=VALUE ...]`: the batch that training will see, token by token, with what is learned marked.

On a terminal learned tokens are green and underlined (so that colour is never the only sign); in a pipe they stand
between ‹ and ›. Rows are printed as plain text objects, never as markup.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from engine.client import Inspector
from engine.errors import DataError, UsageError, visible


@click.command(short_help="Show the batch that training will see.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--rows", "count", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many rows.")
@click.option("--row", "first", type=click.IntRange(0), default=None, help="Begin at this row (from 0).")
@click.option("--random", "at_random", is_flag=True, help="Rows at random.")
@click.option("--worst", type=click.Choice(["longest", "masked", "truncated"]), help="The worst rows by this.")
@click.option("--search", metavar="TEXT", help="Rows that hold this text.")
@click.option("--eval", "held_out", is_flag=True, help="The held-out rows instead of the training rows.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    file: Path,
    overrides: tuple[str, ...],
    count: int,
    first: int | None,
    at_random: bool,
    worst: str | None,
    search: str | None,
    held_out: bool,
    as_json: bool,
) -> int:
    """Show the batch that training will see, from the collator that training uses.

    \b
    workbench preview my.yaml
    workbench preview my.yaml data.max_length=512 --worst truncated
    """
    if sum((first is not None, at_random, worst is not None, search is not None)) > 1:
        raise UsageError("--row, --random, --worst and --search exclude each other; choose one")
    wanted: dict[str, Any] = {"kind": "index", "index": first or 0}
    if at_random:
        wanted = {"kind": "random"}
    elif worst:
        wanted = {"kind": "worst", "by": worst}
    elif search is not None:
        wanted = {"kind": "search", "text": search}
    from engine.config.files import load
    from engine.config.reading import read
    from workbench.cli.reading import read_with

    base = file.resolve().parent
    mapping, _ = read_with(load(file), base, overrides)
    for finding in () if as_json else read(mapping).findings:
        if finding.severity == "error":
            click.echo(f"x {visible(finding.message)}", err=True)
    with Inspector() as inspector:
        ticket = inspector.ask(
            "preview",
            on_progress=None if as_json else _progress,
            config=mapping,
            base=str(base),
            rows=wanted,
            count=count,
            split="eval" if held_out else "train",
        )
        try:
            found = ticket.result()
        except KeyboardInterrupt:
            ticket.cancel()
            raise click.Abort from None
    if sys.stderr.isatty() and not as_json:
        click.echo("\r\x1b[2K", nl=False, err=True)
    if as_json:
        click.echo(json.dumps(found))
    else:
        show(found)
        if not found["rows"]:
            click.echo(_none(wanted))
    bad = [row["error"] for row in found["rows"] if row.get("error")]
    if bad and not as_json:
        raise DataError(bad[0])
    return 1 if bad else 0


def _none(wanted: dict[str, Any]) -> str:
    """Why no row is shown, though there are rows."""
    if wanted["kind"] == "search":
        return f"No row holds {visible(wanted['text'])[:80]!r}."
    lacking = {"masked": "Every row has something to learn.", "truncated": "No row is cut."}
    return lacking.get(wanted.get("by", ""), "There are no rows to show.")


def _progress(state: dict[str, Any]) -> None:
    if sys.stderr.isatty():
        total = state.get("total") or 1
        click.echo(f"\r\x1b[2K{state['what']}: {state['done']:,} of {total:,}", nl=False, err=True)


def show(found: dict[str, Any]) -> None:
    """Header with counts, then each row as text with the learned tokens marked."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    total = found.get("total")
    for source in found.get("sources", []):
        rows = f"{source['rows']:,} rows" if source["rows"] is not None else "rows still counted"
        console.print(Text(f"{visible(source['path'])}: {source['why']} ({rows})"))
    template = found.get("template")
    console.print(
        Text(
            f"method {found['method']}; {visible(template) if template else 'no chat template'}; mask {found['fingerprint']}"
        )
    )
    for warning in found.get("warnings", []):
        console.print(Text(f"warning: {visible(warning)}", style="yellow"))
    for row in found["rows"]:
        console.print()
        _show_row(console, row, total)


def _show_row(console: Any, row: dict[str, Any], total: int | None) -> None:
    from rich.text import Text

    tokens = {id(token): token for part in row["parts"].values() for token in part}.values()
    learned = sum(token["trained"] for token in tokens)
    of = f" of {total:,}" if total is not None else ""
    side = row.get("length") or len(tokens)
    longest = f" (longest side {side:,})" if side < len(tokens) else ""
    cut = "; cut to data.max_length" if row["truncated"] else ""
    console.print(
        Text(f"row {row['index']}{of}: {len(tokens):,} tokens{longest}, {learned:,} learned{cut}", style="bold")
    )
    if row.get("left_out"):
        console.print(Text(f"training leaves this row out: {visible(row['left_out'])}", style="yellow"))
    if row.get("error"):
        console.print(Text(visible(row["error"])))
        console.print(Text(visible(row.get("clipped", "")[:2000], lines=True), style="dim"))
    if row.get("documents"):
        apart = "kept apart" if row.get("separate") else "one stream"
        console.print(Text(f"a pack of {len(row['documents'])} rows, {apart}"))
    for name, part in row["parts"].items():
        if len(row["parts"]) > 1:
            console.print(Text(f"{name}:", style="bold"))
        console.print(marked(part, colour=console.is_terminal and not console.no_color))


def marked(part: list[dict[str, Any]], *, colour: bool) -> Any:
    """The text of a part with learned stretches marked."""
    from rich.text import Text

    text, inside = Text(), False
    for token in part:
        if token["trained"] != inside and not colour:
            text.append("›" if inside else "‹")
        inside = token["trained"]
        text.append(visible(token["text"], lines=True), style="green underline" if inside and colour else "")
    if inside and not colour:
        text.append("›")
    return text
