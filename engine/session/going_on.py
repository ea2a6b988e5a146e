"""The run that a config's file has begun, and whether it goes on: for a command that is given again, as a container's is each
time it starts.

As for a job that SLURM queues again: a run goes on that was cut off, that a signal stopped, or that failed in a way that may not
come again. One that is finished, that a person stopped, or that would fail the same way does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from engine.config.edit import MISSING, changes
from engine.config.files import dump, parse
from engine.config.tree import RunConfig, fields
from engine.errors import RunBusy, visible
from engine.planning.auto import effective
from engine.run import cause, launch
from engine.run.events import last_final
from engine.run.lock import STALE_SECONDS
from engine.run.store import ENDED, RunFolder, runs_in

SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""Who a run is stopped by where its window was told to end: the machine, or whoever started it there."""
_BY_FIGURES = frozenset(
    spec.path for spec in (fields.run.save_steps, fields.memory.tiled_mlp_tokens, fields.kernels.cut_ce_workspace)
)
"""What follows from other settings by figures of rows and machine, as they were at the launch."""
PATIENCE_SECONDS = 1.5 * STALE_SECONDS
"""A container that is gone may have left its heartbeat behind."""


def begun_by(root: Path, file: Path) -> RunFolder | None:
    """The newest run in `root` that was started from this file, here and not by a cluster's job; None where there is none."""
    of_it = [
        (float(values.get("created") or 0), run.id, run)
        for run in runs_in(root)
        if (values := run.read_json()).get("source") == str(file.absolute()) and not values.get("cluster")
    ]
    return max(of_it)[2] if of_it else None


def stays(run: RunFolder) -> str:
    """Why a run does not go on by itself, as the rest of a sentence; empty where it does."""
    state, final = run.state, last_final(run.events) or {}
    if state == "finished":
        return "is finished"
    if final.get("kind") != state:
        return ""  # cut off, or ended before it began
    if state == "stopped" and (by := str(final.get("by") or "")) not in SIGNALS:
        return f"was stopped by {visible(by)}" if by else "was stopped"
    if state == "failed" and not cause.passes(final):
        why = visible(str(final.get("message") or final.get("cause") or "")).rstrip(".")
        return f"has failed, and would again as it stands: {why}"
    return ""


def differences(run: RunFolder, config: RunConfig) -> list[str]:
    """In what the config differs from the one that the run has, as `path: of the run -> of the config`; what it leaves to the
    machine (`auto`), or to another setting, was chosen when the run began."""
    own = parse(run.read_config(), path=run.config).mapping
    wanted = parse(dump(config)).mapping
    follows = {entry.path: entry.effective for entry in effective(config)}
    chosen = run.read_json().get("auto")
    found = []
    for path, value in changes(own, wanted):
        name, before = ".".join(map(str, path)), launch.value_at(own, path)
        if value == "auto":
            # It is a difference where the run's file said something of its own then.
            same = before is None or name not in follows or not isinstance(chosen, dict) or name in chosen
        else:
            same = name in follows and (name in _BY_FIGURES or before == follows[name])
        if not same:
            found.append(f"{name}: {before!r} -> {'removed' if value is MISSING else repr(value)}")
    return found


def wait_until_free(run: RunFolder, wait: Callable[[], None] = lambda: time.sleep(0.5)) -> None:
    """Wait for the processes of an earlier container to be gone. `wait` is called between looks. Raises RunBusy where they stay."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    launch.attend(run)
    while launch.at_work(run):
        if time.monotonic() > give_up:
            raise RunBusy(
                f"run {visible(run.id)} is at work already, on {visible(str(run.read_json().get('host') or 'another host'))}.",
                "Stop it first, or watch it.",
            )
        wait()
    if run.state not in ENDED:
        launch.attend(run)
