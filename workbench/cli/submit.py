"""`workbench submit FILE ... --to slurm`: runs as jobs of a cluster, watched and stopped as any other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from engine.errors import UsageError, visible
from engine.run import array, slurm
from engine.run.index import peek
from engine.run.store import slug
from engine.run.sweep import new_id
from workbench.calling import run_name
from workbench.cli.clusters import at_a_time, checked, cluster_options, hand_over, job_of, show_script, tasks_of
from workbench.cli.following import summary
from workbench.cli.output import echo, print_json
from workbench.cli.places import PATH, shown


@click.command(short_help="Hand runs over to a cluster.")
@click.argument("file", type=PATH)
@click.argument("words", nargs=-1, metavar="[FILE ...] [KEY=VALUE ...]")
@click.option("--to", "to", type=click.Choice([slurm.NAME]), default=slurm.NAME, help="The cluster's scheduler.")
@cluster_options
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs, shared with the cluster's machines.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    file: Path,
    words: tuple[str, ...],
    to: str,
    more: tuple[str, ...],
    nodes: int | None,
    array_limit: int | None,
    machine: str | None,
    dry_run: bool,
    runs: str | None,
    as_json: bool,
    **named: str | None,
) -> int:
    """Check the config FILE, make its run's folder with a script for sbatch, and submit that.

    \b
    workbench submit my.yaml --to slurm --time 4:00:00 --gres gpu:1
    workbench submit my.yaml --to slurm --nodes 2 --gres gpu:8 run.devices=8
    workbench submit my.yaml --to slurm --sbatch=--constraint=a100 --dry-run
    workbench submit a.yaml b.yaml c.yaml --to slurm --array-limit 2

    Several files become one array: a run each, all checked before, and all of them or none submitted.

    Before the time limit the run saves, its job is queued again, and it goes on from there; so it does after a preemption.
    What is `auto` is chosen on the node that the job gets. `runs`, `watch`, `stop` and `resume` work from here.
    """
    job = job_of(named, more)
    files, overrides = _split_arguments(file, words)
    if nodes is not None:
        overrides = (*overrides, f"distributed.nodes={nodes}")
    if len(files) > 1:
        return _array(files, overrides, job, array_limit, machine, runs, dry_run=dry_run, as_json=as_json)
    if array_limit is not None:
        raise UsageError("--array-limit: needs several configs; got one.", "Name more files, or leave it out.")
    return _one(file, overrides, job, machine, runs, dry_run=dry_run, as_json=as_json)


def _split_arguments(file: Path, words: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """The config files, and the settings that hold for all of them. Raises UsageError for what is neither."""
    files = [file]
    for word in words:
        if "=" in word:
            continue
        if not os.path.exists(word):
            raise UsageError(
                f"{visible(word)}: must be a config file, or KEY=VALUE; got nothing there.",
                "Leave it out, or mend the name.",
            )
        files.append(Path(word))
    return files, tuple(word for word in words if "=" in word)


def _one(
    file: Path, overrides: tuple[str, ...], job: slurm.Job, machine: str | None, runs: str | None,
    *, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    from engine.planning.estimate import estimate
    from engine.run.from_config import launch_config, runs_dir_of
    from engine.session.paragraph import paragraph

    reading, facts = checked(file, overrides, machine, str(file))
    config, place = reading.config, runs_dir_of(reading.config, reading.given, runs)
    if dry_run:
        name = f"{slug(config.run.name or file.stem)}-NNNN"
        text = slurm.script(place / name, name, job.options, config.run.grace_seconds, config.distributed.nodes)
        return show_script(text, as_json=as_json)
    slurm.require_scheduler()
    estimated = estimate(config, facts)
    echo(paragraph(config, facts, estimated, place), err=True, hang=0)
    run = launch_config(
        config,
        facts,
        runs_dir=place,
        name=file.stem,
        forecast_bytes=estimated.checkpoints_bytes,
        source=file,
        job=job,
    )
    number = slurm.number(run)
    slurm.refresh(run)
    if as_json:
        made = {"dry_run": False, "path": str(run.path), "job": number, "script": str(run.path / slurm.SCRIPT)}
        print_json(summary(peek(run)) | made)
        return 0
    echo(f"{run.id} in {shown(run.path)}", err=True)
    name = run_name(run)
    echo(
        f"job {number} of SLURM: {run.id}. `workbench watch {name}` shows it, `workbench stop {name}` stops it.",
        err=True,
    )
    return 0


def _array(
    files: Sequence[Path], overrides: tuple[str, ...], job: slurm.Job, limit: int | None, machine: str | None,
    runs: str | None, *, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    asked = [(file, overrides, visible(str(file)), visible(str(file))) for file in files]
    tasks = tasks_of(asked, machine, runs)
    if dry_run:
        return show_script(array.script(tasks, f"{tasks[0].name}-array", job, limit), as_json=as_json)
    name = new_id(f"{tasks[0].name}")
    made, number = hand_over(tasks, name, job, limit)
    if as_json:
        rows = [summary(peek(run)) | {"path": str(run.path), "job": slurm.number(run)} for run in made]
        script = str(made[0].path / slurm.ARRAY_SCRIPT)
        print_json({"dry_run": False, "job": number, "script": script, "runs": rows})
        return 0
    echo(f"job {number} of SLURM, an array of {len(made)} runs{at_a_time(limit)}:", err=True)
    for run in made:
        echo(f"  {slurm.number(run)}  {run.id} in {shown(run.path)}", err=True)
    echo("`workbench runs` shows them; each is watched, stopped and resumed by its own name.", err=True)
    return 0
