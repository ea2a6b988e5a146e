"""Two to eight runs together: one curve of each on one chart, then what differs in their settings and their answers.

It reads the runs' folders as the monitor does and owns nothing of them. Runs that go on are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.errors import WorkbenchError
from engine.figures import count
from engine.run.compare import (
    answers,
    describe_identical,
    differences,
    extremes,
    identical,
    shared_curves,
    unique_names,
)
from engine.run.curves import format_metric, titled
from engine.run.index import Watch, open_view
from engine.run.store import RunFolder
from engine.run.view import RunView
from workbench.actions import bindings
from workbench.panels import raster
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.chart import Chart
from workbench.panels.columns import GAP, beside
from workbench.panels.curve import Line as Curve
from workbench.panels.drawn import Scrolled
from workbench.panels.glyphs import ascii_only, sign, style_of
from workbench.panels.paint import Line, clean, cut, paragraph, wrap
from workbench.panels.units import in_unit, unit_of
from workbench.panels.watching import answered

LOOK_SECONDS = 1.0


class Read(Message):
    """The configs were read: their mappings, or why one could not be."""

    def __init__(self, configs: Sequence[Mapping[str, Any]], problem: str = "") -> None:
        super().__init__()
        self.configs, self.problem = configs, problem


class Table(Scrolled):
    """A column a run: where it stands, the ends of the curve, settings that differ, answers to the same prompts."""

    DEFAULT_CSS = "Table { height: 1fr; padding: 0 1; border-top: solid $wb-line; }"
    names: Sequence[str] = ()
    watches: Sequence[Watch] = ()
    curve = ""
    read: Read | None = None

    def lines(self, width: int) -> list[Line]:
        """All of it, top to bottom."""
        views = [watch.view for watch in self.watches]
        changed = differences(self.read.configs) if self.read and not self.read.problem else []
        first = min(width // 3, max([18, *(len(path) for path, _ in changed)]) + GAP)

        def row(label: str, cells: Sequence[str], style: str = "value") -> list[Line]:
            return _row(label, cells, signs(len(views)), first, width, style)

        drawn = self._heads(views, first, width)
        drawn += self._ends(views, row)
        drawn += [[], [("Settings that differ", "bold")]]
        if self.read is None:
            drawn.append([("reading …", "dim")])
        elif self.read.problem:
            drawn += paragraph(clean(self.read.problem), width, "warn")
        elif not changed:
            drawn.append([("none: their configs are the same", "dim")])
        for path, values in changed:
            drawn += row(path, [_format_value(value) for value in values])
        for sentence in describe_identical(identical([clean(name) for name in self.names], views)):
            drawn += [[], *paragraph(sentence, width, "accent")]
        for prompt, samples in answers(views):
            drawn += [[], *paragraph(clean(prompt), width, "accent")]
            words = [
                f"step {count(sample['step'])}: {answered(sample)}" if sample else "was not asked" for sample in samples
            ]
            drawn += _row("", words, self._called(), width, width)
        return drawn

    def _called(self) -> list[str]:
        """Each run by sign and name, equally wide."""
        heads = [f"{sign} {clean(name)}" for sign, name in zip(signs(len(self.names)), self.names, strict=True)]
        return [set_cell_size(head, max(map(cell_len, heads))) for head in heads]

    def _heads(self, views: Sequence[RunView], first: int, width: int) -> list[Line]:
        """What each column is of: name, state and step; a list of them where the names do not fit side by side."""
        states = [f"{sign(view.state)} {style_of(view.state).word}" for view in views]
        steps = [count(view.step) for view in views]
        heads = beside("", self._called(), signs(len(views)), first, width)
        if len(heads) == 1:
            drawn: list[Line] = [[(heads[0][0], ""), (heads[0][1], "given")]]
            for label, cells in (("state", states), ("step", steps)):
                drawn += _row(label, cells, signs(len(views)), first, width)
            return drawn
        listed = zip(self._called(), states, steps, strict=True)
        drawn = [[(f"{head}  ", "given"), (f"{state}, step {step}", "value")] for head, state, step in listed]
        return [*drawn, [], *_row("", signs(len(views)), signs(len(views)), first, width, "given")]

    def _ends(self, views: Sequence[RunView], row: Callable[[str, Sequence[str]], list[Line]]) -> list[Line]:
        if not self.curve:
            return []
        extremes_of = [extremes(view.series[self.curve]) if self.curve in view.series else None for view in views]
        drawn = row(titled(self.curve), [format_metric(self.curve, view.latest.get(self.curve)) for view in views])
        for words, end in (("  lowest", 0), ("  highest", 1)):
            drawn += row(words, [format_metric(self.curve, pair[end] if pair else None) for pair in extremes_of])
        return drawn


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
        self._names = unique_names(runs)
        self._watches: list[Watch] = []
        self._at = 0

    def compose(self) -> ComposeResult:
        """Head, chart, table, keys."""
        yield Bar("head")
        yield Chart()
        yield Table()
        yield KeyLine("compare")

    def on_mount(self) -> None:
        """Open the runs, and look again at those that go on."""
        self._watches = [open_view(run) for run in self._runs]
        self.query_one(Table).watches, self.query_one(Table).names = self._watches, self._names
        self.query_one(Chart).focus()
        self.run_worker(self._read, thread=True, exit_on_error=True)
        self._draw()
        self.set_interval(LOOK_SECONDS, self._poll)

    def on_unmount(self) -> None:
        """The runs are let go."""
        for watch in self._watches:
            watch.close()

    def _read(self) -> None:
        from engine.config.files import parse

        try:
            self.post_message(Read([parse(run.read_config(), path=run.config).mapping for run in self._runs]))
        except (WorkbenchError, OSError) as problem:
            self.post_message(Read((), str(problem)))

    def on_read(self, event: Read) -> None:
        """Show what differs."""
        self.query_one(Table).read = event
        self.query_one(Table).redraw()

    def _poll(self) -> None:
        if any([watch.poll() for watch in self._watches]):
            self._draw()

    def _draw(self) -> None:
        views = [watch.view for watch in self._watches]
        names = shared_curves(views)
        name = names[self._at % len(names)] if names else ""
        curves = [
            Curve(
                called,
                in_unit(name, series),
                (name, len(series), view.segment),
                f"{clean(called)} {format_metric(name, view.latest.get(name))}",
                format_metric(name, view.latest.get(name)),
                unit_of(name),
                tone,
            )
            for tone, (called, view) in enumerate(zip(self._names, views, strict=True))
            if (series := view.series.get(name)) is not None
        ]
        self.query_one(Chart).show(curves, title=titled(name) if name else "no curve that two of them have")
        table = self.query_one(Table)
        table.curve = name
        table.redraw()
        words = f" {len(views)} runs   curve {self._at % len(names) + 1} of {len(names)}" if names else " no curves yet"
        read = min((watch.loading for watch in self._watches), default=1.0)
        words += f"   reading the whole curves, {100 * read:.0f} %" if read < 1 else ""
        self.query_one("#head", Bar).update(Content.styled(words, "bold"))

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


def signs(runs: int) -> list[str]:
    """The signs of the runs' lines on the chart."""
    known = raster.STYLE_SIGNS_PLAIN if ascii_only() else raster.STYLE_SIGNS
    return [known[place % len(known)] for place in range(runs)]


def _row(
    label: str, cells: Sequence[str], signs: Sequence[str], first: int, width: int, style: str = "value"
) -> list[Line]:
    """A label and its cells beside each other, or each cell on lines of its own."""
    drawn: list[Line] = []
    for begin, text in beside(clean(label), cells, signs, first, width):
        head, *more = wrap(text, max(8, width - cell_len(begin))) or [""]
        drawn.append([(cut(begin, width), "dim"), (text if cell_len(begin + text) <= width else head, style)])
        drawn += [[(" " * cell_len(begin), ""), (part, style)] for part in more if cell_len(begin + text) > width]
    return drawn


def _format_value(value: object) -> str:
    """A setting's value as the file has it; sources by their files."""
    from engine.config.findings import shown
    from workbench.panels.fields import entry_text

    if isinstance(value, list | tuple) and value:
        return ", ".join(entry_text(entry) for entry in value)
    return "-" if value is None else shown(value)
