"""`workbench sweep FILE KEY=V1,V2 ...`: a queued run for each combination of values, and one table of what they reached."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import UsageError, WorkbenchError, visible
from engine.figures import count, number
from engine.run import array, control, launch, slurm, store
from engine.run.best import metric_of
from engine.run.curves import format_metric, titled
from engine.run.stop_requests import DEFAULT_GRACE
from engine.run.store import ENDED, RunFolder
from engine.run.sweep import NOISE, PICTURED, SANE, Axes, axes, new_id, results, runs_of
from workbench.calling import run_name
from workbench.cli.clusters import at_a_time, cluster_options, hand_over, job_of, require_room, show_script, tasks_of
from workbench.cli.following import reap, state_text
from workbench.cli.output import clear, columns, echo, print_json, rewrite
from workbench.cli.train import hold_container
from workbench.panels.run_table import SPARK

if TYPE_CHECKING:
    from engine.config.tree import RunConfig

LOOK_SECONDS = 0.5
COMPARED = 4


@click.command(short_help="Runs for several values of settings, in one table.")
@click.argument("file", metavar="FILE|SWEEP")
@click.argument("pairs", nargs=-1, metavar="[KEY=VALUE,VALUE ...]")
@click.option("--yes", is_flag=True, help=f"Start more than {SANE} runs.")
@click.option("--detach", is_flag=True, help="Return once all runs are queued; they go on.")
@click.option("--to", "to", type=click.Choice([slurm.NAME]), help="Hand them over to a cluster, as one array.")
@cluster_options
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(
    file: str,
    pairs: tuple[str, ...],
    yes: bool,
    detach: bool,
    to: str | None,
    runs: str | None,
    as_json: bool,
    **cluster: Any,
) -> int:
    """Queue a run of the config FILE for each combination of values, wait for them, and say which is the best.

    Every combination is checked before the first one starts. Ctrl-C leaves all of them going. With the name of a sweep
    and nothing else the table is shown again. With --to slurm and the options of `workbench submit` the runs become one
    array of the cluster.

    \b
    workbench sweep my.yaml optim.learning_rate=1e-4,2e-4 run.seed=1,2,3
    workbench sweep my.yaml adapter.r=4,8,16 optim.max_steps=100 --detach
    workbench sweep my.yaml adapter.r=4,8,16 --to slurm --array-limit 2
    workbench sweep my-3fa2c1

    As the first process of a container it saves and stops its runs on SIGTERM and Ctrl-C, and --detach is refused.

    Exit code: 0 where all runs finished or were stopped on request, 1 where one failed.
    """
    path = Path(file)
    shown = not pairs and not os.path.exists(path)
    hold_container(detach=detach and to is None and not shown)
    if to is None or shown:
        _refuse_options(cluster, "--to" if to is not None else "", shown)
    if shown:
        root = store.runs_dir(runs)
        return _report(file, runs_of(root, file), as_json=as_json)
    asked = axes(pairs)
    if asked.count > SANE and not yes:
        raise UsageError(
            f"the sweep would be {asked.count} runs ({_describe_axes(asked)}); more than {SANE} are started with --yes alone.",
            "Name fewer values, or give --yes.",
        )
    if to is not None:
        in_cluster = submit(path, asked, runs, as_json=as_json, **cluster)
        if in_cluster is None:
            return 0
        name, started, how = in_cluster
    else:
        name, started = start(path, asked, runs)
        how = "one after the other where they share a device"
    if not as_json:
        echo(f"sweep {name}: {asked.count} runs ({_describe_axes(asked)}), {how}", err=True)
    if os.getpid() == 1 and to is None:
        ended = _hold(started)
        code = _report(name, started, as_json=as_json)
        return code if ended is None else ended
    return _follow(name, started, detach=detach, as_json=as_json)


def _refuse_options(cluster: Mapping[str, Any], to: str, shown: bool) -> None:
    """Raises UsageError for an option of a cluster where nothing is handed over to one."""
    names = {"more": "sbatch", "machine": "for"}
    given = next((f"--{names.get(key, key).replace('_', '-')}" for key, value in cluster.items() if value), "") or to
    if given:
        needed = "needs a config FILE and settings with several values" if shown else "needs --to slurm"
        raise UsageError(f"{given}: {needed}.")


def _follow(name: str, started: Sequence[RunFolder], *, detach: bool, as_json: bool) -> int:
    """Wait for the runs, unless they are left alone, and show the table."""
    if not detach:
        try:
            _wait(started)
        except KeyboardInterrupt:
            raise WorkbenchError(
                f"the runs of {name} go on without this window.",
                f"`workbench sweep {name}` shows what they reached.",
                exit_code=130,
            ) from None
    return _report(name, started, as_json=as_json)


def submit(
    file: Path,
    asked: Axes,
    runs: str | None,
    *,
    more: tuple[str, ...],
    nodes: int | None,
    array_limit: int | None,
    machine: str | None,
    dry_run: bool,
    as_json: bool,
    **named: str | None,
) -> tuple[str, list[RunFolder], str] | None:
    """Check every cell, then hand all over to SLURM as one array: the sweep's name, its runs, and how they run in words.

    None after a dry run. Raises WorkbenchError with nothing submitted where one cannot be.
    """
    job = job_of(named, more)
    fixed = [*asked.fixed, *([] if nodes is None else [f"distributed.nodes={nodes}"])]
    cells = asked.cells()
    words = [visible(" ".join(f"{path}={value}" for path, value in cell.items())) for cell in cells]
    tasks = tasks_of(
        (
            (file, [*fixed, *(f"{path}={value}" for path, value in cell.items())], f"{file} with {label}", label)
            for cell, label in zip(cells, words, strict=True)
        ),
        machine,
        runs,
    )
    if dry_run:
        show_script(array.script(tasks, f"{tasks[0].name}-sweep", job, array_limit), as_json=as_json)
        return None
    name = new_id(file.stem)
    members = [
        replace(task, more={"sweep": _membership(name, cell, task.config)})
        for task, cell in zip(tasks, cells, strict=True)
    ]
    started, number = hand_over(members, name, job, array_limit)
    return name, started, f"as job {number} of SLURM{at_a_time(array_limit)}"


def _membership(name: str, cell: Mapping[str, str], config: RunConfig) -> dict[str, Any]:
    """What a run's run.json says of the sweep that it belongs to."""
    metric, greater = metric_of(config) if config.data.evaluates else ("loss", False)
    return {"id": name, "values": dict(cell), "metric": metric, "greater_is_better": greater}


def start(file: Path, asked: Axes, runs: str | None) -> tuple[str, list[RunFolder]]:
    """Check every cell, then queue a run for each. Raises WorkbenchError with nothing started where one cannot be."""
    from engine.planning.estimate import estimate
    from engine.rules import read
    from engine.run.from_config import launch_config, refuse_shared_repository, runs_dir_of
    from engine.session.paragraph import paragraph
    from workbench.cli.findings import require_no_errors, show
    from workbench.cli.reading import facts_for, load_own, with_overrides

    document, base = load_own(file), file.resolve().parent
    cells: list[tuple[dict[str, str], Any, Any, int]] = []
    known: dict[str, dict[str, str]] = {}
    reported: set[str] = set()
    place = store.runs_dir(runs)
    for cell in asked.cells():
        words = " ".join(f"{path}={value}" for path, value in cell.items())
        complete = with_overrides(document.mapping, base, [*asked.fixed, *(f"{k}={v}" for k, v in cell.items())])
        facts = facts_for(complete, runs)
        reading = read(complete, facts)
        if reading.errors:
            require_no_errors(reading.findings, f"{file} with {visible(words)}", "no run was started")
        if (same := known.setdefault(repr(reading.config), cell)) is not cell:
            other = " ".join(f"{path}={value}" for path, value in same.items())
            raise UsageError(f"{visible(words)} and {visible(other)} are one and the same config.", "Leave one out.")
        fresh = [finding for finding in reading.findings if finding.message not in reported]
        reported.update(finding.message for finding in fresh)
        show(fresh, {}, err=True)
        estimated = estimate(reading.config, facts)
        if not cells:
            place = runs_dir_of(reading.config, reading.given, runs)
            echo(paragraph(reading.config, facts, estimated, place), err=True, hang=0)
        cells.append((cell, reading.config, facts, estimated.checkpoints_bytes or 0))
    refuse_shared_repository(config for _, config, _, _ in cells)
    require_room(place, sum(needed for *_, needed in cells), len(cells), "started")
    name = new_id(file.stem)
    started: list[RunFolder] = []
    try:
        for cell, config, facts, needed in cells:
            run = launch_config(
                config, facts, runs_dir=place, name=file.stem, forecast_bytes=needed or None, source=file, queue=True,
                more={"sweep": _membership(name, cell, config)},
            )  # fmt: skip
            started.append(run)
    except BaseException:
        for run in started:
            if run.state not in ENDED:
                control.request(run, "stop", by="the sweep, which could not be queued whole")
        raise
    return name, started


def _describe_axes(asked: Axes) -> str:
    return " x ".join(f"{len(values)} of {visible(path)}" for path, values in asked.varied.items())


def _hold(started: Sequence[RunFolder]) -> int | None:
    """Wait as the process whose end is that of all runs: SIGTERM and SIGINT save and stop them, those that still wait first,
    within the longest of their graces. The exit code that a signal makes."""
    received: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda what, _: received.append(what))
    _wait(started, received)
    if not received:
        return None
    by = signal.Signals(received[0]).name
    graces = [run.read_json().get("grace_seconds") for run in started]
    grace = max((float(each) for each in graces if isinstance(each, (int, float))), default=DEFAULT_GRACE)
    for do, now, seconds in (("save_stop", False, grace), ("stop", True, 15.0)):
        for run in sorted(started, key=lambda run: run.state != "queued"):
            with contextlib.suppress(WorkbenchError):  # one that has ended is asked nothing
                control.request(run, do, by=by, now=now, hurried=True)
        _wait(started, seconds=seconds)
    return 128 + received[0]


def _wait(started: Sequence[RunFolder], received: Sequence[int] = (), seconds: float = math.inf) -> None:
    """Until all have ended, a signal is `received`, or so many seconds have passed; a line says how far they are."""
    give_up = time.monotonic() + seconds
    try:
        while not received and time.monotonic() < give_up:
            reap()
            for run in started:
                launch.attend_or_report(run)
            states = [run.state if run.path.is_dir() else "lost" for run in started]
            over = sum(state in ENDED for state in states)
            if over == len(states):
                return
            going = [run.id for run, state in zip(started, states, strict=True) if state not in (*ENDED, "queued")]
            rewrite(f"{over} of {len(states)} runs are over" + (f", {', '.join(going)} at work" if going else ""))
            time.sleep(LOOK_SECONDS)
    finally:
        clear()


def _report(name: str, started: Sequence[RunFolder], *, as_json: bool) -> int:
    for run in started:
        launch.attend_or_report(run)
    report = {"sweep": name, **results([run for run in started if run.path.is_dir()])}
    failed = any(row["state"] in ("failed", "lost") for row in report["runs"])
    if as_json:
        print_json({"ok": not failed, **report})
    else:
        for line in [*lines(report), *picture(report)]:
            echo(line, hang=0 if line.endswith(".") else None)
        best = next((run for run in started if run.id == report["best"]), None)
        named = _compared(report)
        if (best is not None or report["differs_by"]) and len(named) > 1:
            echo(
                f"`workbench compare {' '.join(run_name(run) for run in started if run.id in named)}` lays them side by side."
            )
    return 1 if failed else 0


def _compared(report: dict[str, Any]) -> list[str]:
    """The best runs, as many as one picture can tell apart."""
    sign = -1 if report["greater_is_better"] else 1
    rows = [row for row in report["runs"] if row["value"] is not None]
    return [row["id"] for row in sorted(rows, key=lambda row: sign * row["value"])[:COMPARED]]


def lines(report: dict[str, Any]) -> list[str]:
    """The table: a run a line, then the means over seeds, then the best."""
    metric = report["metric"]
    title = titled(metric) if metric else "value"
    keys = list(dict.fromkeys(key for row in report["runs"] for key in row["values"]))
    table = [["RUN", *(visible(key) for key in keys), "STATE", "STEP", title]]
    most = next((row["value"] for row in report["runs"] if row["id"] == report["best"]), None)
    for row in report["runs"]:
        value = "-" if row["value"] is None else format_metric(metric or "", row["value"])
        value += f" at step {row['at_step']}" if row["at_step"] not in (None, row["step"]) else ""
        if most is not None and row["value"] == most and row["state"] in ("finished", "stopped"):
            value += ", the best" if row["id"] == report["best"] else ", the same"
        cells = [visible(row["values"].get(key, "-")) for key in keys]
        table.append([visible(row["id"]), *cells, state_text(row["state"]), count(row["step"]), value])
    rows = columns(table)
    if report["groups"]:
        rest = [key for key in keys if key != "run.seed"]
        table = [[*(visible(key) for key in rest), "RUNS", f"mean {title}", "spread"]]
        for group in report["groups"]:
            spread = "-" if group["spread"] is None else number(group["spread"])
            cells = [visible(group["values"].get(key, "-")) for key in rest]
            table.append([*cells, count(len(group["runs"])), format_metric(metric, group["mean"]), spread])
        rows += ["", *columns(table)]
    if metric is None:
        rows += ["", "The runs go by different metrics, so none of them is the best."]
    elif report["differs_by"]:
        rows += ["", incomparable(report)]
    return rows


def incomparable(report: dict[str, Any]) -> str:
    """Why no run is the best where a setting that varies changes what the metric measures, and what tells one."""
    title, other_rows = titled(report["metric"]), report["other_rows"]
    parts = []
    if which := ", ".join(visible(each) for each in report["differs_by"] if each not in other_rows):
        parts.append(f"Another {which} is another {title}, even of the same model")
    if which := ", ".join(map(visible, other_rows)):
        parts.append(f"{'and with' if parts else 'With'} another {which} the {title} is of other rows or tokens")
    sentence = f"{', '.join(parts)}, so none of them is the best by it."
    if instead := report["instead"]:
        name = instead.removeprefix("eval_")
        sentence += (
            f" Sweep with run.metric_for_best_model={name} to go by the {titled(instead)}, which all of them measure."
        )
    elif report["metric"] == "loss" and all(each in NOISE for each in report["differs_by"]):
        sentence += " Sweep with data.val_set_size=0.05 or data.eval: held-out rows are measured without it."
    elif all(each.startswith(("data.train.", "data.val_set_size")) for each in report["differs_by"]):
        sentence += " Name data.eval to measure all of them on the same rows."
    return sentence


def picture(found: dict[str, Any]) -> list[str]:
    """The curve of each run on one scale, a run a line; nothing where none has two points or they have no metric in
    common."""
    rows = [row for row in found["runs"] if len(row["curve"]) > 1]
    if not rows or found["metric"] is None or found["differs_by"]:
        return []
    values = [value for row in rows for _, value in row["curve"]]
    first, last = (end(step for row in rows for step, _ in row["curve"]) for end in (min, max))
    low, high = min(values), max(values)
    signs = min(PICTURED, max(len(row["curve"]) for row in rows))
    table = []
    for row in rows:
        words = " ".join(f"{key}={value}" for key, value in row["values"].items())
        table.append([visible(row["id"]), _drawn(row["curve"], (first, last), (low, high), signs), visible(words)])
    metric = found["metric"]
    title = f"{titled(metric)}, step {count(first)} to {count(last)}, {format_metric(metric, low)} to {format_metric(metric, high)}:"
    return ["", title, *columns(table)]


def _drawn(curve: Sequence[Sequence[float]], steps: tuple[int, int], scale: tuple[float, float], signs: int) -> str:
    """A sign for each stretch of steps, as high as its newest value; a stretch without one is blank."""
    cells = [" "] * signs
    for step, value in curve:
        at = round((step - steps[0]) / max(1, steps[1] - steps[0]) * (signs - 1))
        share = (value - scale[0]) / (scale[1] - scale[0]) if scale[1] > scale[0] else 0.0
        cells[at] = SPARK[round(share * (len(SPARK) - 1))]
    return "".join(cells)
