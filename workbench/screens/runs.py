"""The list of runs: state, where each stands, its loss or reward with a small curve, age. Read from the folders themselves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.errors import WorkbenchError, redact
from engine.figures import count, duration, size
from engine.run import launch, snapshot
from engine.run.checkpoint import size_of
from engine.run.compare import MOST
from engine.run.curves import told_by
from engine.run.delete import delete
from engine.run.index import peek
from engine.run.listing import stamp_of
from engine.run.queue import move, queue_of
from engine.run.store import RunFolder, runs_in
from workbench.actions import bindings, key_line
from workbench.calling import program
from workbench.panels.bars import KeyLine, TextBar, TitleBar
from workbench.panels.paint import clean, cut
from workbench.panels.run_table import Row, RunTable
from workbench.screens.compare import CompareScreen
from workbench.screens.dialog import Ask, Item, offer
from workbench.screens.monitor import MonitorScreen
from workbench.screens.run_actions import RunActions

if TYPE_CHECKING:
    pass

LOOK_SECONDS = 2.0
STALE_SECONDS = 20.0  # a live run's whole curve and disk are read again after this
EARLY = ("stopped", "failed", "lost")
"""States from which a run can be gone on with."""
SORTS = ("newest", "state", "name", "loss", "disk")


class Listed(Message):
    """The folders were read."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


class ActionDone(Message):
    """A thread finished something: the words for the person."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words


def read_row(run: RunFolder, before: Row | None, problem: str = "") -> Row:
    """The run as it stands; what was read before is kept while its files have not changed."""
    stamp = stamp_of(run.events, run.json, run.checkpoints)
    if before is not None and before.stamp == stamp and (before.view.over or time.time() - before.read < STALE_SECONDS):
        return before
    view = peek(run, problem=problem).view
    curve: tuple[float, ...] = ()
    if before is not None and len(before.curve) > 8 and time.time() - before.read < STALE_SECONDS:
        curve = before.curve
    else:
        # The whole curve lies in the snapshot that a watch has left; without one the newest stretch must do.
        stored = snapshot.load(run)
        name = told_by(view.latest)[0]
        series = (stored[0] if stored is not None else view).series.get(name) or view.series.get(name)
        if series:
            curve = tuple((low + high) / 2 for low, high in zip(*series.points(width=64)[1:], strict=True))
    return Row(run, view, size_of(run.path), curve, stamp, time.time())


def _by_loss(row: Row) -> tuple[int, float]:
    """The lowest loss first, then the highest reward, which no loss can be held against; at the end what has neither."""
    name, value = row.told
    return (2, 0.0) if value is None else (0, value) if name == "loss" else (1, -value)


class RunsScreen(Screen[None]):
    """Runs of one folder: open, resume, delete, filter, sort."""

    NAME = "runs"
    BINDINGS: ClassVar[list[BindingType]] = bindings("runs")
    DEFAULT_CSS = """
    RunsScreen RunTable { height: 1fr; }
    RunsScreen #said { height: 2; border-top: solid $wb-line; }
    """

    def __init__(self, runs_dir: Path) -> None:
        super().__init__()
        self.runs_dir = Path(runs_dir)
        self._all: list[Row] = []
        self._words = ""
        self._sort = 0
        self._message, self._message_until = "", 0.0
        self.actions = RunActions(self, self._show_message, self._poll)

    def compose(self) -> ComposeResult:
        """Title, table, a line for answers, keys."""
        yield TitleBar()
        yield RunTable()
        yield TextBar("said")
        yield KeyLine("runs")

    def on_mount(self) -> None:
        """Read the folders now and every other second."""
        self.query_one(RunTable).focus()
        self._poll()
        self.set_interval(LOOK_SECONDS, self._poll)

    def on_unmount(self) -> None:
        """What was begun here ends here."""
        self.actions.close()

    def _poll(self) -> None:
        if self.is_current:
            self.run_worker(self._read, thread=True, exclusive=True, group="runs", exit_on_error=True)

    def _read(self) -> None:
        known = {row.run.path: row for row in self._all}
        rows = []
        for run in runs_in(self.runs_dir):
            problem = launch.attend_or_report(run) if os.access(run.path, os.W_OK) else ""
            try:
                rows.append(read_row(run, known.get(run.path), problem))
            except OSError:
                continue  # it was deleted while it was read
        self.post_message(Listed(rows))

    def on_listed(self, event: Listed) -> None:
        """New rows: keep the cursor on its run."""
        self._all = event.rows
        self._draw()

    def _draw(self) -> None:
        table = self.query_one(RunTable)
        before = table.chosen.run.id if table.chosen else None
        words = self._words.lower().split()
        rows = [row for row in self._all if all(word in _search_text(row) for word in words)]
        keys = {
            "newest": lambda row: -(row.view.started or 0),
            "state": lambda row: (row.view.state, row.run.id),
            "name": lambda row: row.run.id,
            "disk": lambda row: -row.bytes,
            "loss": _by_loss,
        }
        rows.sort(key=keys[SORTS[self._sort]])
        table.rows = rows
        ids = [row.run.id for row in rows]
        table.at = ids.index(before) if before in ids else min(table.at, max(0, len(rows) - 1))
        table.empty = (
            f"No run matches {self._words!r}. Press / to change that."
            if self._all
            else f"No runs here yet.\nq goes back; `{program()} demo` trains a tiny model in a few minutes."
        )
        table.redraw()
        what = f"{len(rows)} of {len(self._all)} runs" if words else f"{len(rows)} runs" if len(rows) != 1 else "1 run"
        place = cut(clean(redact(str(self.runs_dir))), max(12, self.app.size.width - 46))
        table.marked &= {row.run.id for row in self._all}
        self.query_one(TitleBar).show("runs", False, place, f"{what}, by {SORTS[self._sort]}")
        self._show_line()

    def _show_line(self) -> None:
        """The last answer, else more about the run under the cursor; the keys that do something to it."""
        table = self.query_one(RunTable)
        state = table.chosen.view.state if table.chosen else ""
        holds = [
            "any",
            *(["marked"] if len(table.marked) > 1 else []),
            *(["ended early"] if state in EARLY else []),
            *([state] if state == "finished" else []),
        ]
        self.query_one(KeyLine).use(key_line("runs", *holds))
        words, style = self._message, "$accent"
        if time.monotonic() > self._message_until:
            row = table.chosen
            words, style = (about(row), "$wb-dim") if row else ("", "$wb-dim")
        self.query_one(TextBar).write(words, style=style)

    @on(RunTable.Moved)
    def _moved(self) -> None:
        self._message_until = 0.0
        self._show_line()

    # -- actions -------------------------------------------------------------------------------------------------------
    def action_open(self) -> None:
        """Watch the run under the cursor."""
        if (row := self.query_one(RunTable).chosen) is not None:
            self.app.push_screen(MonitorScreen(row.run))

    def action_mark(self) -> None:
        """Mark the run under the cursor, or take its mark away; the cursor goes on to the next."""
        table = self.query_one(RunTable)
        if table.chosen is not None:
            table.marked = table.marked ^ {table.chosen.run.id}
            table.action_move(1)
            self._draw()

    def action_compare(self) -> None:
        """The marked runs together, in the order of the list."""
        table = self.query_one(RunTable)
        runs = [row.run for row in table.rows if row.run.id in table.marked]
        if not 2 <= len(runs) <= MOST:
            marked = "1 is" if len(runs) == 1 else f"{len(runs)} are"
            self._show_message(f"Mark 2 to {MOST} runs with Space, then c compares them; {marked} marked now.")
        else:
            self.app.push_screen(CompareScreen(runs))

    def action_do(self, what: str) -> None:
        """Something with the run under the cursor."""
        if (row := self.query_one(RunTable).chosen) is not None:
            self.actions.do(what, row.run, row.view)

    def on_action_done(self, event: ActionDone) -> None:
        """A thread is through."""
        self._show_message(event.words)
        self._poll()

    def action_delete(self) -> None:
        """Delete the run, after saying what would be lost."""
        row = self.query_one(RunTable).chosen
        if row is None:
            return
        if not row.view.over:
            self._show_message(f"{row.run.id} is {row.view.state}; stop it first, then it can be deleted.")
            return
        kept = row.view.committed
        lost = f"{size(row.bytes)}: {len(kept)} checkpoint{'s' if len(kept) != 1 else ''}"
        lost += f" (the newest of step {count(kept[-1])})" if kept else ""
        for_good = Item(
            "delete",
            Content(f"delete {clean(row.run.id)} for good"),
            Content(f"  Lost: {lost}, its curves, samples and log."),
        )

        def delete() -> None:
            self._show_message(f"deleting {row.run.id} …", 600)
            self.run_worker(
                lambda: self.post_message(ActionDone(deleted_text(row.run))),
                thread=True, group="delete", exit_on_error=True,
            )  # fmt: skip

        ways = [(Item("keep", Content("keep it")), None), (for_good, delete)]
        offer(self.app, f"Delete {clean(row.run.id)}?", ways)

    def action_place(self, by: int) -> None:
        """A queued run earlier or later in its queue."""
        if (row := self.query_one(RunTable).chosen) is None:
            return
        ids = [run.id for run in queue_of(self.runs_dir)]
        if row.run.id not in ids:
            self._show_message(f"{row.run.id} is {row.view.state}; only a queued run has a place in the queue.")
            return
        try:
            now = move(row.run, ids.index(row.run.id) + by)
        except WorkbenchError as problem:
            self._show_message(problem.full_message)
            return
        self._show_message(
            f"{row.run.id} is number {[run.id for run in now].index(row.run.id) + 1} of {len(now)} in the queue."
        )

    def action_filter(self) -> None:
        """Only runs with these words."""

        def answered(words: str | None) -> None:
            if words is not None:
                self._words = words
                self._draw()

        self.app.push_screen(Ask("Show runs with these words", self._words, "Empty shows all."), answered)

    def action_sort(self) -> None:
        """Another order."""
        self._sort = (self._sort + 1) % len(SORTS)
        self._draw()

    def _show_message(self, words: str, seconds: float = 6.0) -> None:
        self._message, self._message_until = words, time.monotonic() + seconds
        self._show_line()


def about(row: Row) -> str:
    """More than fits the table: model, cause, when it began."""
    view = row.view
    parts = [view.model]
    if view.started:
        parts.append(f"began {time.strftime('%Y-%m-%d %H:%M', time.localtime(view.started))}")
    if (view.over or view.state == "queued") and view.cause:
        parts.append(view.cause)
    elif (left := view.seconds_left()) is not None and not view.over:
        parts.append(f"{duration(left)} left")
    return "   ".join(part for part in parts if part)


def deleted_text(run: RunFolder) -> str:
    """Delete the run and say so, or why not."""
    try:
        delete(run)
    except WorkbenchError as problem:
        return problem.full_message
    return f"{run.id} is deleted."


def _search_text(row: Row) -> str:
    return f"{row.run.id} {row.view.state} {row.view.method} {row.view.model}".lower()
