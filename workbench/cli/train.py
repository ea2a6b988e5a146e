"""`workbench train FILE`: start a run and watch it; the window may go at any time.

With a terminal Ctrl-C asks, and leaves the run going unless told otherwise. Without one, and as the first process of a
container, whose end is that of all in it, the command is the run's foreground: SIGTERM and SIGINT save and stop it within
`run.grace_seconds`, and the exit code says so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from engine.errors import Cancelled, UsageError, WorkbenchError, visible
from engine.run import control, member
from engine.run.index import Watch, open_view, peek
from engine.run.nodes import MEET_SECONDS, Rendezvous, endpoint_of, from_slurm, rendezvous_of, require_place
from engine.run.store import RunFolder, find
from engine.run.view import RunView
from workbench.calling import run_name
from workbench.cli.following import Follower, exit_code, report, state_text, summary
from workbench.cli.going_on import begun_by, go_on, report_versions, stays
from workbench.cli.output import echo, print_json
from workbench.cli.places import PATH, shown

if TYPE_CHECKING:
    from engine.config.facts import Facts
    from engine.config.findings import Finding
    from engine.config.tree import RunConfig
    from engine.planning.estimate import Estimate

Command = TypeVar("Command", bound=Callable[..., Any])


def meets(command: Command) -> Command:
    """The options of torchrun with which a machine takes its place among several."""
    for option in (
        click.option(
            "--rdzv-timeout", type=click.FloatRange(1), metavar="SECONDS", help="How long to wait for the others."
        ),
        click.option("--rdzv-id", metavar="ID", help="A name that tells runs at one address apart."),
        click.option("--rdzv-endpoint", metavar="HOST[:PORT]", help="Address of the first machine, where all meet."),
        click.option("--node-rank", type=click.IntRange(0), metavar="K", help="Which of them this is; 0 is the first."),
    ):
        command = option(command)
    return command


@click.command(short_help="Start a run and watch it.")
@click.argument("file", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--detach", is_flag=True, help="Return once training has begun; the run goes on.")
@click.option("--queue", "queue", is_flag=True, help="Wait until a device is free.")
@click.option("--after", "after", metavar="RUN", help="Wait until that run has ended, then for a free device.")
@click.option(
    "--resume", is_flag=True, help="Go on with the run that FILE began before; start one where there is none."
)
@click.option("--nodes", type=click.IntRange(1, 1024), metavar="N", help="Machines; sets distributed.nodes.")
@meets
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    file: Path,
    overrides: tuple[str, ...],
    detach: bool,
    queue: bool,
    after: str | None,
    resume: bool,
    nodes: int | None,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    rdzv_id: str | None,
    rdzv_timeout: float | None,
    runs: str | None,
    as_json: bool,
) -> int:
    """Start a run of the config FILE and watch it.

    \b
    workbench train my.yaml
    workbench train my.yaml optim.learning_rate=1e-4 --detach
    workbench train my.yaml --queue --detach
    workbench train my.yaml --resume
    workbench train my.yaml --nodes 2 --rdzv-endpoint first:29500 --node-rank 1

    With --nodes the command is given on each machine, over one folder of runs that all of them see.

    With --resume the same command can be given again and again, as a container's is when it starts anew: the newest run of
    FILE goes on if it was cut off, stopped by a signal, or failed in a way that may not come again. One that is finished, was
    stopped by a person, or would fail the same way is left, and the exit code is its own.

    Exit code: 0 finished or stopped on request, 1 failed, 143 and 130 ended by SIGTERM and SIGINT.
    """
    if nodes is not None:
        overrides = (*overrides, f"distributed.nodes={nodes}")
    hold_container(detach=detach)
    if resume and (queue or after is not None):
        raise UsageError("--resume: must be left out beside --queue and --after, which are for a new run.")
    rank, meeting = meeting_of(node_rank, rdzv_endpoint, rdzv_id, rdzv_timeout, nodes or 1)
    before = begun_by(file, overrides, runs, rank) if resume else None
    if before is not None:
        return _again(before, meeting, detach=detach, as_json=as_json)
    if rank > 0:
        run = join(file, overrides, runs, rank, meeting)
    else:
        run = start(file, overrides, runs, queue=queue, after=after, meeting=meeting)
    if not as_json:
        echo(f"{run.id} in {shown(run.path)}", err=True)
    return attach(run, detach=detach, as_json=as_json)


def _again(run: RunFolder, meeting: Rendezvous | None, *, detach: bool, as_json: bool) -> int:
    """Go on with the run of an earlier command, or say why it stays as it is; the exit code."""
    if stays(run):
        return attach(run, as_json=as_json)
    segment = peek(run).view.segment
    if meeting is not None:
        meeting = replace(meeting, nodes=rendezvous_of(run).nodes)
    report_versions(run)
    go_on(run, meeting)
    return attach(run, detach=detach, as_json=as_json, after=segment)


def meeting_of(
    rank: int | None, endpoint: str | None, name: str | None, seconds: float | None, nodes: int
) -> tuple[int, Rendezvous | None]:
    """This machine's rank and how so many nodes meet, by options or, where there are several, SLURM's step; (0, None) where
    neither says anything. Raises UsageError."""
    step = from_slurm(os.environ) if nodes > 1 else None
    if step is not None:
        rank, name = step[0] if rank is None else rank, step[2] if name is None and endpoint is None else name
    if rank is None and endpoint is None and name is None and seconds is None:
        return 0, None
    if rank and endpoint is None and step is None:
        raise UsageError("--rdzv-endpoint: needed beside --node-rank, the address of the first machine.")
    at = endpoint_of(endpoint) if endpoint is not None else ""
    return rank or 0, Rendezvous(nodes, at, name or "none", seconds or MEET_SECONDS)


def join(file: Path, overrides: tuple[str, ...], runs: str | None, rank: int, meeting: Rendezvous | None) -> RunFolder:
    """Take this machine's part in the run that the first one starts. Raises WorkbenchError where none comes, or its config is
    another."""
    from engine.config.edit import changes
    from engine.config.files import dump, load, parse
    from engine.rules import read
    from engine.run.from_config import runs_dir_of
    from workbench.cli.reading import with_overrides

    assert meeting is not None
    reading = read(with_overrides(load(file).mapping, file.resolve().parent, overrides))
    place = runs_dir_of(reading.config, reading.given, runs)
    if rank >= (nodes := reading.config.distributed.nodes):
        raise UsageError(f"--node-rank: must be from 0 to {nodes - 1} in a run on {nodes} nodes; got {rank}.")
    require_place(meeting, rank, os.environ)
    echo(f"node {rank} waits for the first at {visible(meeting.endpoint or meeting.id)}", err=True)
    run = member.find(place, meeting, lambda: None)
    asked = parse(str(run.read_json().get("asked") or "")).mapping
    for path, value in changes(asked, parse(dump(reading.config)).mapping):
        first: Any = asked
        for part in path:
            first = first.get(part) if isinstance(first, dict) else None
        words = f"its {'.'.join(map(str, path))} is {visible(str(value))}, that of node 0 is {visible(str(first))}."
        member.refuse(run, rank, words)
        raise WorkbenchError(f"{visible(str(file))}: {words}", "Start all nodes of a run with one config.")
    member.join(run, rank)
    return run


def start(
    file: Path,
    overrides: tuple[str, ...],
    runs: str | None,
    *,
    queue: bool = False,
    after: str | None = None,
    meeting: Rendezvous | None = None,
) -> RunFolder:
    """Read, check, launch, or queue. Raises WorkbenchError after printing the findings if the config has errors."""
    from workbench.cli.reading import load_own

    document = load_own(file)
    return start_mapping(
        document.mapping,
        file.resolve().parent,
        overrides,
        runs,
        name=file.stem,
        source=file,
        queue=queue,
        after=after,
        meeting=meeting,
    )


def start_mapping(
    mapping: dict[str, Any],
    base: Path,
    overrides: tuple[str, ...],
    runs: str | None,
    *,
    name: str,
    source: Path | None = None,
    queue: bool = False,
    after: str | None = None,
    meeting: Rendezvous | None = None,
) -> RunFolder:
    from engine.facts.counts import not_counted
    from workbench.cli.findings import show

    def report(findings: Iterable[Finding]) -> None:
        show(findings, {}, err=True)

    plan = plan_start(mapping, base, overrides, runs, name=name, source=source, meeting=meeting, report=report)
    behind = find(after, plan.place) if after is not None else None
    echo(plan.summary, err=True, hang=0)
    if uncounted := not_counted(plan.config, plan.facts):
        echo(f"{uncounted} yet; the run counts them first", err=True)
    several = plan.config.distributed.nodes
    if several > 1 and meeting is not None and meeting.endpoint:
        there = f"--nodes {several} --node-rank 1 --rdzv-endpoint {meeting.endpoint} --runs {plan.place}"
        echo(
            f"waits up to {meeting.seconds:g} s for {several - 1} more: there, give the same config with {there}",
            err=True,
        )
    return plan.launch(queue=queue, after=behind, meeting=meeting)


@dataclass(frozen=True)
class Start:
    """A run that can be started: its config has no errors."""

    config: RunConfig
    facts: Facts
    place: Path
    """The folder of runs in which it would lie."""
    name: str
    source: Path | None
    estimated: Estimate

    @property
    def summary(self) -> str:
        """The run in a paragraph."""
        from engine.session.paragraph import paragraph

        return paragraph(self.config, self.facts, self.estimated, self.place)

    def launch(
        self, *, queue: bool = False, after: RunFolder | None = None, meeting: Rendezvous | None = None
    ) -> RunFolder:
        """Start it, or let it wait. Raises WorkbenchError where it cannot start."""
        from engine.run.from_config import launch_config

        return launch_config(
            self.config,
            self.facts,
            runs_dir=self.place,
            name=self.name,
            forecast_bytes=self.estimated.checkpoints_bytes,
            source=self.source,
            queue=queue,
            after=after,
            rendezvous=replace(meeting, nodes=self.config.distributed.nodes) if meeting is not None else None,
        )


def plan_start(
    mapping: Mapping[str, Any],
    base: Path,
    overrides: Iterable[str],
    runs: str | None,
    *,
    name: str,
    source: Path | None = None,
    meeting: Rendezvous | None = None,
    report: Callable[[Iterable[Finding]], object] = lambda findings: None,
) -> Start:
    """The run of a config with these settings beside it; `report` is given what was found in it.

    Raises ConfigRefused where an error was, UsageError where several machines are to meet and it is not said where.
    """
    from engine.planning.estimate import estimate
    from engine.rules import read
    from engine.run.from_config import runs_dir_of
    from workbench.cli.findings import refuse_errors
    from workbench.cli.reading import facts_for, with_overrides

    complete = with_overrides(mapping, base, overrides)
    facts = facts_for(complete, runs)
    reading = read(complete, facts)
    report(reading.findings)
    refuse_errors(reading.findings, str(source or name), "no run was started")
    place = runs_dir_of(reading.config, reading.given, runs)
    _require_meeting(reading.config.distributed.nodes, meeting)
    return Start(reading.config, facts, place, name, source, estimate(reading.config, facts))


def _require_meeting(several: int, meeting: Rendezvous | None) -> None:
    """Raises UsageError unless so many nodes know where they meet."""
    if meeting is not None and several == 1:
        raise UsageError("--rdzv-endpoint, --rdzv-id, --rdzv-timeout and --node-rank: need --nodes above 1.")
    if several > 1 and (meeting is None or (not meeting.endpoint and meeting.id == Rendezvous(1).id)):
        raise UsageError(
            f"--rdzv-endpoint: needed on {several} nodes, the address of the first machine as the others reach it.",
            "Or `workbench submit` starts all of them; inside a step of SLURM, give --nodes.",
        )
    if several > 1 and meeting is not None:
        require_place(meeting, 0, os.environ)


def hold_container(*, detach: bool) -> None:
    """As the first process of a container, where the system leaves out what nobody handles: SIGTERM ends this command from the
    start, not only once a run is followed. Raises UsageError where nothing would hold the container until the run's end."""
    if os.getpid() != 1:
        return
    if detach:
        raise UsageError(
            "--detach: must be left out in a command that is a container's first process; with its end the run would end.",
            "Or start the container with a process that stays, and give the command inside (docker exec).",
        )
    signal.signal(signal.SIGTERM, _end_early)


def _end_early(number: int, _: FrameType | None) -> None:
    raise Cancelled(f"Ended by {signal.Signals(number).name} before the run was followed.", exit_code=128 + number)


def attach(run: RunFolder, *, detach: bool = False, as_json: bool = False, after: int = -1) -> int:
    """Follow the run as this kind of window does; returns the exit code. Phases are told of segments after `after`."""
    with open_view(run) as watch:
        follower = Follower(watch, quiet=as_json, after=after)
        if detach:
            try:
                view = follower.until(lambda view: view.state in ("queued", "running", "stopping"))
            except KeyboardInterrupt:
                raise WorkbenchError(
                    f"{run.id} was started and goes on; its first step was not waited for.",
                    f"`workbench watch {run_name(run)}` shows it.",
                    exit_code=130,
                ) from None
            return _detached(watch, view, as_json)
        if sys.stdin.isatty() and sys.stderr.isatty() and not as_json and os.getpid() != 1:
            return _with_terminal(run, follower)
        return _foreground(run, follower, as_json)


def _detached(watch: Watch, view: RunView, as_json: bool) -> int:
    if as_json:
        print_json(summary(watch) | {"path": str(watch.folder.path)})
    elif view.over:
        report(watch)
    else:
        echo(f"{state_text(view.state)}: {view.id}. `workbench watch {run_name(watch.folder)}` shows it.", err=True)
    return exit_code(view) if view.over else 0


# -- with a terminal ---------------------------------------------------------------------------------------------------

_QUESTION = """
The run goes on without this window.
  l  leave it running
  s  save a checkpoint, then stop
  n  stop now, keep the checkpoints made so far
  w  go on watching
"""


def _with_terminal(run: RunFolder, follower: Follower) -> int:
    while True:
        try:
            view = follower.until(lambda view: False)
        except KeyboardInterrupt:
            if _ask(run):
                return 0
            continue
        report(follower.watch)
        return exit_code(view)


def _ask(run: RunFolder) -> bool:
    """What Ctrl-C should mean; True to leave. Another Ctrl-C leaves too."""
    echo(_QUESTION, err=True, lines=True)
    try:
        choice = click.prompt("", type=click.Choice(["l", "s", "n", "w"]), default="l", show_choices=False, err=True)
    except (click.Abort, KeyboardInterrupt):
        choice = "l"
    if choice == "l":
        name = run_name(run)
        echo(f"{run.id} goes on. `workbench watch {name}` shows it, `workbench stop {name}` stops it.", err=True)
        return True
    if choice in ("s", "n"):
        control.request(run, "save_stop" if choice == "s" else "stop", by="the terminal")
    return False


# -- without one -------------------------------------------------------------------------------------------------------


def _foreground(run: RunFolder, follower: Follower, as_json: bool) -> int:
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)

    view = follower.until(lambda view: bool(received))
    code = None
    if received and not view.over:
        code = 128 + received[0]
        view = _stop_for_signal(run, follower, signal.Signals(received[0]).name)
    if as_json:
        print_json(summary(follower.watch))
    else:
        report(follower.watch)
    return exit_code(view) if code is None else code


def _stop_for_signal(run: RunFolder, follower: Follower, name: str) -> RunView:
    """Save and stop; where that takes longer than the grace, stop at once."""
    grace = run.read_json().get("grace_seconds")
    give_up = time.monotonic() + (grace if isinstance(grace, (int, float)) else 60)
    try:
        control.request(run, "save_stop", by=name, hurried=True)
    except WorkbenchError:
        # It ended in this very moment.
        return follower.until(lambda view: view.over)
    follower.print(f"{name}: saving a checkpoint, then stopping")
    view = follower.until(lambda view: time.monotonic() > give_up)
    if not view.over:
        follower.print("it takes longer than run.grace_seconds; stopping at once")
        control.request(run, "stop", by=name, now=True)
        view = follower.until(lambda view: time.monotonic() > give_up + 15)
    return view
