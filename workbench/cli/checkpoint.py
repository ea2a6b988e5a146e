"""`workbench checkpoint RUN`: save one now and go on."""

from __future__ import annotations

import click

from engine import figures
from engine.errors import WorkbenchError
from engine.run import checkpoint, store
from workbench.cli.asking import ask
from workbench.cli.output import echo, print_json


@click.command(short_help="Ask a run for a checkpoint.")
@click.argument("run")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(run: str, runs: str | None, as_json: bool) -> int:
    """Ask a run for a checkpoint and wait until it is whole; the run goes on."""
    folder = store.find(run, store.runs_dir(runs))
    grace = folder.read_json().get("grace_seconds")
    ask(folder, "checkpoint", patience=10.0 * (grace if isinstance(grace, (int, float)) else 60))
    newest, skipped = checkpoint.newest_valid(folder, hashes=False)
    if newest is None:
        raise WorkbenchError(f"{folder.id}: no whole checkpoint is there ({len(skipped)} damaged).")
    size = checkpoint.size_of(newest)
    if as_json:
        print_json({"id": folder.id, "step": checkpoint.step_of(newest), "path": str(newest), "bytes": size})
    else:
        echo(f"{newest} ({figures.size(size)})")
    return 0
