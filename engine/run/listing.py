"""The runs of a folder at a glance: from each `run.json`, and from what an earlier look kept, without opening their events.

A summary is kept with the sizes and times of the files that it was read from, so that a folder of a thousand runs is listed
in the time of looking at two thousand names. What only the events tell (step, loss, disk) is filled in by `refresh`, for the
few runs that are on screen. Where the kept file cannot be read or written, everything is read again; nothing else depends
on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.run import launch
from engine.run.checkpoint import size_of
from engine.run.curves import told_by
from engine.run.index import peek
from engine.run.store import ENDED, STATES, RunFolder, replace_file, runs_in

VERSION = 2
_LARGEST = 32 << 20


@dataclass(frozen=True, slots=True)
class Summary:
    """One run as a list shows it. Times are seconds since the epoch; `bytes` and what follows are known after `refresh`."""

    id: str
    stamp: tuple[int, ...]
    state: str = "lost"
    method: str = ""
    model: str = ""
    source: str = ""
    """The config file that it was started from."""
    created: float = 0.0
    ended: float | None = None
    cause: str = ""
    looked: bool = False
    bytes: int | None = None
    step: int = 0
    max_steps: int | None = None
    metric: str = "loss"
    """What tells it in a line (`engine.run.curves.told_by`)."""
    value: float | None = None
    held_out: float | None = None
    """The same of held-out rows."""
    eta_seconds: float | None = None
    silent_seconds: int | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended, however."""
        return self.state in ENDED

    @property
    def when(self) -> float:
        """When it ended, or else began: what a list is ordered by."""
        return self.ended or self.created


class Listing:
    """The summaries of one folder of runs. Belongs to one thread."""

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        """`cache` is a folder for what is kept between windows; None keeps it in memory alone."""
        self.root = Path(root)
        name = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:24]
        self._place = cache / f"runs-{name}.json" if cache is not None else None
        self._known: dict[str, Summary] | None = None
        self._changed = False

    def read(self) -> list[Summary]:
        """All runs, the newest first. Costs two looks at names a run that has not changed, and its `run.json` otherwise."""
        known = self._known if self._known is not None else self._load()
        summaries = {}
        for run in runs_in(self.root):
            stamp = _stamp(run)
            before = known.get(run.id)
            if before is None or before.stamp != stamp:
                before, self._changed = _summary(run, stamp), True
            summaries[run.id] = before
        self._changed |= len(summaries) != len(known)
        self._known = summaries
        return sorted(summaries.values(), key=lambda summary: (-summary.when, summary.id))

    def refresh(self, summary: Summary) -> Summary:
        """The same run with what its events and its folder say now; a run that goes on gets the supervisor it may lack."""
        if summary.looked and summary.over:
            return summary
        run = self.folder(summary)
        problem = launch.attend_or_report(run) if os.access(run.path, os.W_OK) else ""
        view = peek(run, problem=problem).view
        metric, held_out = told_by(view.latest)
        fresh = replace(
            summary,
            stamp=_stamp(run),
            looked=True,
            state=view.state,
            method=view.method or summary.method,
            model=view.model or summary.model,
            ended=view.ended or summary.ended,
            cause=view.cause,
            bytes=size_of(run.path),
            step=view.step,
            max_steps=view.max_steps,
            metric=metric,
            value=view.latest.get(metric),
            held_out=view.latest.get(held_out),
            eta_seconds=view.seconds_left() if view.silent_seconds is None else None,
            silent_seconds=view.silent_seconds,
        )
        if self._known is not None and fresh != summary:
            self._known[run.id], self._changed = fresh, True
        return fresh

    def folder(self, summary: Summary) -> RunFolder:
        """The run itself."""
        return RunFolder(self.root / summary.id)

    def keep(self) -> None:
        """Write down what is known, for the next window. Only runs that have ended stay as they are read."""
        if self._place is None or not self._changed or not self._known:
            return
        ended = {summary.id: asdict(summary) for summary in self._known.values() if summary.over}
        with contextlib.suppress(OSError):  # the next window reads the runs again, and that is all
            self._place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._place, json.dumps({"version": VERSION, "runs": ended}, separators=(",", ":")))
            self._changed = False

    def _load(self) -> dict[str, Summary]:
        if self._place is None:
            return {}
        try:
            with open(self._place, "rb") as file:
                document = json.loads(file.read(_LARGEST))
            if document["version"] != VERSION:
                return {}
            return {name: _kept(values) for name, values in document["runs"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


def _kept(values: Mapping[str, Any]) -> Summary:
    """A summary as it was written down. Raises TypeError for anything else."""
    names = {field.name for field in fields(Summary)}
    return Summary(**{**{key: values[key] for key in values if key in names}, "stamp": tuple(values["stamp"])})


def _stamp(run: RunFolder) -> tuple[int, ...]:
    return stamp_of(f"{run.path}/run.json", f"{run.path}/events.jsonl")


def stamp_of(*paths: str | os.PathLike[str]) -> tuple[int, ...]:
    """Sizes and times of files, which change when these do; a link counts as itself, one that is not there as nothing."""
    stamp: list[int] = []
    for path in paths:
        try:
            state = os.lstat(path)
            stamp += [state.st_size, state.st_mtime_ns]
        except OSError:
            stamp += [0, 0]
    return tuple(stamp)


def _summary(run: RunFolder, stamp: tuple[int, ...]) -> Summary:
    """What `run.json` alone says."""
    values = run.read_json()
    state = values.get("state")
    ended = _number(values.get("ended"))
    return Summary(
        run.id,
        stamp,
        state=state if state in STATES else "lost",
        method=str(values.get("method") or ""),
        model=str(values.get("model") or ""),
        source=str(values.get("source") or ""),
        created=_number(values.get("created")) or 0.0,
        ended=ended,
        cause=str(values.get("message") or ""),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
