"""`workbench watch RUN`: follow a run in plain text. Leaving never touches it."""

from __future__ import annotations

import click

from engine.run import launch, store
from engine.run.index import open_view
from workbench.calling import run_name
from workbench.cli.following import Follower, exit_code, report, summary
from workbench.cli.output import echo, print_json


@click.command(short_help="Watch a run.")
@click.argument("run")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print all that is known now as JSON, and return.")
def command(run: str, runs: str | None, as_json: bool) -> int:
    """Follow a run until it ends. Ctrl-C leaves it running."""
    folder = store.find(run, store.runs_dir(runs))
    problem = launch.attend_or_report(folder)
    if problem:
        echo(problem, err=True)
    with open_view(folder, problem=problem) as watch:
        if as_json:
            print_json(summary(watch) | watch.view.as_json(points=200))
            return 0
        try:
            view = Follower(watch).until(lambda view: False)
        except KeyboardInterrupt:
            echo(err=True)
            echo(f"{folder.id} goes on. `workbench watch {run_name(folder)}` comes back to it.", err=True)
            return 0
        report(watch)
        return exit_code(view)
