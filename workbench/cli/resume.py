"""`workbench resume RUN`: go on in the same folder, from its newest whole checkpoint."""

from __future__ import annotations

import click

from engine.config.files import parse_pair
from engine.errors import WorkbenchError
from engine.resume import resume
from engine.run import checkpoint, launch, store
from engine.run.store import RunFolder
from workbench.cli.output import echo
from workbench.cli.train import attach


@click.command(short_help="Go on from the newest whole checkpoint.")
@click.argument("run")
@click.option("--detach", is_flag=True, help="Return once training has begun; the run goes on.")
@click.option(
    "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Another value for a setting of its config.yaml."
)
@click.option("--changed", is_flag=True, help="Go on although config.yaml was changed since the run began.")
@click.option("--accept-data", is_flag=True, help="Go on although the rows are not those the run was trained on.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    run: str, detach: bool, pairs: tuple[str, ...], changed: bool, accept_data: bool, runs: str | None, as_json: bool
) -> int:
    """Go on with a run that was stopped, failed or was lost. Says which checkpoints it skips and why.

    \b
    workbench resume my-0001
    workbench resume my-0001 --set optim.num_train_epochs=4

    A finished run trains on where a setting makes it longer.

    Settings and rows are compared first: a changed config.yaml is shown and needs --changed, rows that teach otherwise are
    named and need --accept-data.
    """
    folder = store.find(run, store.runs_dir(runs))
    launch.attend(folder)
    launch.settle(folder)
    differences = launch.changed_settings(folder)
    for line in differences:
        echo(f"changed: {line}", err=True)
    if differences and not changed:
        raise WorkbenchError(
            f"{folder.id}: config.yaml was changed since the run began.", "Put it back, or go on with --changed."
        )
    settings = dict(map(parse_pair, pairs))
    if folder.state != "finished" or differences or settings:
        _say_versions(folder)
    newest, skipped = resume(folder, settings=settings, accept_data=accept_data)
    for path, reason in skipped:
        echo(f"skipped {path.name}: {reason}", err=True)
    place = f"step {checkpoint.step_of(newest)} ({newest.name})" if newest else "the beginning: no checkpoint is whole"
    echo(f"{folder.id} goes on from {place}", err=True)
    return attach(folder, detach=detach, as_json=as_json)


def _say_versions(folder: RunFolder) -> None:
    """Other versions can mean other numbers: they are said, and stop nothing."""
    before = folder.read_json().get("versions")
    now = launch.versions()
    if isinstance(before, dict):
        for package, version in sorted(before.items()):
            if now.get(package) != version:
                echo(f"note: {package} was {version}, is {now.get(package)}", err=True)
