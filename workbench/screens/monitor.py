"""The monitor: one run, live, read from its folder. It owns nothing of the run; closing it stops nothing.

It polls the folder twice a second (once over SSH) within a time budget, and draws only what changed. What may take
long (checking a checkpoint, starting a supervisor) runs in a thread and answers on the status line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from engine.errors import WorkbenchError, visible
from engine.figures import brief
from engine.resume import resume
from engine.run import checkpoint, control, proposals, stack
from engine.run.best import best_words
from engine.run.curves import leading
from engine.run.data_record import DataChanged
from engine.run.index import Watch, open_view
from engine.run.stopping import NAMES
from engine.run.store import RunFolder
from workbench.actions import bindings, key_line
from workbench.panels.bars import KeyLine
from workbench.panels.cause import ENDS, PostMortem
from workbench.panels.chart import Chart
from workbench.panels.charts import Charts, draw
from workbench.panels.groups import Groups
from workbench.panels.paint import clean
from workbench.panels.watching import (
    Lines,
    Receipt,
    RunBar,
    Samples,
    StatusLine,
)
from workbench.screens.batch import BatchScreen
from workbench.screens.dialog import Ask, Item, Pick, Show
from workbench.screens.leave import goes_on
from workbench.screens.stop import StopMenu

if TYPE_CHECKING:
    from engine.run.view import RunView

LOG_LINES = 1000
LOOK_SECONDS, LOOK_SECONDS_SSH = 0.5, 1.0
SAID_SECONDS = 6.0
TALL, WIDE = 34, 100
PANELS = {"samples": Samples, "receipt": Receipt, "groups": Groups}
FOCUS = {"curves": "#main", "cause": "PostMortem"}


class Answered(Message):
    """A thread is through: with words for the status line, or with what Enter on the card would do."""

    def __init__(self, what: str, words: str, step: int | None = None) -> None:
        super().__init__()
        self.what, self.words, self.step = what, words, step


class MonitorScreen(Screen[None]):
    """Curves, samples, log, receipt and config of one run, and what can be asked of it."""

    NAME = "monitor"
    BINDINGS: ClassVar[list[BindingType]] = bindings("monitor")
    DEFAULT_CSS = """
    MonitorScreen ContentSwitcher { height: 1fr; }
    MonitorScreen #cause { height: 100%; }
    MonitorScreen Chart { padding: 0 1; }
    MonitorScreen #last { border-top: solid $wb-line; }
    MonitorScreen #foot { height: auto; border-top: solid $wb-line; }
    MonitorScreen Scrolled { padding: 0 1; }
    MonitorScreen PostMortem { padding: 1 1 0 1; }
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self.watching: Watch | None = None
        self._said = ""
        self._said_until = 0.0
        self._asked: tuple[str, str, float] | None = None
        self._log_stamp: tuple[int, int] = (-1, -1)
        self._was_over = False
        self._lived = False
        self._way_on = ""
        self._words = ""

    @property
    def view(self) -> RunView:
        """What the run's events mean so far."""
        assert self.watching is not None
        return self.watching.view

    def compose(self) -> ComposeResult:
        """Title, pages, status, keys."""
        yield RunBar()
        with ContentSwitcher(initial="curves"):
            yield Charts(id="curves")
            yield Samples(id="samples")
            yield Lines(id="log")
            yield Receipt(id="receipt")
            yield Lines(id="config")
            yield Groups(id="groups")
            with Vertical(id="cause"):
                yield PostMortem()
                yield Chart(id="last")
        with Vertical(id="foot"):
            yield StatusLine()
            yield KeyLine("monitor")

    def on_mount(self) -> None:
        """Open the run and look at it twice a second; once where the line may be slow."""
        self.watching = open_view(self.folder)
        self.app.watched = self.folder  # type: ignore[attr-defined]
        self.query_one(Groups).folder = self.folder
        self._lived = not self.view.over
        self._set_size()
        self.query_one("#main", Chart).focus()
        self._follow_state()
        self._draw()
        self.set_interval(LOOK_SECONDS_SSH if os.environ.get("SSH_CONNECTION") else LOOK_SECONDS, self._look)

    def on_unmount(self) -> None:
        """Leave a snapshot for the next opening, and a word for a run that the list of runs does not hold."""
        if self.watching is None:
            return
        known: Path = self.app.runs_dir  # type: ignore[attr-defined]
        if not self.view.over and self.folder.path.parent != known:
            self.app.goodbye.append(goes_on(self.folder))  # type: ignore[attr-defined]
        kept = self.view.committed
        if self._lived and self.view.state == "finished" and kept:
            path = visible(str(self.folder.checkpoints / f"checkpoint-{kept[-1]}"))
            words = f"{self.folder.id} is finished; its model is in {path}."
            if best := best_words(self.view):
                words = f"{words[:-1]}; {best}."
            if words not in self.app.goodbye:  # type: ignore[attr-defined]
                self.app.goodbye.append(words)  # type: ignore[attr-defined]
        self.watching.close()

    def on_resize(self) -> None:
        """More charts where there is room; the one-line parts depend on the width."""
        if self.watching is not None:
            self._set_size()
            self.call_after_refresh(self._draw)

    def _set_size(self) -> None:
        charts = self.query_one(Charts)
        charts.set_class(self.app.size.height >= TALL, "-tall")
        charts.set_class(self.app.size.width >= WIDE, "-wide")

    # -- looking -------------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        if self.watching is None:
            return
        changed = self.watching.poll()
        if self._said and time.monotonic() >= self._said_until:
            self._said, changed = "", True
        if self.is_current and self.page == "log":
            self._draw_log()
        if changed or self._waiting():
            self._follow_state()
            self._draw()

    @property
    def page(self) -> str:
        """The page that is shown."""
        return self.query_one(ContentSwitcher).current or "curves"

    def _follow_state(self) -> None:
        """A run that fails opens on its card; one that goes on again leaves it."""
        over = self.view.state in ENDS
        if over and not self._was_over:
            self._way_on = ""
            self.run_worker(self._find_way_on, thread=True, exclusive=True, group="way on", exit_on_error=True)
            if self.page == "curves":
                self.action_tab("cause")
        elif self._was_over and not over and self.page == "cause":
            self.action_tab("curves")
        self._was_over = over

    def _draw(self) -> None:
        view, page = self.view, self.page
        self.query_one(RunBar).show(view, self.watching.loading if self.watching else 1.0)
        self.query_one(StatusLine).show(view, self._said, self._waiting())
        also = "failed" if view.state in ENDS else "groups" if view.rollouts else "plain"
        state = "running" if not view.over else "finished" if view.state == "finished" else "ended early"
        self.query_one(KeyLine).use(key_line("monitor", state, also), page)
        if page == "curves":
            self.query_one(Charts).show(view)
        elif page == "cause":
            self.query_one(PostMortem).show(view, self._way_on)
            draw(self.query_one("#last", Chart), view, leading(view.method, view.series)[0], small=True)
        elif page in PANELS:
            self._show(PANELS[page], view)

    def _show(self, kind: type[Any], view: RunView) -> None:
        panel = self.query_one(kind)
        panel.view = view
        panel.redraw()

    def _draw_log(self) -> None:
        try:
            found = os.stat(self.folder.log)
            stamp = (found.st_mtime_ns, found.st_size)
        except OSError:
            stamp = (0, 0)
        if stamp != self._log_stamp and self.watching is not None:
            self._log_stamp = stamp
            self.query_one("#log", Lines).show(self.watching.log(LOG_LINES))

    def _waiting(self) -> str:
        """A request that the run has not answered yet, in words."""
        if self._asked is None:
            return ""
        name, do, since = self._asked
        if control.answer(self.view, name) is not None or self.view.over:
            self._asked = None
            return ""
        return f"{NAMES[do]}: asked {brief(time.monotonic() - since)} ago; the run answers between two steps"

    # -- pages and curves ----------------------------------------------------------------------------------------------
    def action_tab(self, name: str) -> None:
        """Another page of the same run."""
        if name == "cause" and self.view.state not in ENDS:
            self._tell(f"This run is {self.view.state}; there is nothing to explain.")
            return
        self._said = ""
        self.query_one(ContentSwitcher).current = name
        if name == "config":
            try:
                text = self.folder.config.read_text("utf-8", errors="replace")
            except OSError as problem:
                text = f"config.yaml cannot be read: {problem.strerror}"
            self.query_one("#config", Lines).show(text.splitlines())
            self.query_one("#config", Lines).to_top()
        self.query_one(FOCUS.get(name, f"#{name}")).focus()
        if name == "log":
            self._log_stamp = (-1, -1)
            self._draw_log()
        self._draw()

    def action_group(self, by: int) -> None:
        """An older group of answers, or a newer one."""
        if self.page != "groups":
            self._tell("Groups of answers are on page 7.")
            return
        self._tell(self.query_one(Groups).go(by))
        self._draw()

    def action_next_curve(self, by: int = 1) -> None:
        """The large chart shows another of all curves; after the last the method's own again."""
        self._tell(self.query_one(Charts).next_curve(self.view, by))
        self._draw()

    @property
    def chart(self) -> Chart:
        """The chart that keys act on: the one in focus, else the large one."""
        return self.focused if isinstance(self.focused, Chart) else self.query_one("#main", Chart)

    def action_chart(self, do: str) -> None:
        """One of the chart's own actions, whichever part has the focus."""
        chart = self.chart
        {
            "log": chart.action_log,
            "smooth": chart.action_smooth,
            "in": lambda: chart.action_zoom(0.5),
            "out": lambda: chart.action_zoom(2),
            "whole": chart.action_whole,
            "back": lambda: chart.action_cursor(-1),
            "on": lambda: chart.action_cursor(1),
        }[do]()

    def action_batch(self) -> None:
        """The rows behind the point under the cursor, or behind the newest step."""
        if self.page == "cause":
            self.action_resume()
            return
        self._open_batch(self.chart.cursor if self.chart.cursor is not None else self.view.step)

    @on(Chart.Picked)
    def _picked(self, event: Chart.Picked) -> None:
        event.stop()
        self._open_batch(event.step)

    def _open_batch(self, step: int) -> None:
        if not self.view.step:
            self._tell("There is no step yet.")
            return
        self.app.push_screen(BatchScreen(self.folder, step))

    def action_find(self) -> None:
        """The next line of the log or the config with some words."""
        if self.page not in ("log", "config"):
            self._tell("Words can be found on the pages log and config.")
            return
        lines = self.query_one(f"#{self.page}", Lines)

        def answered(words: str | None) -> None:
            if words:
                self._words = words
                if not lines.find(words):
                    self._tell(f"No line here holds {visible(words)[:40]}.")

        self.app.push_screen(Ask("Find the next line with these words", self._words), answered)

    def action_back(self) -> None:
        """Takes the cursor away; then back to the curves; then out."""
        if self.chart.clear_cursor():
            return
        if self.page not in ("curves", "cause"):
            self.action_tab("cause" if self.view.state in ENDS else "curves")
        else:
            self.app.action_leave()  # type: ignore[attr-defined]

    # -- asking the run ------------------------------------------------------------------------------------------------
    def action_stop(self) -> None:
        """Ways to stop, each with what it keeps."""
        if self.view.over:
            self._tell(f"This run is {self.view.state}; there is nothing to stop.")
        else:
            self.app.push_screen(StopMenu(self.view), self._ask)

    def action_checkpoint(self) -> None:
        """A checkpoint, and on."""
        self._ask("checkpoint")

    def _ask(self, do: str | None) -> None:
        if do is None:
            return
        try:
            name = control.request(self.folder, do, by="the app")
        except WorkbenchError as problem:
            self._tell(problem.told)
            return
        self._asked = (name, do, time.monotonic())
        self._draw()

    def action_chat(self) -> None:
        """Talk to the newest checkpoint, beside its base."""
        from workbench.screens.chat import ChatScreen, chat_of

        try:
            self.app.push_screen(ChatScreen(chat_of(self.folder)))
        except WorkbenchError as problem:
            self._tell(problem.told)

    def action_export(self) -> None:
        """Take the newest checkpoint's model along."""
        from engine.export.places import source
        from workbench.screens.export import ExportScreen

        try:
            source(self.folder, hashes=False)
        except WorkbenchError as problem:
            self._tell(problem.told)
        else:
            self.app.push_screen(ExportScreen(self.folder))

    def action_stack(self) -> None:
        """Where the worker is at this moment."""
        self._tell("asking the worker where it is …", 60)
        self.run_worker(self._stack, thread=True, exclusive=True, group="stack", exit_on_error=True)

    def _stack(self) -> None:
        try:
            self.post_message(Answered("stack", stack.ask(self.folder)))
        except WorkbenchError as problem:
            self.post_message(Answered("said", problem.told))

    def action_resume(self) -> None:
        """Go on from the newest whole checkpoint."""
        if not self.view.over:
            self._tell(f"This run is {self.view.state}; it goes on as it is.")
            return
        self._begin_resume()

    def _begin_resume(self, accept_data: bool = False) -> None:
        self._tell("comparing the rows, looking for the newest whole checkpoint …", 600)
        self.run_worker(
            lambda: self._resume(accept_data), thread=True, exclusive=True, group="resume", exit_on_error=True
        )

    def _resume(self, accept_data: bool) -> None:
        try:
            self.post_message(Answered("said", resumed_words(self.folder, accept_data)))
        except DataChanged as problem:
            self.post_message(Answered("rows", problem.message))

    def _find_way_on(self) -> None:
        """What resuming would start from, without reading every byte of it."""
        newest, skipped = checkpoint.newest_valid(self.folder, hashes=False)
        why = ": no checkpoint is whole" if skipped and not newest else ""
        why += "".join(f"; {path.name} is passed over ({reason})" for path, reason in skipped[:2])
        words = proposals.way_on(self.view.cause_kind, newest.name if newest else None, why)
        self.post_message(Answered("way on", words, checkpoint.step_of(newest) if newest else None))

    @on(Answered)
    def _answered(self, event: Answered) -> None:
        if event.what == "way on":
            self._way_on, self.query_one(PostMortem).kept_step = event.words, event.step
            if self.page == "cause":
                self._draw()
        elif event.what == "stack":
            self._tell("")
            self.app.push_screen(Show(f"Where the worker of {clean(self.folder.id)} is", event.words))
        elif event.what == "rows":
            self._tell("The rows are not those the run was trained on.")
            ask_about_rows(self, self.folder, event.words, lambda: self._begin_resume(accept_data=True))
        else:
            self._tell(event.words)

    def _tell(self, words: str, seconds: float = SAID_SECONDS) -> None:
        self._said, self._said_until = words, time.monotonic() + seconds
        self.query_one(StatusLine).show(self.view, words, self._waiting())


def resumed_words(folder: RunFolder, accept_data: bool = False) -> str:
    """Resume, and say from where, what was passed over and what is other than before; or why it cannot be.

    Raises DataChanged, which asks for an answer.
    """
    try:
        newest, skipped = resume(folder, accept_data=accept_data)
    except DataChanged:
        raise
    except WorkbenchError as problem:
        return problem.told
    words = f"{folder.id} goes on from {newest.name}" if newest else f"{folder.id} starts again from the beginning"
    return words + "".join(f"; {path.name} was passed over ({reason})" for path, reason in skipped[:3])


def ask_about_rows(screen: Screen[None], folder: RunFolder, words: str, go_on: Callable[[], None]) -> None:
    """Name the rows that differ and let a person decide; leaving leaves the run as it is."""
    items = [
        Item("leave", Content("Leave the run as it is"), Content("Put the rows back, then resume.")),
        Item("accept", Content("Go on with the rows as they are now"), Content("The run's log keeps what differs.")),
    ]

    def answered(choice: str | None) -> None:
        if choice == "accept":
            go_on()

    note = f"{clean(words)}\n\nworkbench preview {clean(folder.config)} --against {clean(folder.id)} shows every token."
    screen.app.push_screen(Pick(note, items), answered)
