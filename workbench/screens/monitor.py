"""The monitor: one run, live, read from its folder. It owns nothing of the run; closing it stops nothing.

It polls the folder twice a second (once over SSH) within a time budget, and draws only what changed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from engine.errors import WorkbenchError
from engine.run import control, launch
from engine.run.index import Watch, open_view
from engine.run.store import RunFolder
from workbench.actions import bindings
from workbench.panels.bars import KeyLine
from workbench.panels.chart import Chart, Line
from workbench.panels.figures import brief, number
from workbench.panels.watching import (
    Lines,
    Numbers,
    PinnedPrompt,
    PostMortem,
    Receipt,
    RunBar,
    Samples,
    StatusLine,
    kept_text,
    leading,
)
from workbench.screens.dialog import Item, Pick

if TYPE_CHECKING:
    from engine.run.view import RunView

TABS = ("curves", "samples", "log", "receipt", "config")
LOG_LINES = 400


class MonitorScreen(Screen[None]):
    """Curves, samples, log, receipt and config of one run, and what can be asked of it."""

    NAME = "monitor"
    BINDINGS: ClassVar[list[BindingType]] = bindings("monitor")
    DEFAULT_CSS = """
    MonitorScreen ContentSwitcher { height: 1fr; }
    MonitorScreen #curves { height: 100%; }
    MonitorScreen #small { height: 7; border-top: solid $wb-line; }
    MonitorScreen #foot { height: auto; border-top: solid $wb-line; }
    MonitorScreen Scrolled { padding: 0 1; }
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self.watching: Watch | None = None
        self._curve: str | None = None
        self._said = ""

    @property
    def view(self) -> RunView:
        """What the run's events mean so far."""
        assert self.watching is not None
        return self.watching.view

    def compose(self) -> ComposeResult:
        """Title, tabs, status, keys."""
        yield RunBar()
        yield PostMortem()
        with ContentSwitcher(initial="curves"):
            with Horizontal(id="curves"):
                with Vertical():
                    yield Chart(id="main")
                    with Horizontal(id="small"):
                        yield Chart(id="left")
                        yield Chart(id="right")
                    yield PinnedPrompt()
                yield Numbers()
            yield Samples(id="samples")
            yield Lines(id="log")
            yield Receipt(id="receipt")
            yield Lines(id="config")
        with Vertical(id="foot"):
            yield StatusLine()
            yield KeyLine("monitor")

    def on_mount(self) -> None:
        """Open the run and look at it twice a second; once where the line may be slow."""
        self.watching = open_view(self.folder)
        self.query_one("#main", Chart).focus()
        self._draw()
        self.set_interval(1.0 if os.environ.get("SSH_CONNECTION") else 0.5, self._look)

    def on_unmount(self) -> None:
        """Leave a snapshot for the next opening."""
        if self.watching is not None:
            self.watching.close()

    def on_resize(self) -> None:
        """The one-line parts depend on the width."""
        if self.watching is not None:
            self.call_after_refresh(self._draw)

    # -- looking -------------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        if self.watching is not None and self.watching.poll():
            self._draw()

    def _draw(self) -> None:
        view, tab = self.view, self.query_one(ContentSwitcher).current
        self.query_one(RunBar).show(view, self.watching.loading if self.watching else 1.0)
        self.query_one(PostMortem).show(view)
        self.query_one(StatusLine).show(view, self._said)
        if tab == "curves":
            self._draw_curves(view)
        elif tab == "samples":
            self._show(Samples, view)
        elif tab == "receipt":
            self._show(Receipt, view)
        elif tab == "log" and self.watching is not None:
            self.query_one("#log", Lines).show(self.watching.log(LOG_LINES))

    def _show(self, kind: type[Samples | Receipt | Numbers | PinnedPrompt], view: RunView) -> None:
        panel = self.query_one(kind)
        panel.view = view
        panel.redraw()

    def _draw_curves(self, view: RunView) -> None:
        main, left, right = leading(view.method)
        if self._curve is not None:
            main = (self._curve,)
        marks = [(view.resumed_from, "resumed")] if view.resumed_from else []
        for place, names in (("main", main), ("left", (left,)), ("right", (right,))):
            found = [
                Line(name, view.series[name], (len(view.series[name]), view.segment, view.step))
                for name in names
                if name in view.series
            ]
            newest = view.latest.get(names[0])
            title = names[0] + (f" {number(newest)}" if newest is not None else "")
            self.query_one(f"#{place}", Chart).show(found, marks, title)
        self._show(Numbers, view)
        self._show(PinnedPrompt, view)

    # -- actions -------------------------------------------------------------------------------------------------------
    def action_tab(self, name: str) -> None:
        """Another page of the same run."""
        self.query_one(ContentSwitcher).current = name
        if name == "config":
            try:
                text = self.folder.config.read_text("utf-8", errors="replace")
            except OSError as problem:
                text = f"config.yaml cannot be read: {problem.strerror}"
            self.query_one("#config", Lines).show(text.splitlines())
            self.query_one("#config", Lines).to_top()
        self.query_one("#main" if name == "curves" else f"#{name}").focus()
        self._draw()

    def action_next_curve(self) -> None:
        """The large chart shows the next of all curves, then the method's own again."""
        names = sorted(name for name in self.view.series if not name.startswith("gpu"))
        at = names.index(self._curve) + 1 if self._curve in names else 0
        self._curve = names[at] if at < len(names) else None
        self._draw()

    def action_stop(self) -> None:
        """Ways to stop, each with what it keeps."""
        view = self.view
        if view.over:
            self._tell(f"This run is {view.state}; there is nothing to stop.")
            return
        size = next((entry["bytes"] for entry in reversed(view.checkpoints) if entry.get("bytes")), None)
        seconds = next((entry["seconds"] for entry in reversed(view.checkpoints) if entry.get("seconds")), None)
        cost = f" Writing it takes about {brief(seconds)}." if seconds else ""
        cost += f" It has {size / 2**20:,.0f} MiB." if size else ""
        items = [
            Item("save_stop", Content("save, then stop"), Content(f"  Keeps every step; can go on later.{cost}")),
            Item("checkpoint", Content("save and go on"), Content("  A checkpoint now; the run continues.")),
            Item("end_of_epoch", Content("stop at the end of this epoch"), Content("  Saves there; can go on later.")),
            Item("stop", Content("stop now"), Content(f"  Saves nothing. {kept_text(view)}")),
        ]
        self.app.push_screen(Pick("How should it stop?", items), self._ask)

    def action_checkpoint(self) -> None:
        """A checkpoint, and on."""
        self._ask("checkpoint")

    def _ask(self, do: str | None) -> None:
        if do is None:
            return
        try:
            control.request(self.folder, do, by="the app")
            self._tell(f"{do.replace('_', ' ')}: asked")
        except WorkbenchError as problem:
            self._tell(problem.message)

    def action_resume(self) -> None:
        """Go on from the newest whole checkpoint."""
        try:
            newest, skipped = launch.resume(self.folder)
        except WorkbenchError as problem:
            self._tell(problem.message)
            return
        words = f"goes on from {newest.name}" if newest else "starts again from the beginning"
        words += "".join(f"; {path.name} skipped: {reason}" for path, reason in skipped)
        self._tell(words)

    def _tell(self, words: str) -> None:
        self._said = words
        self.query_one(StatusLine).show(self.view, words)
        self.set_timer(6, self._forget)

    def _forget(self) -> None:
        self._said = ""
        if self.is_mounted:
            self.query_one(StatusLine).show(self.view)
