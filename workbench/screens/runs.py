"""The list of runs: state, where each stands, its loss with a small curve, age. Read from the folders themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.errors import WorkbenchError
from engine.run import launch
from engine.run.checkpoint import size_of
from engine.run.delete import delete
from engine.run.index import peek
from engine.run.store import RunFolder, runs_in
from workbench.actions import bindings
from workbench.panels.bars import Bar, KeyLine, TitleBar
from workbench.panels.drawn import Drawn
from workbench.panels.figures import brief, number, size
from workbench.panels.glyphs import ascii_only, look, sign
from workbench.panels.paint import Line, clean, cut
from workbench.screens.dialog import Ask, Item, Pick

if TYPE_CHECKING:
    from engine.run.view import RunView

LOOK_SECONDS = 2.0
SORTS = ("newest", "state", "name", "loss")
SPARK = "▁▂▃▄▅▆▇█"
STYLE = {"running": "good", "finished": "good", "failed": "bad", "lost": "bad", "stopped": "warn", "stopping": "warn"}


@dataclass(frozen=True)
class Row:
    """One run as the list shows it."""

    run: RunFolder
    view: RunView
    bytes: int
    curve: tuple[float, ...]

    @property
    def loss(self) -> float | None:
        """The newest loss."""
        return self.view.latest.get("loss")


class Listed(Message):
    """The folders were read."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


class RunTable(Drawn, can_focus=True):
    """The rows, one a line, with a cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]
    rows: Sequence[Row] = ()
    at = 0
    empty = "Reading the runs …"

    def lines(self, width: int) -> list[Line]:
        """The head, then a line a run."""
        if not self.rows:
            return [[], *[[(" " + text, "dim")] for text in self.empty.split("\n")]]
        wide = width >= 100
        head = f" {'state':10} {'run':15} {'method':8} {'step':>13}  {'loss':>8}  {'':8} {'age':>6}"
        made: list[Line] = [[(cut(head + (f" {'disk':>9}  model" if wide else ""), width), "dim")]]
        now = time.time()
        for row in self.rows:
            view = row.view
            step = f"{view.step:,}" + (f" of {view.max_steps:,}" if view.max_steps else "")
            age = brief(now - view.started) if view.started else "-"
            made.append(
                [
                    (f" {sign(view.state)} {look(view.state).word:8}", STYLE.get(view.state, "dim")),
                    (f" {cut(clean(view.id or row.run.id), 15):15}", "given"),
                    (f" {cut(clean(view.method), 8):8} {cut(step, 13):>13}  {number(row.loss):>8}  ", "value"),
                    (f"{spark(row.curve):8}", "accent"),
                    (f" {age:>6}", "dim"),
                    (f" {size(row.bytes):>9}  {clean(view.model)}" if wide else "", "dim"),
                ]
            )
        return made

    def ground(self, y: int) -> str:
        """The cursor's line stands out."""
        return "cursor" if self.rows and y == self.at + 1 else ""

    @property
    def chosen(self) -> Row | None:
        """The run under the cursor."""
        return self.rows[self.at] if 0 <= self.at < len(self.rows) else None

    def action_move(self, by: int) -> None:
        """The cursor up or down."""
        self.at = max(0, min(self.at + by, len(self.rows) - 1))
        self.redraw()
        self.show_lines(self.at + 1 if self.at else 0)


def spark(values: Sequence[float]) -> str:
    """A small curve of at most eight signs."""
    kept = [value for value in values if value == value][-240:]
    if len(kept) < 2 or ascii_only():
        return ""
    groups = [kept[len(kept) * i // 8 : len(kept) * (i + 1) // 8] for i in range(8)]
    means = [sum(group) / len(group) for group in groups if group]
    low, high = min(means), max(means)
    return "".join(SPARK[round(7 * (mean - low) / (high - low))] if high > low else SPARK[0] for mean in means)


class RunsScreen(Screen[None]):
    """Runs of one folder: open, resume, delete, filter, sort."""

    NAME = "runs"
    BINDINGS: ClassVar[list[BindingType]] = bindings("runs")
    DEFAULT_CSS = """
    RunsScreen RunTable { height: 1fr; }
    """

    def __init__(self, runs_dir: Path) -> None:
        super().__init__()
        self.runs_dir = Path(runs_dir)
        self._all: list[Row] = []
        self._words = ""
        self._sort = 0

    def compose(self) -> ComposeResult:
        """Title, table, a line for answers, keys."""
        yield TitleBar()
        yield RunTable()
        yield Said()
        yield KeyLine("runs")

    def on_mount(self) -> None:
        """Read the folders now and every other second."""
        self.query_one(RunTable).focus()
        self._look()
        self.set_interval(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self.is_current:
            self.run_worker(self._read, thread=True, exclusive=True, group="runs", exit_on_error=True)

    def _read(self) -> None:
        rows = []
        for run in runs_in(self.runs_dir):
            if launch.unattended(run):
                launch.attend(run)
            view = peek(run).view
            series = view.series.get("loss")
            curve = tuple(series.points(width=240)[1]) if series else ()
            rows.append(Row(run, view, size_of(run.path), curve))
        self.post_message(Listed(rows))

    def on_listed(self, event: Listed) -> None:
        """New rows: keep the cursor on its run."""
        self._all = event.rows
        self._draw()

    def _draw(self) -> None:
        table = self.query_one(RunTable)
        before = table.chosen.run.id if table.chosen else None
        words = self._words.lower().split()
        rows = [row for row in self._all if all(word in _words_of(row) for word in words)]
        keys = {
            "newest": lambda row: -(row.view.started or 0),
            "state": lambda row: (row.view.state, row.run.id),
            "name": lambda row: row.run.id,
            "loss": lambda row: row.loss if row.loss is not None else float("inf"),
        }
        rows.sort(key=keys[SORTS[self._sort]])
        table.rows = rows
        ids = [row.run.id for row in rows]
        table.at = ids.index(before) if before in ids else min(table.at, max(0, len(rows) - 1))
        table.empty = (
            f"No run matches {self._words!r}. Press / to change that."
            if self._all
            else "No runs here yet.\nq goes back; `workbench demo` trains a tiny model in a minute or two."
        )
        table.redraw()
        what = f"{len(rows)} of {len(self._all)} runs" if words else f"{len(rows)} runs"
        self.query_one(TitleBar).show("runs", False, clean(str(self.runs_dir))[-40:], f"{what}, by {SORTS[self._sort]}")

    # -- actions -------------------------------------------------------------------------------------------------------
    def action_open(self) -> None:
        """Watch the run under the cursor."""
        from workbench.screens.monitor import MonitorScreen

        if (row := self.query_one(RunTable).chosen) is not None:
            self.app.push_screen(MonitorScreen(row.run))

    def action_resume(self) -> None:
        """Go on with a run that ended early."""
        row = self.query_one(RunTable).chosen
        if row is None:
            return
        try:
            newest, skipped = launch.resume(row.run)
        except WorkbenchError as problem:
            self._tell(problem.message)
            return
        words = f"{row.run.id} goes on from {newest.name}" if newest else f"{row.run.id} starts again"
        self._tell(words + "".join(f"; {path.name} skipped: {reason}" for path, reason in skipped))
        self._look()

    def action_delete(self) -> None:
        """Delete the run, after saying what would be lost."""
        row = self.query_one(RunTable).chosen
        if row is None:
            return
        kept = [entry["step"] for entry in row.view.checkpoints if entry.get("state") == "committed"]
        lost = f"{size(row.bytes)}, {len(kept)} checkpoints" + (f" (newest: step {max(kept)})" if kept else "")
        items = [
            Item("keep", Content("keep it")),
            Item(
                "delete",
                Content(f"delete {clean(row.run.id)} for good"),
                Content(f"  Lost: {lost}, its curves and log."),
            ),
        ]

        def answered(answer: str | None) -> None:
            if answer == "delete":
                try:
                    delete(row.run)
                    self._tell(f"{row.run.id} is deleted.")
                except WorkbenchError as problem:
                    self._tell(problem.message)
                self._look()

        self.app.push_screen(Pick(f"Delete {clean(row.run.id)}?", items), answered)

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

    def _tell(self, words: str) -> None:
        self.query_one(Said).say(Content.styled(f" {clean(words)}", "$accent"))


def _words_of(row: Row) -> str:
    return f"{row.run.id} {row.view.state} {row.view.method} {row.view.model}".lower()


class Said(Bar):
    """What came of the last action."""

    DEFAULT_CSS = "Said { height: 2; border-top: solid $wb-line; }"
