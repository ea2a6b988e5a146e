"""The pages of one run: curves, samples, log, receipt, config, groups of answers, ranks, experts, and the card of its end.

Owns which page is in view and what it shows. It reads a run's view and its folder and asks nothing of the run: the screen
looks, this draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import ContentSwitcher

from engine.errors import visible
from engine.run.curves import leading
from engine.run.ending import End
from engine.run.store import RunFolder
from engine.run.view import RunView
from workbench.panels.chart import Chart
from workbench.panels.charts import Charts, draw
from workbench.panels.end_card import EndCard
from workbench.panels.expert_load import Experts
from workbench.panels.groups import Groups
from workbench.panels.watching import Lines, Ranks, Receipt, Samples
from workbench.screens.dialog import Ask

LOG_LINES = 1000
TALL, WIDE = 34, 100
PANELS = {"samples": Samples, "receipt": Receipt, "groups": Groups, "ranks": Ranks, "experts": Experts}
FOCUS = {"curves": "#main", "end": "EndCard"}


class RunPages(ContentSwitcher):
    """One page at a time, by its name."""

    DEFAULT_CSS = """
    RunPages { height: 1fr; }
    RunPages #end { height: 100%; }
    RunPages Chart { padding: 0 1; }
    RunPages #last { border-top: solid $wb-line; min-height: 5; }
    RunPages Scrolled { padding: 0 1; }
    RunPages EndCard { padding: 1 1 0 1; }
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(initial="curves")
        self._folder = folder
        self._log_stamp: tuple[int, int] = (-1, -1)
        self._words = ""
        self.rank = 0
        """Whose log is shown; the first one's is that of all."""

    def compose(self) -> ComposeResult:
        """All of them; one is in view."""
        yield Charts(id="curves")
        yield Samples(id="samples")
        yield Lines(id="log")
        yield Receipt(id="receipt")
        yield Lines(id="config")
        yield Groups(id="groups")
        yield Ranks(id="ranks")
        yield Experts(id="experts")
        with Vertical(id="end"):
            yield EndCard()
            yield Chart(id="last")

    def on_mount(self) -> None:
        """Groups are read from the run's own files."""
        self.query_one(Groups).folder = self._folder

    @property
    def page(self) -> str:
        """The page in view."""
        return self.current or "curves"

    def open(self, name: str, log: Callable[[int, int], list[str]]) -> None:
        """Another page, with the keys to it; `log` gives so many newest lines of a rank's log."""
        self.current = name
        if name == "config":
            try:
                text = self._folder.config.read_text("utf-8", errors="replace")
            except OSError as problem:
                text = f"config.yaml cannot be read: {problem.strerror}"
            self.query_one("#config", Lines).show(text.splitlines())
            self.query_one("#config", Lines).to_top()
        self.query_one(FOCUS.get(name, f"#{name}")).focus()
        if name == "log":
            self._log_stamp = (-1, -1)
            self.read_log(log)

    def resize(self, width: int, height: int) -> None:
        """More charts where there is room."""
        charts = self.query_one(Charts)
        charts.set_class(height >= TALL, "-tall")
        charts.set_class(width >= WIDE, "-wide")

    def show(self, view: RunView, end: End) -> None:
        """Draw the page in view."""
        page = self.page
        if page == "curves":
            self.query_one(Charts).show(view)
        elif page == "end":
            self.query_one(EndCard).show(view, end)
            draw(self.query_one("#last", Chart), view, leading(view.method, view.series)[0], small=True)
        elif page in PANELS:
            panel: Any = self.query_one(PANELS[page])
            panel.view = view
            panel.redraw()

    def read_log(self, log: Callable[[int, int], list[str]]) -> None:
        """The newest lines, where the file has changed."""
        try:
            info = os.stat(self._folder.log_of(self.rank))
            stamp = (info.st_mtime_ns, info.st_size)
        except OSError:
            stamp = (0, 0)
        if stamp != self._log_stamp:
            self._log_stamp = stamp
            self.query_one("#log", Lines).show(log(LOG_LINES, self.rank))

    # What keys do to a page

    @property
    def chart(self) -> Chart:
        """The chart that keys act on: the one in focus, else the large one."""
        focused = self.screen.focused
        return focused if isinstance(focused, Chart) else self.query_one("#main", Chart)

    def chart_do(self, do: str) -> None:
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

    def group(self, by: int) -> str:
        """An older group of answers, or a newer one; says which."""
        if self.page != "groups":
            return "Groups of answers are on page 7."
        return self.query_one(Groups).go(by)

    def next_curve(self, view: RunView, by: int) -> str:
        """The large chart shows another of all curves, after the last the method's own again; says which."""
        return self.query_one(Charts).next_curve(view, by)

    def find(self, tell: Callable[[str], None]) -> None:
        """The next line of the log or the config with some words, which are asked for."""
        if self.page not in ("log", "config"):
            tell("Words can be found on the pages log and config.")
            return
        lines = self.query_one(f"#{self.page}", Lines)

        def answered(words: str | None) -> None:
            if words:
                self._words = words
                if not lines.find(words):
                    tell(f"No line here holds {visible(words)[:40]}.")

        self.app.push_screen(Ask("Find the next line with these words", self._words), answered)
