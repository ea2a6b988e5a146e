"""Runs that wait: for a free device, or for another run to end. Each has a supervisor of its own that waits; nothing else does.

The run folder is the truth: state `queued` and what it waits for in `run.json`, its place in `queue.json`, which anyone may
write. The first of a folder's queue alone may begin, so no two take one device; runs of other folders are seen by the memory
that they hold on a card. A queued run whose supervisor is gone is given another by those behind it, and by every window.
Standard library and NVML only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import WorkbenchError, visible
from engine.run import control, devices, inside, launch, slurm
from engine.run.store import ENDED, RunFolder, runs_in

LOOK_SECONDS = 1.0
REVIVE_SECONDS = 10.0
PLACE = "queue.json"
_MOST = 4096
_FOR_A_DEVICE, _BEHIND = "waits for a free device", "waits behind "


def place_of(run: RunFolder) -> float:
    """Where a run stands in its queue: smaller is earlier. Its time of launch until somebody has moved it."""
    place = inside.read_json(run, PLACE, _MOST).get("place")
    if isinstance(place, int | float) and not isinstance(place, bool):
        return float(place)
    created = run.read_json().get("created")
    return float(created) if isinstance(created, int | float) else 0.0


def queue_of(root: str | os.PathLike[str]) -> list[RunFolder]:
    """The queued runs of a folder, the next one first."""
    queued = (run for run in runs_in(root) if run.state == "queued" and not slurm.is_job(run))
    return sorted(queued, key=lambda run: (place_of(run), run.id))


def move(run: RunFolder, to: int) -> list[RunFolder]:
    """Give a queued run another place, counted from 0; the queue as it stands then.

    Raises WorkbenchError for a run that does not wait.
    """
    waiting = queue_of(run.path.parent)
    if run.path not in [queued.path for queued in waiting]:
        if slurm.is_job(run):
            raise WorkbenchError(f"run {run.id} is a job of SLURM, whose queue is the cluster's to order.")
        raise WorkbenchError(f"run {run.id} is {run.state}; only a queued run has a place in the queue.")
    others = [queued for queued in waiting if queued.path != run.path]
    to = max(0, min(to, len(others)))
    places = [place_of(queued) for queued in others]
    if not others:
        return waiting
    if to == 0:
        place = places[0] - 1.0
    elif to == len(others):
        place = places[-1] + 1.0
    else:
        place = (places[to - 1] + places[to]) / 2
    try:
        inside.replace(run, run.path / PLACE, json.dumps({"place": place}))
    except OSError as problem:
        raise WorkbenchError(f"run {run.id} cannot be moved: {problem.strerror}.") from problem
    return queue_of(run.path.parent)


def over(run: RunFolder) -> bool:
    """Whether a run has come to its end, however; one that is gone has, and one of which no process is left."""
    state = slurm.refresh(run) if slurm.is_job(run) else run.state
    if state in ENDED:
        return True
    if state == "queued":
        return not run.path.is_dir()
    return launch.unattended(run) and not launch.at_work(run)


def waiting_for(queued: Sequence[RunFolder]) -> list[str]:
    """What each run of a queue waits for, in words that fit its order as it is now; what its supervisor wrote last may be of
    before a run was moved."""
    words: list[str] = []
    ahead: list[RunFolder] = []
    for run in queued:
        values = run.read_json()
        said = str(values.get("message") or "")
        if before := _waits_to_end(values):
            words.append(before)
            continue
        words.append(_behind(ahead) if ahead else _FOR_A_DEVICE if said.startswith(_BEHIND) else said)
        ahead.append(run)
    return words


def _waits_to_end(values: Mapping[str, Any]) -> str:
    after = values.get("after")
    if isinstance(after, str) and not over(RunFolder(after)):
        return f"waits for {visible(RunFolder(after).id)} to end"
    return ""


def _behind(ahead: Sequence[RunFolder]) -> str:
    return _BEHIND + visible(ahead[0].id if len(ahead) == 1 else f"{len(ahead)} runs")


class Turn:
    """What one queued run waits for, looked at again and again by its supervisor."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._revived = 0.0
        self._known: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def waits_for(self) -> tuple[str, devices.Choice | None]:
        """In words what it waits for; nothing and its devices once it may begin. Raises WorkbenchError if it never can."""
        values = self.run.read_json()
        if before := _waits_to_end(values):
            return before, None
        live = self._live()
        ahead = self._ahead(live)
        if ahead:
            return _behind(ahead), None
        chosen = devices.free(values.get("devices_wanted", "auto"), *self._in_use(live))
        return ("", chosen) if chosen is not None else (_FOR_A_DEVICE, None)

    def cancelled(self) -> str:
        """Who asked it to stop; empty while nobody has."""
        for request in control.lying(self.run):
            if request.do in (*control.STOPS, "end_of_epoch"):
                return request.by or "someone"
        return ""

    def _live(self) -> list[tuple[RunFolder, dict[str, Any]]]:
        """The runs of the folder that have not ended, each with its `run.json`; one that has not changed is not read again."""
        known, self._known = self._known, {}
        runs = []
        for run in runs_in(self.run.path.parent):
            try:
                state = os.lstat(run.json)
            except OSError:
                continue
            stamp = (state.st_ino, state.st_size, state.st_mtime_ns)
            before = known.get(run.id)
            values = before[1] if before is not None and before[0] == stamp else run.read_json()
            self._known[run.id] = stamp, values
            # What a cluster has is in no device's way here.
            if values and values.get("state") not in ENDED and not values.get("cluster"):
                runs.append((run, values))
        return runs

    def _ahead(self, live: list[tuple[RunFolder, dict[str, Any]]]) -> list[RunFolder]:
        """The queued runs before this one that wait for nothing but a device; those that lost their supervisor get one."""
        mine = (place_of(self.run), self.run.id)
        ahead = []
        for run, values in live:
            after = values.get("after")
            waits = values.get("state") == "queued" and (not isinstance(after, str) or over(RunFolder(after)))
            if waits and (place_of(run), run.id) < mine:
                ahead.append(run)
        if time.monotonic() - self._revived > REVIVE_SECONDS:
            self._revived = time.monotonic()
            for run in ahead:
                launch.attend_or_report(run)
        return sorted(ahead, key=lambda run: (place_of(run), run.id))

    def _in_use(self, live: list[tuple[RunFolder, dict[str, Any]]]) -> tuple[set[str], int]:
        """The GPUs that runs of this folder have, and how many of its runs work on the CPU."""
        taken: set[str] = set()
        on_cpu = 0
        for run, values in live:
            if values.get("state") == "queued" or not launch.at_work(run):
                continue
            names = values.get("devices") or []
            taken.update(str(name) for name in names)
            on_cpu += not names
        return taken, on_cpu
