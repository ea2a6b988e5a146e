"""`workbench prune RUN`: removes checkpoints of a run that has ended; shows what would go until it is told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from engine.errors import visible
from engine.figures import size
from engine.run import checkpoint, store
from engine.run.curves import titled, worded
from engine.run.index import open_view
from engine.run.pruning import carry_out, plan
from engine.run.view import RunView
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
    with open_view(run) as watch:
        watch.read_completely()
        view = watch.view.copy()
    best = view.best["step"] if view.best else None
    pruning = plan(run, keep, best)
    stay = [_entry(path, view, best) for path in pruning.stay]
    go = [_entry(path, view, best) for path in pruning.go]
    freed = sum(entry["bytes"] for entry in go)
    if yes and go:
        carry_out(run, pruning)
    if as_json:
        print_json({"ok": True, "run": run.id, "dry_run": not yes, "kept": stay, "removed": go, "bytes": freed})
        return 0
    metric = view.best["metric"] if view.best else "eval_loss"
    for sign, entries in (("stays", stay), ("goes" if not yes else "gone", go)):
        for entry in entries:
            echo(f"{sign:<5}  {_line(entry, metric)}")
            for asked in entry["answers"][:PROMPTS]:
                said = visible(asked["text"]) if asked["text"].strip() else "no words"
                echo(f"         {visible(asked['prompt'])[:60]} → {said[:80]}")
    if not go:
        echo("Nothing goes: those that stay are all there are.")
    elif yes:
        echo(f"{_many(go)} removed, {size(freed)} free.")
    else:
        echo(f"Nothing was removed. `workbench prune {run_name(run)} --keep {keep} --yes` frees {size(freed)}.")
    return 0


def _entry(path: Path, view: RunView, best: int | None) -> dict[str, Any]:
    step = checkpoint.step_of(path) or 0
    measured = None
    if (curve := view.series.get(view.best["metric"] if view.best else "eval_loss")) is not None:
        _, low, _ = curve.points(step, step)
        measured = low[-1] if len(low) else None
    problem = checkpoint.problem_with(path)
    return {
        "step": step,
        "bytes": checkpoint.size_of(path),
        "best": step == best,
        "held_out": measured,
        "answers": _answers(view, step),
        "problem": problem,
    }


def _answers(view: RunView, step: int) -> list[dict[str, Any]]:
    """The newest answer to each pinned prompt that the model gave with these weights or the last ones asked before them."""
    newest = {each["prompt"]: each for each in view.samples if each["step"] <= step}
    return [{"prompt": prompt, "step": each["step"], "text": each["completion"]} for prompt, each in newest.items()]


def _line(entry: dict[str, Any], metric: str) -> str:
    held_out = f"{titled(metric)} {worded(metric, entry['held_out'])}" if entry["held_out"] is not None else ""
    best = "the best" if entry["best"] else ""
    reasons = [held_out, best, f"not whole: {entry['problem']}" if entry["problem"] else ""]
    return "  ".join(
        [f"checkpoint-{entry['step']}", f"{size(entry['bytes']):>9}", ", ".join(filter(None, reasons))]
    ).rstrip()


def _many(entries: list[dict[str, Any]]) -> str:
    return f"{len(entries):,} checkpoint{'' if len(entries) == 1 else 's'}"
