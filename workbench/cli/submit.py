"""`workbench submit FILE --to slurm`: a run as a job of a cluster, watched and stopped as any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.errors import UsageError, visible
from engine.run import slurm
from engine.run.index import peek
from engine.run.store import slug
from workbench.calling import run_name
from workbench.cli.following import summary
from workbench.cli.output import echo, print_json

if TYPE_CHECKING:
    from engine.config.facts import Facts
    from engine.config.reading import Reading

_NAMED = ("time", "partition", "account", "qos", "gres", "mem", "cpus-per-task")


@click.command(short_help="Hand a run over to a cluster.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--to", "to", type=click.Choice([slurm.NAME]), default=slurm.NAME, help="The cluster's scheduler.")
@click.option("--time", "time", metavar="TIME", help="The job's time limit, as sbatch takes it: 4:00:00.")
@click.option("--partition", metavar="NAME", help="The partition.")
@click.option("--account", metavar="NAME", help="The account that is charged.")
@click.option("--qos", metavar="NAME", help="The quality of service.")
@click.option("--gres", metavar="LIST", help="Generic resources, such as gpu:2: as many GPUs as run.devices says.")
@click.option("--mem", metavar="SIZE", help="The machine's memory, such as 64G.")
@click.option("--cpus-per-task", metavar="N", help="CPU cores.")
@click.option("--sbatch", "more", multiple=True, metavar="OPTION", help="Any other option of sbatch; may be repeated.")
@click.option("--nodes", type=click.IntRange(1, 1024), metavar="N", help="Machines; sets distributed.nodes.")
@click.option("--for", "machine", metavar="MACHINE", help="Check it for the cluster's machine, such as 2xH100-80GB.")
@click.option("--dry-run", is_flag=True, help="Print the script; nothing is made or submitted.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs, shared with the cluster's machines.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    file: Path,
    overrides: tuple[str, ...],
    to: str,
    more: tuple[str, ...],
    nodes: int | None,
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

    Before the time limit the run saves, its job is queued again, and it goes on from there; so it does after a preemption.
    What is `auto` is chosen on the node that the job gets. `runs`, `watch`, `stop` and `resume` work from here.
    """
    options = _options(named, more)

    from engine.planning.estimate import estimate
    from engine.run.from_config import launch_config, runs_dir_of
    from engine.session.paragraph import paragraph
    from workbench.cli.reading import forecast_bytes

    several = () if nodes is None else (f"distributed.nodes={nodes}",)
    reading, facts = _checked(file, (*overrides, *several), machine)
    config, place = reading.config, runs_dir_of(reading.config, reading.given, runs)
    if dry_run:
        name = f"{slug(config.run.name or file.stem)}-NNNN"
        text = slurm.script(place / name, name, options, config.run.grace_seconds, config.distributed.nodes)
        print_json({"dry_run": True, "script": text}) if as_json else echo(text.rstrip("\n"), lines=True)
        return 0
    slurm.require_scheduler()
    echo(paragraph(config, facts, estimate(config, facts), place), err=True)
    run = launch_config(
        config,
        facts,
        runs_dir=place,
        name=file.stem,
        forecast_bytes=forecast_bytes(config, facts),
        source=file,
        job=options,
    )
    job = slurm.number(run)
    slurm.refresh(run)
    if as_json:
        made = {"dry_run": False, "path": str(run.path), "job": job, "script": str(run.path / slurm.SCRIPT)}
        print_json(summary(peek(run)) | made)
        return 0
    echo(f"{run.id} in {run.path}", err=True)
    name = run_name(run)
    echo(
        f"job {job} of SLURM: {run.id}. `workbench watch {name}` shows it, `workbench stop {name}` stops it.", err=True
    )
    return 0


def _checked(file: Path, overrides: tuple[str, ...], machine: str | None) -> tuple[Reading, Facts]:
    """The config as it was read, and the facts that it was judged by. Raises UsageError where the rules refuse it."""
    from engine.config.files import load
    from engine.data.gather_facts import look_at
    from engine.hardware import parse_machine
    from engine.rules import read
    from workbench.cli.findings import require_no_errors
    from workbench.cli.reading import with_overrides

    complete = with_overrides(load(file).mapping, file.resolve().parent, overrides)
    target = parse_machine(machine) if machine else None
    facts = look_at(read(complete).config, machine=target)
    if target is None:
        # This machine's hardware says nothing about the cluster's.
        facts = replace(facts, machine=None)
    reading = read(complete, facts)
    require_no_errors(reading.findings, str(file), "no run was submitted")
    return reading, facts


def _options(named: Mapping[str, str | None], more: tuple[str, ...]) -> tuple[str, ...]:
    """What sbatch is called with. Raises UsageError for what it could not take."""
    chosen = {name: value for name in _NAMED if (value := named[name.replace("-", "_")]) is not None}
    for name, value in chosen.items():
        if not (value and value.isprintable() and " " not in value):
            raise UsageError(f"--{name}: must be one word; got {visible(value)!r}.")
    slurm.require_options(more)
    return (*(f"--{name}={value}" for name, value in chosen.items()), *more)
