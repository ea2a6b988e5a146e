"""`Monitor(run)`: one run, live, from its folder alone; also one that a terminal started. Several may be open at once.

A view says what it holds (the last event, a mark for each part, the last step of each curve) and gets what is new: words
only when they changed, numbers as arrays, whole curves thinned once. One reader of a run serves all views of a kernel.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.errors import WorkbenchError
from engine.figures import doing
from engine.run import silence, stack, store
from engine.run.ending import facts, ways
from engine.run.phases import reason
from engine.run.rollouts import read_group
from engine.run.store import RunFolder
from engine.run.view import RunView
from widgets import telling
from widgets.chat import ChatPart
from widgets.curves import devices, entries
from widgets.protocol import Answer, NotebookWidget, Part, bundle, mark_of, shown, style, verb
from widgets.reader import Reader, Runs
from widgets.run_actions import ActionsPart, Run

FIRST_POINTS, SMALL_POINTS = 480, 200
WHOLE_BYTES = 24_000
"""Whole curves that one answer may carry; the rest follows in the next."""
DELTA_BYTES = 1_600
"""New points that one answer may carry, so that a fast run at 4 Hz stays far below 20 KiB/s."""
POINT_BYTES = 16
LOG_LINES, LOG_CHARACTERS = 80, 5_000
STACK_CHARACTERS = 20_000
PAUSE_SECONDS = 0.25


class MonitorPart(Part):
    """Answers what monitors show of the runs that a view may look at, by what each is called."""

    def __init__(self, runs: Runs, actions: ActionsPart) -> None:
        self._runs, self._actions = runs, actions

    @verb
    def monitored(self) -> dict[str, Any]:
        return {"run": next(iter(self._runs.given), "")}

    @verb
    def watch(
        self,
        *,
        run: Run,
        seq: int = -1,
        epoch: int = 0,
        marks: dict[str, int] | None = None,
        series: dict[str, int | float | None] | None = None,
        page: Literal["curves", "samples", "rollouts", "experts", "log", "receipt", "config"] = "curves",
    ) -> Answer:
        """What is new of a run since what the view holds."""
        reader = self._runs.reader(run)
        with reader.lock:
            view = reader.poll()
            held = marks or {}
            parts = self._parts(run, reader, view, page)
            fresh = {name: part for name, part in parts.items() if mark_of(part) != held.get(name)}
            data: dict[str, Any] = {"loading": round(reader.watch.loading, 3)}
            if fresh:
                data["parts"] = fresh
                data["marks"] = {name: mark_of(part) for name, part in fresh.items()}
            if epoch != reader.epoch:
                data["epoch"], series, seq = reader.epoch, {}, -1
            names = [entry["name"] for entry in parts["names"]]
            buffers: list[bytes] = []
            if view.seq != seq:
                data["seq"] = view.seq
                data["latest"] = True
                buffers.append(_floats("d", [view.latest.get(name, float("nan")) for name in names]))
            if page == "curves":
                lengths, more = _series(view, names, series or {})
                data["series"] = lengths
                buffers += more
            return Answer(data, buffers)

    @verb
    def zoom(self, *, run: Run, start: float, stop: float) -> Answer:
        """All curves between two steps, as fine as a chart can draw."""
        reader = self._runs.reader(run)
        with reader.lock:
            view = reader.poll()
            lengths: list[list[Any]] = []
            buffers: list[bytes] = []
            for number, entry in enumerate(entries(view)):
                width = FIRST_POINTS if number == 0 else SMALL_POINTS
                points = view.series[entry["name"]].points(int(start), int(stop), width)
                lengths.append([number, len(points[0])])
                buffers.append(_packed(points))
            return Answer({"series": lengths}, buffers)

    @verb
    def group(self, *, run: Run, offset: Annotated[int, Field(ge=0)]) -> dict[str, Any]:
        """One group of completions, whole. Named by its place in the file, which the list of groups tells."""
        reader = self._runs.reader(run)
        with reader.lock:
            entries = [entry for entry in reader.poll().rollouts if entry["offset"] == offset]
        completions = read_group(reader.folder, entries[-1]) if entries else None
        if completions is None:
            raise WorkbenchError("This group is not kept any more; the list shows those that are.")
        return telling.group(completions)

    @verb
    def stack(self, *, run: Run) -> dict[str, Any]:
        """Where the run's worker is at this moment."""
        return {"stack": shown(stack.ask(self._runs.folder(run)), STACK_CHARACTERS)}

    # Inside

    def _parts(self, run: str, reader: Reader, view: RunView, page: str) -> dict[str, Any]:
        """All that is said in words, each part travelling only when it changed."""
        parts: dict[str, Any] = {
            "now": self._now(run, view),
            "head": telling.head(view),
            "names": entries(view),
            "gpu": devices(view),
            "end": telling.end(reader.end(view), reader.folder),
            "way": telling.way(view),
        }
        if page == "samples":
            parts["samples"] = telling.samples(view)
        elif page == "rollouts":
            parts["rollouts"] = reader.groups(view)
        elif page == "experts":
            parts["experts"] = telling.experts(view)
        elif page == "receipt":
            parts["receipt"] = [telling.receipt_row(entry) for entry in view.receipt[:200]]
        elif page == "log":
            parts["log"] = "\n".join(reader.watch.log(LOG_LINES))[-LOG_CHARACTERS:]
        elif page == "config":
            parts["config"] = telling.config(reader.folder)
        return parts

    def _now(self, run: str, view: RunView) -> list[Any]:
        """`[step, seconds left, phase, what was asked, whether the rows must be accepted, whether the run is silent, the run that
        was started in its place]`: what changes with every look."""
        state = view.progress
        phase = doing(state, view.phase) if state else view.phase
        if state and (why := reason(view)):
            phase += f"; {why}"
        left = view.seconds_left()
        eta = round(left) if left is not None and not view.over else None
        if view.silent_seconds is not None:
            phase, eta = silence.describe(view.silent_seconds), None
        return [
            view.step,
            eta,
            shown(phase, 200),
            self._actions.answer(run, view),
            self._actions.rows_changed(run),
            view.silent_seconds is not None,
            self._actions.new(run),
        ]

    def summary(self) -> str:
        name = next(iter(self._runs.given), None)
        return "" if name is None else self._runs.seen(name, partial(_summary_of, self._runs.given[name]))

    def close(self) -> None:
        self._runs.close()


def monitoring(runs: Runs) -> tuple[MonitorPart, ActionsPart]:
    """What a page needs to show these runs and to ask something of them."""
    actions = ActionsPart(runs)
    return MonitorPart(runs, actions), actions


def _summary_of(folder: RunFolder, view: RunView) -> str:
    left = [*facts(view, folder), *((way.title, way.command) for way in ways(view, folder, folder.id))]
    lines = [f"  {what:<13}  {words}" for what, words in left]
    return "\n".join([telling.summary_of(view), *lines])


def _floats(kind: str, values: Any) -> bytes:
    return array(kind, values).tobytes()


def _packed(points: Any) -> bytes:
    """Steps as float64, then lows and highs as float32: one buffer a curve."""
    steps, low, high = points
    return _floats("d", steps) + _floats("f", low) + _floats("f", high)


def _series(
    view: RunView, names: list[str], held: dict[str, int | float | None]
) -> tuple[list[list[int]], list[bytes]]:
    """`[number of the curve, points]` and a buffer for each curve with something new."""
    lengths, buffers = [], []
    room = WHOLE_BYTES
    going = sum(held.get(name) is not None for name in names)
    for number, name in enumerate(names):
        last = held.get(name)
        curve = view.series[name]
        newest = curve.last
        if newest is None or (last is not None and newest[0] <= last):
            continue
        if last is None:
            if room <= 0:
                continue
            points = curve.points(width=FIRST_POINTS if number == 0 else SMALL_POINTS)
            room -= len(points[0]) * POINT_BYTES
        else:
            points = curve.points(start=int(last) + 1, width=max(4, DELTA_BYTES // POINT_BYTES // max(1, going)))
        lengths.append([number, len(points[0])])
        buffers.append(_packed(points))
    return lengths, buffers


class Monitor(NotebookWidget):
    """Watch one run: by its name, its folder, or a RunFolder. It may have been started anywhere on this machine."""

    _esm = bundle("monitor", entry="monitorFace")
    _css = style()

    def __init__(self, run: str | Path | RunFolder, *, runs: str | Path | None = None, height: int = 480) -> None:
        root = store.runs_dir(runs)
        self.run = run if isinstance(run, RunFolder) else store.find(str(run), root)
        self._runs = Runs(lambda: root, {self.run.id: self.run})
        super().__init__(*monitoring(self._runs), ChatPart(self._runs.folder), height=height)

    @property
    def view(self) -> RunView:
        """All that the run's events say now: `state`, `step`, `latest`, `series`, `samples`, `receipt`, ... A copy."""
        return self._runs.seen(self.run.id, RunView.copy)

    def wait(self, seconds: float | None = None) -> str:
        """Returns the run's state once it has ended, or after so many seconds. Interrupting the cell leaves the run alone."""
        give_up = _give_up(seconds)
        while not (state := self._state_if_over(give_up)):
            time.sleep(PAUSE_SECONDS)
        return state

    async def ended(self, seconds: float | None = None) -> str:
        """`wait` for a cell that awaits it: the kernel goes on answering meanwhile, and so the views stay alive."""
        give_up = _give_up(seconds)
        while not (state := self._state_if_over(give_up)):
            await asyncio.sleep(PAUSE_SECONDS)
        return state

    def _state_if_over(self, give_up: float) -> str:
        """The run's state once it has ended or the time is up; nothing before."""
        state, over = self._runs.seen(self.run.id, lambda view: (view.state, view.over))
        return state if over or time.monotonic() >= give_up else ""


def _give_up(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds
