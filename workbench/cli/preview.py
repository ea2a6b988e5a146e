"""`workbench preview FILE [KEY=VALUE ...]`: the batch that training will see, token by token, with what is learned marked.

On a terminal learned tokens are green and underlined (so that colour is never the only sign); in a pipe they stand
between ‹ and ›.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import click

from engine.client import ask_once
from engine.data.gather_facts import outcome
from engine.errors import DataError, UsageError, redact, visible
from engine.figures import size
from engine.run.store import find, runs_dir
from engine.session.rows import image_text, length_text, pack_text, reward_text, tokens_of, why_none
from workbench.cli.output import Styled, clear, coloured, echo, on_stderr, print_json, styled
from workbench.cli.places import PATH, to_write


@click.command(short_help="Show the batch that training will see.")
@click.argument("file", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--rows", "count", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many rows.")
@click.option("--row", "first", type=click.IntRange(0), default=None, help="Begin at this row (from 0).")
@click.option("--random", "at_random", is_flag=True, help="Rows at random.")
@click.option("--worst", type=click.Choice(["longest", "masked", "truncated"]), help="The worst rows by this.")
@click.option("--search", metavar="TEXT", help="Rows that hold this text.")
@click.option("--eval", "held_out", is_flag=True, help="The held-out rows instead of the training rows.")
@click.option(
    "--against", metavar="RUN", help="What differs from the rows that this run was trained on, token by token."
)
@click.option(
    "--export",
    "out",
    metavar="FILE",
    type=PATH,
    help="Write all prepared rows: .jsonl or .parquet.",
)
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
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
    against: str | None,
    out: Path | None,
    runs: str | None,
    as_json: bool,
) -> int:
    """Show the batch that training will see, from the collator that training uses.

    \b
    workbench preview my.yaml
    workbench preview my.yaml data.max_length=512 --worst truncated
    workbench preview my.yaml --against my-0001
    workbench preview my.yaml --export rows.jsonl
    """
    if out is not None and (first is not None or at_random or worst or search is not None or against is not None):
        raise UsageError("--export writes all rows; leave the other choice out")
    if out is not None and out.suffix.lower() not in (".jsonl", ".parquet"):
        raise UsageError(f"--export: must end in .jsonl or .parquet; got {visible(str(out))}")
    wanted = which_rows(first, at_random, worst, search)
    if against is not None and wanted["kind"] != "index":
        raise UsageError("--against shows the rows that differ, or those from --row on; leave the other choice out")
    from engine.rules import read
    from workbench.cli.reading import load_own, read_with

    base = file.resolve().parent
    place = to_write(out, example="rows.jsonl") if out is not None else None
    mapping, _ = read_with(load_own(file), overrides)
    for finding in () if as_json else read(mapping).errors:
        echo(f"x {redact(finding.message)}", err=True, hang=2)
    rows = {"config": mapping, "base": str(base), "split": "eval" if held_out else "train"}
    if place is not None:
        return _export(rows, place, out, as_json)
    if against is not None:
        numbers = list(range(first, first + count)) if first is not None else None
        folder = find(against, runs_dir(runs))
        answer = _answer("against", as_json, run=str(folder.path), numbers=numbers, count=count, **rows)
        print_json(answer) if as_json else show_difference(answer)
        return 0
    answer = _answer("preview", as_json, rows=wanted, count=count, **rows)
    if as_json:
        print_json(answer)
    else:
        show(answer)
        if not answer["rows"]:
            echo(why_none(wanted))
    bad = [row["error"] for row in answer["rows"] if row.get("error")]
    if bad and not as_json:
        raise DataError(bad[0])
    return 1 if bad else 0


def which_rows(first: int | None, at_random: bool, worst: str | None, search: str | None) -> dict[str, Any]:
    """Which rows to show, as the inspector is asked for them. Raises UsageError for more than one choice."""
    if sum((first is not None, at_random, worst is not None, search is not None)) > 1:
        raise UsageError("--row, --random, --worst and --search exclude each other; choose one")
    if at_random:
        return {"kind": "random"}
    if worst:
        return {"kind": "worst", "by": worst}
    return {"kind": "search", "text": search} if search is not None else {"kind": "index", "index": first or 0}


def _export(rows: dict[str, Any], place: Path, out: Path | None, as_json: bool) -> int:
    """Write all prepared rows to a file."""
    if rows["split"] == "train" and (rows["config"].get("data") or {}).get("streaming") is True:
        raise UsageError("--export: the rows are streamed.", "Add data.streaming=false.")
    written = _answer("export_rows", as_json, place=str(place), **rows)
    if as_json:
        print_json(written)
        return 0
    for warning in written["warnings"]:
        echo(styled(f"warning: {redact(warning)}", fg="yellow"))
    echo(f"{out}: {written['rows']:,} rows of {', '.join(written['columns'])}, {size(written['bytes'])}")
    return 0


def _answer(question: str, as_json: bool, **params: Any) -> dict[str, Any]:
    """The inspector's answer; its progress is shown meanwhile where a person looks."""
    answer: dict[str, Any] = ask_once(question, on_progress=None if as_json else on_stderr, **params)
    if not as_json:
        clear()
    return answer


def show(answer: dict[str, Any]) -> None:
    """Header with counts, then each row as text with the learned tokens marked."""
    total = answer.get("total")
    for source in answer.get("sources", []):
        rows = (
            f"{source['rows']:,} row{'' if source['rows'] == 1 else 's'}"
            if source["rows"] is not None
            else "rows still counted"
        )
        template = f"; template {redact(source['template'])}" if source.get("template") else ""
        echo(f"{redact(source['path'])}: {source['why']} ({rows}){template}")
    echo(f"method {answer['method']}; {answer.get('template') or 'no chat template'}; mask {answer['fingerprint']}")
    for warning in answer.get("warnings", []):
        echo(styled(f"warning: {redact(warning)}", fg="yellow"))
    for row in answer["rows"]:
        echo()
        _show_row(row, total)


def _show_row(row: dict[str, Any], total: int | None) -> None:
    learned = sum(token["trained"] for token in tokens_of(row))
    of = f" of {total:,}" if total is not None else ""
    cut = "; cut to data.max_length" if row["truncated"] else ""
    echo(styled(f"row {row['index']}{of}: {length_text(row)}, {learned:,} learned{cut}", bold=True))
    if words := outcome(row):
        echo(styled(words, fg="yellow"))
    if row.get("error"):
        echo(redact(row["error"]))
        echo(styled(row.get("clipped", "")[:2000], dim=True), lines=True)
    if words := pack_text(row):
        echo(words)
    for image in row["images"]:
        echo(f"image {redact(image_text(image))}")
    for name, part in row["parts"].items():
        if len(row["parts"]) > 1:
            echo(styled(f"{name}:", bold=True))
        echo(*marked(part, colour=coloured()), lines=True)
    for words in reward_text(row):
        echo(f"given to rewards: {redact(words)}")


_CHANGED_LOOK: dict[str, dict[str, Any]] = {
    "same": {},
    "removed": {"fg": "red", "strikethrough": True},
    "added": {"fg": "green", "underline": True},
}
_AROUND = {"same": ("", ""), "removed": ("[-", "-]"), "added": ("{+", "+}")}
_TOKENS_LISTED = 40


def show_difference(answer: dict[str, Any]) -> None:
    """What differs from a run in one sentence a split, then each row with what went [-away-] and {+came+}."""
    for name, split in answer["splits"].items():
        same = f"data.{name}: all {split['now']:,} rows are those that {answer['run']} was trained on"
        echo(f"{same if split['same'] else split['sentence']}.")
    for row in answer["rows"]:
        echo("")
        echo(styled(f"row {row['index']}", bold=True))
        if not row["known"]:
            echo(styled("how it was is not kept any more; this is how it is now", fg="yellow"))
        for name, (old, new) in row["values"].items():
            echo(f"{name}: {old} became {new}")
        for name, part in row["parts"].items():
            if len(row["parts"]) > 1:
                echo(styled(f"{name}:", bold=True))
            echo(*changed(part, colour=coloured()), lines=True)
            listed = [(place, token) for place, token in enumerate(part) if token["op"] != "same"]
            for place, token in listed[:_TOKENS_LISTED]:
                sign = "-" if token["op"] == "removed" else "+"
                learned = "learned" if token["trained"] else "not learned"
                echo(styled(f"  {sign} {place:>5}  {token['id']:>7}  {token['text']!r}  {learned}", dim=True))
            if len(listed) > _TOKENS_LISTED:
                echo(styled(f"  and {len(listed) - _TOKENS_LISTED:,} more tokens; --json has all", dim=True))


def changed(part: list[dict[str, Any]], *, colour: bool) -> list[Styled]:
    """The text of a part in stretches, what was removed and added marked; without colour by [- -] and {+ +}."""
    pieces: list[Styled] = []
    for op, tokens in groupby(part, key=lambda token: str(token["op"])):
        text = "".join(token["text"] for token in tokens)
        before, after = ("", "") if colour else _AROUND[op]
        pieces.append(styled(f"{before}{text}{after}", **_CHANGED_LOOK[op]))
    return pieces


def marked(part: list[dict[str, Any]], *, colour: bool) -> list[Styled]:
    """The text of a part in stretches, the learned ones marked."""
    parts: list[Styled] = []
    for learned, tokens in groupby(part, key=lambda token: bool(token["trained"])):
        text = "".join(token["text"] for token in tokens)
        if learned and colour:
            parts.append(styled(text, fg="green", underline=True))
        else:
            parts.append(styled(f"‹{text}›" if learned else text))
    return parts
