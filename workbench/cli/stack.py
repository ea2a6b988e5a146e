"""`workbench stack RUN`: where its worker is at this moment, also when it hangs."""

from __future__ import annotations

import click

from engine.run import stack, store
from workbench.cli.output import echo, print_json


@click.command(short_help="Show where a run's worker is.")
@click.argument("run")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(run: str, runs: str | None, as_json: bool) -> int:
    """Print the Python stack of every thread of the run's worker. The run goes on."""
    folder = store.find(run, store.runs_dir(runs))
    text = stack.ask(folder)
    if as_json:
        print_json({"id": folder.id, "stack": text})
    else:
        echo(text, lines=True)
    return 0
