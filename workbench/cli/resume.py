"""`workbench resume RUN`: go on in the same folder, from its newest whole checkpoint."""

from __future__ import annotations

import os

import click

from engine.errors import UsageError, WorkbenchError
from engine.run import launch, member, store
from engine.run.ending import end_of
from engine.run.index import open_view, peek
from engine.run.nodes import from_slurm, rendezvous_of, require_place
from engine.run.store import RunFolder
from workbench.calling import run_name
from workbench.cli.going_on import go_on, report_versions
from workbench.cli.output import echo
from workbench.cli.reading import placed_override
from workbench.cli.train import attach, hold_container, meeting_of, meets


@click.command(short_help="Go on from the newest whole checkpoint.")
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--detach", is_flag=True, help="Return once training has begun; the run goes on.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="The same as KEY=VALUE alone.")
@click.option("--fix", "mend", is_flag=True, help="Make the change that a failed run proposes, and go on with it.")
@click.option("--changed", is_flag=True, help="Go on although config.yaml was changed since the run began.")
@click.option("--accept-data", is_flag=True, help="Go on although the rows are not those the run was trained on.")
@meets
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    run: str,
    overrides: tuple[str, ...],
    detach: bool,
    pairs: tuple[str, ...],
    mend: bool,
    changed: bool,
    accept_data: bool,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    rdzv_id: str | None,
    rdzv_timeout: float | None,
    runs: str | None,
    as_json: bool,
) -> int:
    """Go on with a run that was stopped, failed or was lost. Says which checkpoints it skips and why.

    \b
    workbench resume my-0001
    workbench resume my-0001 optim.num_train_epochs=4

    KEY=VALUE is another value for a setting of its config.yaml; a finished run trains on where one makes it longer, and what would
    make another model of it is refused. With --fix
    the change that a failed run proposes is made: it goes on from its last good checkpoint where the change allows that, else
    a new run starts that says where it comes from.

    Settings and rows are compared first: a changed config.yaml is shown and needs --changed, rows that teach otherwise are
    named and need --accept-data.

    A run on several machines is resumed on each of them, with its --node-rank; an address that is given on the first takes the
    place of the one before.
    """
    hold_container(detach=detach)
    folder = store.find(run, store.runs_dir(runs))
    several = rendezvous_of(folder).nodes
    step = from_slurm(os.environ) if several > 1 else None
    rank = step[0] if node_rank is None and step is not None else node_rank
    if rank:
        require_place(rendezvous_of(folder), rank, os.environ)
        member.join(folder, rank, wait=True)
        return attach(folder, detach=detach, as_json=as_json)
    _, meeting = meeting_of(node_rank, rdzv_endpoint, rdzv_id, rdzv_timeout, several)
    launch.attend(folder)
    launch.settle(folder)
    differences = _changes(folder, changed)
    settings = dict(map(placed_override, (*overrides, *pairs)))
    if mend:
        if settings:
            raise UsageError(
                "--fix: must be left out beside KEY=VALUE and --set.", "The one proposes what the other says."
            )
        return attach(_mended(folder, accept_data), detach=detach, as_json=as_json)
    if folder.state != "finished" or differences or settings:
        report_versions(folder)
    before = peek(folder).view.segment
    go_on(folder, meeting, settings=settings, accept_data=accept_data)
    return attach(folder, detach=detach, as_json=as_json, after=before)


def _changes(folder: RunFolder, accepted: bool) -> list[str]:
    """What was changed in the run's config since it began, shown. Raises WorkbenchError unless that is accepted."""
    differences = launch.changed_settings(folder)
    for line in differences:
        echo(f"changed: {line}", err=True)
    if differences and not accepted:
        raise WorkbenchError(
            f"{folder.id}: config.yaml was changed since the run began.", "Put it back, or go on with --changed."
        )
    return differences


def _mended(folder: RunFolder, accept_data: bool) -> RunFolder:
    """The run that works after the proposed change. Raises WorkbenchError where a run has not failed, or proposes none."""
    from engine.session.apply_proposal import apply

    with open_view(folder) as watch:
        watch.read_completely()
        view = watch.view
    end = end_of(view, folder, run_name(folder))
    if view.state not in ("failed", "lost"):
        raise WorkbenchError(f"{folder.id} is {view.state}; only a run that has failed proposes a change.")
    new = apply(folder, view, end, accept_data=accept_data)
    assert end.change is not None
    where = f"{new.id} starts from the beginning" if end.anew else f"{folder.id} goes on from checkpoint-{end.step}"
    echo(f"{where} with {end.change.summary}", err=True)
    return new
