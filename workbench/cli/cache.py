"""`workbench cache`: the prepared data on this machine - what they are made of, how much disk they take - and their removal.

What a run or a window uses at the moment is never removed, whichever folder that run is in.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from engine.data.cache_entries import Entry, cache_folder, entries, remove, unused_for
from engine.errors import UsageError, WorkbenchError, nearest, visible
from engine.figures import brief, size
from workbench.cli.output import echo, print_json
from workbench.cli.places import shown

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SHOWN = 12
"""Characters of an id that a list shows; so many, or fewer where they are of one entry alone, name it."""
_folder = click.option("--folder", metavar="DIR", help="The folder that a config names as data.dataset_prepared_path.")
_json = click.option("--json", "as_json", is_flag=True, help="For machines.")


@click.group(invoke_without_command=True, short_help="List, size and prune prepared data.")
@_folder
@_json
@click.pass_context
def command(ctx: click.Context, folder: str | None, as_json: bool) -> int:
    """List what training has prepared and kept, so that the next run starts at once: tokenized rows and shards of streams.

    \b
    workbench cache                         what there is, the one used last first
    workbench cache size                    how much disk it takes
    workbench cache prune --older-than 30d  remove what was not used for so long
    workbench cache prune 3f9a1c            remove one
    """
    ctx.obj = (folder, as_json)
    return _list(folder, as_json) if ctx.invoked_subcommand is None else 0


@command.command("list", short_help="What there is.")
@_folder
@_json
@click.pass_obj
def list_(above: tuple[str | None, bool], folder: str | None, as_json: bool) -> int:
    """List the prepared data, the one used last first."""
    return _list(folder or above[0], as_json or above[1])


def _list(folder: str | None, as_json: bool) -> int:
    place = _place(folder)
    cached = entries(place)
    if as_json:
        total = sum(entry.bytes for entry in cached)
        print_json({"folder": str(place), "bytes": total, "entries": [entry.as_json() for entry in cached]})
        return 0
    if not cached:
        echo(f"No prepared data in {shown(place)}.")
        return 0
    _show(cached)
    echo(_summary(cached, place))
    return 0


@command.command("size", short_help="How much disk it takes.")
@_folder
@_json
@click.pass_obj
def size_(above: tuple[str | None, bool], folder: str | None, as_json: bool) -> int:
    """Say how much disk the prepared data take."""
    place = _place(folder or above[0])
    cached = entries(place)
    if as_json or above[1]:
        print_json({"folder": str(place), "bytes": sum(entry.bytes for entry in cached), "count": len(cached)})
    else:
        echo(_summary(cached, place))
    return 0


@command.command(short_help="Remove some or all.")
@click.argument("ids", nargs=-1, metavar="[ID ...]")
@click.option("--older-than", "age", metavar="TIME", help="What was not used for so long: 30d, 12h, 2w.")
@click.option("--all", "everything", is_flag=True, help="All of it.")
@click.option("--yes", "-y", is_flag=True, help="Without asking.")
@_folder
@_json
@click.pass_obj
def prune(
    above: tuple[str | None, bool],
    ids: tuple[str, ...],
    age: str | None,
    everything: bool,
    yes: bool,
    folder: str | None,
    as_json: bool,
) -> int:
    """Remove prepared data, after asking. What a run uses at the moment stays.

    Nothing is lost but time: what a config needs is prepared again.
    """
    as_json = as_json or above[1]
    if (bool(ids), age is not None, everything).count(True) != 1:
        raise UsageError("prune needs to be told what to remove: ids, --older-than or --all, one of them.")
    seconds = _seconds(age) if age is not None else 0.0
    place = _place(folder or above[0])
    cached = entries(place)
    chosen = _named(cached, ids) if ids else [entry for entry in cached if not age or unused_for(entry, seconds)]
    used = [entry for entry in chosen if entry.in_use]
    if used and ids:
        names = ", ".join(entry.key[:_SHOWN] for entry in used)
        raise WorkbenchError(
            f"{names} {'is' if len(used) == 1 else 'are'} in use; nothing was removed.",
            "Wait until the run that reads it is over, or stop it: `workbench runs` lists them.",
        )
    chosen = [entry for entry in chosen if entry not in used]
    if chosen and not yes:
        _ask(chosen, as_json)
    removed: list[Entry] = []
    for entry in chosen:
        (removed if remove(entry) else used).append(entry)
    freed = sum(entry.bytes for entry in removed)
    if as_json:
        answer = {"removed": [entry.key for entry in removed], "kept": [entry.key for entry in used], "bytes": freed}
        print_json({"folder": str(place), **answer})
        return 0
    for entry in used:
        echo(f"{entry.key[:_SHOWN]} is in use and stays.")
    echo(f"{_many(removed)} removed, {size(freed)} free." if removed else "Nothing was removed.")
    return 0


def _ask(chosen: Sequence[Entry], as_json: bool) -> None:
    """Returns where a person says yes. Raises UsageError where nobody can be asked."""
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            f"nobody can be asked here whether to remove {_many(chosen)}; nothing was removed.", "Give --yes."
        )
    _show(chosen)
    total = size(sum(entry.bytes for entry in chosen))
    if not click.confirm(f"Remove {_many(chosen)} ({total})?", default=False):
        raise click.Abort


def _place(folder: str | None) -> Path:
    """Raises UsageError where a folder that was named is not there."""
    place = cache_folder(folder)
    if folder is not None and not os.path.isdir(place):
        what = "a file" if os.path.exists(place) else "nothing there"
        raise UsageError(
            f"--folder: must be a folder of prepared data; got {what}: {visible(folder)}.", "Check the path."
        )
    return place


def _named(cached: Sequence[Entry], ids: Sequence[str]) -> list[Entry]:
    """The entries that these beginnings of ids name. Raises UsageError for one of none or of several."""
    chosen: dict[str, Entry] = {}
    for id in ids:
        fitting = [entry for entry in cached if id and entry.key.startswith(id)]
        if len(fitting) != 1:
            near = nearest(id, [entry.key[:_SHOWN] for entry in cached])
            reason = "is the beginning of several entries" if fitting else "is no entry"
            way_out = "Give more of it." if fitting else f"Did you mean {near}?" if near else ""
            raise UsageError(
                f"{visible(id)} {reason}; nothing was removed.", way_out or "`workbench cache` lists them."
            )
        chosen[fitting[0].key] = fitting[0]
    return list(chosen.values())


def _seconds(age: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6})([mhdw])", age.strip())
    if match is None:
        raise UsageError(
            f"--older-than: must be a number with m, h, d or w (minutes, hours, days, weeks); got {visible(age)}.",
            "30d is thirty days.",
        )
    return float(match[1]) * _SECONDS[match[2]]


def _show(cached: Sequence[Entry]) -> None:
    """A line for each entry, and below it what it is made of."""
    for entry in cached:
        about = entry.about
        rows = f"{entry.rows or 0:,} {'pack' if about.get('packing') else 'row'}{'' if entry.rows == 1 else 's'}"
        held = {"rows": rows, "stream": "stream", "copy": "copy of a source"}[entry.kind]
        used = "in use" if entry.in_use else f"used {brief(max(time.time() - entry.used, 0.0))} ago"
        echo(f"{entry.key[:_SHOWN]}  {size(entry.bytes):>9}  {held}, {used}")
        if entry.kind == "copy":
            echo(f"  {', '.join(map(str, about.get('sources') or ()))}")
        elif about:
            template = about.get("template") or "no chat template"
            echo(f"  {', '.join(map(str, about.get('sources') or ())) or 'no sources'}")
            split = "held out" if about.get("split") == "eval" else str(about.get("method"))
            echo(f"  {split}; tokenizer {about.get('tokenizer')}; {template}; up to {about.get('max_length')} tokens")


def _summary(cached: Sequence[Entry], place: Path) -> str:
    return f"{_many(cached)}, {size(sum(entry.bytes for entry in cached))} in {shown(place)}"


def _many(cached: Sequence[Entry]) -> str:
    return "1 entry" if len(cached) == 1 else f"{len(cached):,} entries"
