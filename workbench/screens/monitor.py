"""The monitor: one run, live, read from its folder. It owns nothing of the run; closing it stops nothing.

It polls the folder twice a second (once over SSH) within a time budget, and draws only what changed. The pages are
`RunPages`', what is done with the run is `RunActions`'.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import Screen

from engine.errors import visible
from engine.run.best import best_text
from engine.run.ending import End, end_of
from engine.run.index import Watch, open_view
from engine.run.store import RunFolder
from workbench.actions import bindings, key_line
from workbench.calling import run_name
from workbench.panels.bars import KeyLine
from workbench.panels.chart import Chart
from workbench.panels.end_card import BAD
from workbench.panels.watching import RunBar, StatusLine
from workbench.screens.batch import BatchScreen
from workbench.screens.leave import goes_on
from workbench.screens.run_actions import RunActions
from workbench.screens.run_pages import RunPages
from workbench.screens.screen_thread import SECONDS

if TYPE_CHECKING:
    from engine.run.view import RunView

LOOK_SECONDS, LOOK_SECONDS_SSH = 0.5, 1.0
WIDE = 110  # columns in which the key line has room for each page of a mixture


def _whose_log(run: RunFolder, rank: int, many: int) -> str:
    log = visible(run.log_of(rank).name)
    return f"{log}: rank {rank} of {many}" if rank else f"{log}: all {many} ranks together"


class MonitorScreen(Screen[None]):
    """Curves, samples, log, receipt and config of one run, and what can be asked of it."""

    NAME = "monitor"
    BINDINGS: ClassVar[list[BindingType]] = bindings("monitor")
    DEFAULT_CSS = """
    MonitorScreen #foot { height: auto; border-top: solid $wb-line; }
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self.watching: Watch | None = None
        self.pages = RunPages(folder)
        self.status = StatusLine()
        started = lambda run: self.app.push_screen(MonitorScreen(run))  # noqa: E731
        self.actions = RunActions(self, self._show_message, self._read_end, started)
        self._end = End()
        self._was_over = self._lived = False

    @property
    def view(self) -> RunView:
        """What the run's events mean so far."""
        assert self.watching is not None
        return self.watching.view

    def compose(self) -> ComposeResult:
        """Title, pages, status, keys."""
        yield RunBar()
        yield self.pages
        with Vertical(id="foot"):
            yield self.status
            yield KeyLine("monitor")

    def on_mount(self) -> None:
        """Open the run and look at it twice a second; once where the line may be slow."""
        self.watching = open_view(self.folder)
        self.app.watched = self.folder  # type: ignore[attr-defined]
        self._lived = not self.view.over
        self.pages.resize(*self.app.size)
        self.pages.open("curves", self.watching.log)
        self._follow_state()
        self._draw()
        self.set_interval(LOOK_SECONDS_SSH if os.environ.get("SSH_CONNECTION") else LOOK_SECONDS, self._poll)

    def on_unmount(self) -> None:
        """Leave a snapshot for the next opening, and a word for a run that the list of runs does not hold."""
        self.actions.close()
        if self.watching is None:
            return
        known: Path = self.app.runs_dir  # type: ignore[attr-defined]
        if not self.view.over and self.folder.path.parent != known:
            self.app.goodbye.append(goes_on(self.folder))  # type: ignore[attr-defined]
        kept = self.view.committed
        if self._lived and self.view.state == "finished" and kept:
            path = visible(str(self.folder.checkpoints / f"checkpoint-{kept[-1]}"))
            words = f"{self.folder.id} is finished; its model is in {path}."
            if best := best_text(self.view):
                words = f"{words[:-1]}; {best}."
            if words not in self.app.goodbye:  # type: ignore[attr-defined]
                self.app.goodbye.append(words)  # type: ignore[attr-defined]
        self.watching.close()

    def on_resize(self) -> None:
        """More charts where there is room; the one-line parts depend on the width."""
        if self.watching is not None:
            self.pages.resize(*self.app.size)
            self.call_after_refresh(self._draw)

    # Looking

    def _poll(self) -> None:
        if self.watching is None:
            return
        changed = self.watching.poll() or self.status.over
        if self.is_current and self.pages.page == "log":
            self.pages.read_log(self.watching.log)
        if changed or self.actions.waiting(self.view) or self.view.state == "starting":  # seconds go on
            self._follow_state()
            self._draw()

    def _follow_state(self) -> None:
        """A run that ends turns to its card, but from the curves alone; one that goes on again leaves it."""
        over = self.view.state in BAD or (self.view.state == "finished" and bool(self.view.committed))
        before, self._was_over = self._was_over, over
        if over and not before:
            self._end = End()
            self._read_end()
            if self.pages.page == "curves":
                self.action_tab("end")
        elif before and not over and self.pages.page == "end":
            self.action_tab("curves")

    def _read_end(self) -> None:
        """What there is to say about the end, found out beside: a thread reads the folder."""

        def found(end: End) -> None:
            self._end = end
            self._draw()

        def read() -> None:
            self.call_later(found, end_of(view, self.folder, run_name(self.folder)))

        if self._was_over or self.view.over:
            view = self.view.copy()
            self.run_worker(read, thread=True, exclusive=True, group="end", exit_on_error=True)
        self._draw()

    def _draw(self) -> None:
        view, watching = self.view, self.watching
        self.query_one(RunBar).show(view, watching.loading if watching else 1.0)
        rank = self.pages.rank if self.pages.page == "log" else 0
        of = _whose_log(self.folder, rank, view.world_size) if rank else ""
        self.status.show(view, self.actions.waiting(view), self._end, of)
        page = "groups" if view.rollouts else "card" if self._was_over else "ranks" if view.ranks else ""
        also = {page or ("" if view.experts else "plain"), "experts" if view.experts else ""} - {""}
        if len(also) == 1 or self.app.size.width >= WIDE:
            also.add("room")
        state = "running" if not view.over else "finished" if view.state == "finished" else "ended early"
        self.query_one(KeyLine).use(key_line("monitor", state, *also), self.pages.page)
        self.pages.show(view, self._end)

    # Keys

    def action_tab(self, name: str) -> None:
        """Another page of the same run."""
        if name == "end" and not self._was_over:
            self._show_message(f"This run is {self.view.state}; page 6 is for one that is finished or has failed.")
            return
        self.status.show_message("", 0)
        if self.watching is not None:
            self.pages.open(name, self.watching.log)
        self._draw()

    def action_group(self, by: int) -> None:
        """An older group of answers, or a newer one."""
        self._show_message(self.pages.group(by))
        self._draw()

    def action_rank(self, by: int) -> None:
        """The log of the next rank; that of all stands for the first."""
        many = self.view.world_size
        if many == 1:
            self._show_message("This run has one process; its log is on page 3.")
            return
        self.pages.rank = (self.pages.rank + by) % many
        self.action_tab("log")
        self._show_message(_whose_log(self.folder, self.pages.rank, many))

    def action_next_curve(self, by: int = 1) -> None:
        """The large chart shows another of all curves; after the last the method's own again."""
        self._show_message(self.pages.next_curve(self.view, by))
        self._draw()

    def action_chart(self, do: str) -> None:
        """One of the chart's own actions, whichever part has the focus."""
        self.pages.chart_do(do)

    @on(Chart.Picked)
    def action_batch(self, picked: Chart.Picked | None = None) -> None:
        """The rows behind the point under the cursor, or behind the newest step; on the card the first way on."""
        if picked is not None:
            picked.stop()
        elif self.pages.page == "end":
            self.actions.first_way(self.folder, self.view.copy(), self._end)
            return
        if not self.view.step:
            self._show_message("There is no step yet.")
            return
        cursor = picked.step if picked is not None else self.pages.chart.cursor
        self.app.push_screen(BatchScreen(self.folder, cursor if cursor is not None else self.view.step))

    def action_find(self) -> None:
        """The next line of the log or the config with some words."""
        self.pages.find(self._show_message)

    def action_back(self) -> None:
        """Takes the cursor away; then back to the first page; then out."""
        if self.pages.chart.clear_cursor():
            return
        if self.pages.page not in ("curves", "end"):
            self.action_tab("end" if self._was_over else "curves")
        else:
            self.app.action_leave()  # type: ignore[attr-defined]

    def action_do(self, what: str) -> None:
        """Something with the run itself."""
        self.actions.do(what, self.folder, self.view)

    def _show_message(self, words: str, seconds: float = SECONDS) -> None:
        self.status.show_message(words, seconds)
        self.status.show(self.view, self.actions.waiting(self.view), self._end)
