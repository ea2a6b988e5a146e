"""`workbench watch RUN`: follow a run in plain text. Leaving never touches it."""

from __future__ import annotations

import json

import click

from engine.run import launch, store
from engine.run.index import open_view
from workbench.cli.following import Follower, exit_code, report, summary


@click.command(short_help="Watch a run.")
@click.argument("run")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print all that is known now as JSON, and return.")
def command(run: str, runs: str | None, as_json: bool) -> int:
    """Follow a run until it ends. Ctrl-C leaves it running."""
    folder = store.find(run, store.runs_dir(runs))
    if launch.unattended(folder):
        launch.attend(folder)
    with open_view(folder) as watch:
        if as_json:
            click.echo(json.dumps(summary(watch) | watch.view.as_json(points=200)))
            return 0
        try:
            view = Follower(watch).until(lambda view: False)
        except KeyboardInterrupt:
            click.echo(f"\n{folder.id} goes on. `workbench watch {folder.id}` comes back to it.", err=True)
            return 0
        report(view)
        return exit_code(view)
