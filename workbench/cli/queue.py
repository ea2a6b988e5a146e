"""`workbench queue`: the runs that wait, in their order; with a run, another place for it."""

from __future__ import annotations

import click

from engine.errors import UsageError, visible
from engine.run import launch, store
from engine.run.queue import move, queue_of, waiting_for
from engine.run.store import RunFolder
from workbench.cli.output import echo, print_json
from workbench.cli.places import runs_folder, shown


@click.command(short_help="Show the runs that wait, and change their order.")
@click.argument("run", required=False)
@click.option("--first", is_flag=True, help="This run is the next to begin.")
@click.option("--last", is_flag=True, help="This run comes after all others.")
@click.option("--place", type=click.IntRange(1), metavar="N", help="This run comes in place N, counted from 1.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(run: str | None, first: bool, last: bool, place: int | None, runs: str | None, as_json: bool) -> int:
    """List the queued runs of a folder, the next one first, with what each waits for; or give RUN another place.

    \b
    workbench train my.yaml --queue --detach
    workbench queue
    workbench queue my-0002 --first
    workbench stop my-0002
    """
    chosen = first + last + (place is not None)
    if chosen > 1:
        raise UsageError("--first, --last and --place exclude each other; choose one.")
    if (run is None) != (chosen == 0):
        missing = "a run" if run is None else "--first, --last or --place N"
        raise UsageError(f"queue: {missing} is missing; a run and its new place go together.")
    root = runs_folder(runs)
    if run is not None:
        folder = store.find(run, root)
        root = folder.path.parent
        move(folder, 0 if first else 1 << 30 if last else (place or 1) - 1)
    waiting = queue_of(root)
    problems = {queued.id: launch.attend_or_report(queued) for queued in waiting}
    listed = [
        _entry(number, queued, problems[queued.id] or words)
        for number, (queued, words) in enumerate(zip(waiting, waiting_for(waiting), strict=True), 1)
    ]
    if as_json:
        print_json(listed)
    elif not listed:
        echo(f"No run waits in {shown(root)}.")
    for entry in listed if not as_json else ():
        echo(f"{entry['place']:>3}  {visible(str(entry['id']))}  {visible(str(entry['waits_for']))}".rstrip())
    return 0


def _entry(number: int, run: RunFolder, waits_for: str) -> dict[str, object]:
    after = run.read_json().get("after")
    return {
        "place": number,
        "id": run.id,
        "waits_for": waits_for,
        "after": RunFolder(after).id if isinstance(after, str) else None,
    }
