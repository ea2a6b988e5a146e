"""`workbench prune RUN`: removes checkpoints of a run that has ended; shows what would go until it is told to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from engine.errors import visible
from engine.figures import size
from engine.run import store
from engine.run.pruning_choice import Kept, choose, remove
from workbench.calling import run_name
from workbench.cli.output import echo, print_json

PROMPTS = 2
"""Pinned prompts that are shown; `--json` has all of them."""


@click.command(short_help="Remove checkpoints, never the newest or the best.")
@click.argument("name", metavar="RUN")
@click.option(
    "--keep", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="So many of the newest stay."
)
@click.option("--yes", is_flag=True, help="Remove them; else they are only shown.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(name: str, keep: int, yes: bool, runs: str | None, as_json: bool) -> int:
    """Show which checkpoints would go, with what was measured on held-out rows and the answers to pinned prompts; with
    --yes remove them.

    The newest whole checkpoint stays, and so does the best one by held-out rows. One that is not whole goes.

    \b
    workbench prune my-0001
    workbench prune my-0001 --keep 3 --yes
    """
    run = store.find(name, store.runs_dir(runs))
    choice = choose(run, keep)
    if yes and choice.go:
        choice = remove(run, keep, {each.step for each in choice.go})
    if as_json:
        kept, removed = ([_entry(each) for each in part] for part in (choice.stay, choice.go))
        told = {"ok": True, "run": run.id, "dry_run": not yes, "kept": kept, "removed": removed, "bytes": choice.bytes}
        print_json(told)
        return 0
    for sign, entries in (("stays", choice.stay), ("goes" if not yes else "gone", choice.go)):
        for entry in entries:
            echo(f"{sign:<5}  {entry.name}  {size(entry.bytes):>9}  {entry.summary()}".rstrip())
            for asked in entry.answers[:PROMPTS]:
                said = visible(asked["text"]) if asked["text"].strip() else "no words"
                echo(f"         {visible(asked['prompt'])[:60]} → {said[:80]}")
    if not choice.go:
        echo("Nothing goes: those that stay are all there are.")
    elif yes:
        echo(choice.removed())
    else:
        command_line = f"workbench prune {run_name(run)} --keep {keep} --yes"
        echo(f"Nothing was removed. `{command_line}` frees {size(choice.bytes)}.")
    return 0


def _entry(kept: Kept) -> dict[str, Any]:
    return {name: value for name, value in asdict(kept).items() if name != "metric"}
