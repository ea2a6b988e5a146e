"""Two to four runs together: one curve of each on one chart, then what differs in their settings and their answers.

It reads the runs' folders as the monitor does and owns nothing of them. Runs that go on are followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.errors import WorkbenchError
from engine.run.compare import answers, differences, extremes, shared_curves
from engine.run.index import Watch, open_view
from engine.run.store import RunFolder
from workbench.actions import bindings
from workbench.panels import raster
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.chart import Chart
from workbench.panels.curve import Line as Curve
from workbench.panels.drawn import Scrolled
from workbench.panels.figures import count
from workbench.panels.glyphs import ascii_only, look, sign
from workbench.panels.paint import Line, clean, cut, paragraph, wrap
from workbench.panels.units import in_unit, titled, worded
from workbench.panels.watching import answered

LOOK_SECONDS = 1.0
GAP = 2


class Read(Message):
    """The configs were read: their mappings, or why one could not be."""

    def __init__(self, configs: Sequence[Mapping[str, Any]], problem: str = "") -> None:
        super().__init__()
        self.configs, self.problem = configs, problem


class Table(Scrolled):
    """A column a run: where it stands, the ends of the curve, settings that differ, answers to the same prompts."""

    DEFAULT_CSS = "Table { height: 1fr; padding: 0 1; border-top: solid $wb-line; }"
    watches: Sequence[Watch] = ()
    curve = ""
    read: Read | None = None

    def lines(self, width: int) -> list[Line]:
        """All of it, top to bottom."""
        views = [watch.view for watch in self.watches]
        signs = raster.STYLE_SIGNS_PLAIN if ascii_only() else raster.STYLE_SIGNS
        heads = [f"{signs[place % len(signs)]} {clean(view.id)}" for place, view in enumerate(views)]
        changed = differences(self.read.configs) if self.read and not self.read.problem else []
        label = min(width // 3, max([18, *(len(path) for path, _ in changed)]) + GAP)
        made = _row("", heads, label, width, "given")
        made += _row("state", [f"{sign(view.state)} {look(view.state).word}" for view in views], label, width)
        made += _row("step", [count(view.step) for view in views], label, width)
        made += self._ends(label, width)
        made += [[], [("Settings that differ", "bold")]]
        if self.read is None:
            made.append([("reading …", "dim")])
        elif self.read.problem:
            made += paragraph(clean(self.read.problem), width, "warn")
        elif not changed:
            made.append([("none: their configs are the same", "dim")])
        for path, values in changed:
            made += _row(path, [_words(value) for value in values], label, width)
        for prompt, samples in answers(views):
            made += [[], *paragraph(clean(prompt), width, "accent")]
            for head, sample in zip(heads, samples, strict=True):
                text = f"step {count(sample['step'])}: {answered(sample)}" if sample else "was not asked"
                made += _row(head, [text], label, width)
        return made

    def _ends(self, label: int, width: int) -> list[Line]:
        if not self.curve:
            return []
        views = [watch.view for watch in self.watches]
        found = [extremes(view.series[self.curve]) if self.curve in view.series else None for view in views]
        newest = [worded(self.curve, view.latest.get(self.curve)) for view in views]
        made = _row(titled(self.curve), newest, label, width)
        for words, end in (("  lowest", 0), ("  highest", 1)):
            made += _row(words, [worded(self.curve, each[end] if each else None) for each in found], label, width)
        return made


class CompareScreen(Screen[None]):
    """Runs side by side."""

    NAME = "compare"
    BINDINGS: ClassVar[list[BindingType]] = bindings("compare")
    DEFAULT_CSS = """
    CompareScreen #head { height: 2; border-bottom: solid $wb-line; }
    CompareScreen Chart { padding: 0 1; }
    """

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        super().__init__()
        self._runs = tuple(runs)
        self._watches: list[Watch] = []
        self._at = 0

    def compose(self) -> ComposeResult:
        """Head, chart, table, keys."""
        head = Bar()
        head.id = "head"
        yield head
        yield Chart()
        yield Table()
        yield KeyLine("compare")

    def on_mount(self) -> None:
        """Open the runs, and look again at those that go on."""
        self._watches = [open_view(run) for run in self._runs]
        self.query_one(Table).watches = self._watches
        self.query_one(Chart).focus()
        self.run_worker(self._read, thread=True, exit_on_error=True)
        self._draw()
        self.set_interval(LOOK_SECONDS, self._look)

    def on_unmount(self) -> None:
        """The runs are let go."""
        for watch in self._watches:
            watch.close()

    def _read(self) -> None:
        from engine.config.files import load

        try:
            self.post_message(Read([load(run.config).mapping for run in self._runs]))
        except (WorkbenchError, OSError) as problem:
            self.post_message(Read((), str(problem)))

    def on_read(self, event: Read) -> None:
        """Show what differs."""
        self.query_one(Table).read = event
        self.query_one(Table).redraw()

    def _look(self) -> None:
        if any([watch.poll() for watch in self._watches]):
            self._draw()

    def _draw(self) -> None:
        views = [watch.view for watch in self._watches]
        names = shared_curves(views)
        name = names[self._at % len(names)] if names else ""
        curves = [
            Curve(
                view.id,
                in_unit(name, series),
                (name, len(series), view.segment),
                f"{clean(view.id)} {worded(name, view.latest.get(name))}",
            )
            for view in views
            if (series := view.series.get(name)) is not None
        ]
        self.query_one(Chart).show(curves, title=titled(name) if name else "no curve that two of them have")
        table = self.query_one(Table)
        table.curve = name
        table.redraw()
        words = f" {len(views)} runs   curve {self._at % len(names) + 1} of {len(names)}" if names else " no curves yet"
        self.query_one("#head", Bar).say(Content.styled(words, "bold"))

    def action_next_curve(self, by: int = 1) -> None:
        """Another curve of all of them."""
        self._at += by
        self._draw()

    def action_settings(self) -> None:
        """Between the chart and what differs."""
        chart, table = self.query_one(Chart), self.query_one(Table)
        (table if chart.has_focus else chart).focus()

    def action_back(self) -> None:
        """The cursor away, then back to the list."""
        if not self.query_one(Chart).clear_cursor():
            self.dismiss()


def _row(label: str, cells: Sequence[str], first: int, width: int, style: str = "value") -> list[Line]:
    """A label and its cells, each wrapped in its own column."""
    room = max(6, (width - first) // max(1, len(cells)))
    columns = [wrap(cell, room - GAP) or [""] for cell in cells]
    made: list[Line] = []
    for place, parts in enumerate(zip_longest(*columns, fillvalue="")):
        line: Line = [(_padded(cut(clean(label), first - 1) if place == 0 else "", first), "dim")]
        made.append([*line, *((_padded(part, room), style) for part in parts)])
    return made


def _padded(text: str, width: int) -> str:
    from rich.cells import set_cell_size

    return set_cell_size(text, width)


def _words(value: object) -> str:
    """A setting's value as the file has it; sources by their files."""
    from engine.config.findings import shown
    from workbench.panels.fields import entry_words

    if isinstance(value, list | tuple) and value:
        return ", ".join(entry_words(entry) for entry in value)
    return "-" if value is None else shown(value)
