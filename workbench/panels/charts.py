"""The charts of one run: a large one, small ones beneath it, the newest numbers, and answers to pinned prompts.

Owns which curve the large chart shows. It reads a run's view and refuses to ask for one: the screen looks, this draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from engine.errors import visible
from engine.run.curves import format_metric, leading, ordered, titled
from workbench.panels.chart import Chart
from workbench.panels.curve import Line
from workbench.panels.glyphs import ascii_only
from workbench.panels.units import in_unit, unit_of
from workbench.panels.watching import Numbers, PinnedPrompts

if TYPE_CHECKING:
    from engine.run.view import RunView

SMALL = ("one", "two", "three", "four")
SHORT = 9  # cells of a name that leaves room for another one on a small chart at 80 columns


class Charts(Vertical):
    """The method's own curves, or the one that was chosen."""

    DEFAULT_CSS = """
    Charts { height: 100%; }
    Charts #upper { height: 1fr; }
    Charts .small { height: 7; border-top: solid $wb-line; }
    Charts .tall { display: none; }
    Charts.-tall .tall { display: block; }
    Charts.-tall .small { height: 8; }
    Charts.-tall PinnedPrompts { height: 5; }
    Charts.-wide Numbers { width: 32; }
    Charts .none { display: none; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._curve: str | None = None

    def compose(self) -> ComposeResult:
        """Charts at the left, numbers at the right, prompts beneath."""
        with Horizontal(id="upper"):
            with Vertical():
                yield Chart(id="main")
                with Horizontal(classes="small"):
                    yield Chart(id="one")
                    yield Chart(id="two")
                with Horizontal(classes="small tall"):
                    yield Chart(id="three")
                    yield Chart(id="four")
            yield Numbers()
        yield PinnedPrompts()

    def show(self, view: RunView) -> None:
        """Draws what the run has brought so far; a chart that did not change is not drawn again."""
        main, *small = leading(view.method, view.series)
        own = self._curve if self._curve and titled(self._curve) != self._curve else ""
        # Beside a chosen curve's title stands the name that the trainer's own documentation has.
        draw(self.query_one("#main", Chart), view, (self._curve,) if self._curve else main, own=own)
        for index, place in enumerate(SMALL):
            if place in ("one", "two") or self.has_class("-tall"):
                names = small[index] if index < len(small) else ()
                draw(self.query_one(f"#{place}", Chart), view, names, small=True)
        prompts, numbers = self.query_one(PinnedPrompts), self.query_one(Numbers)
        prompts.set_class(not view.samples, "none")
        for panel in (numbers, prompts):
            panel.view = view
            panel.redraw()

    def next_curve(self, view: RunView, by: int) -> str:
        """The large chart shows another of all curves, after the last the method's own again; says which of how many."""
        names = ordered(view.method, view.series)
        choices: list[str | None] = [None, *names]
        at = choices.index(self._curve) if self._curve in choices else 0
        self._curve = choices[(at + by) % len(choices)]
        return f"curve {at + by if 0 < at + by <= len(names) else 0} of {len(names)}" if self._curve else ""


def draw(chart: Chart, view: RunView, names: tuple[str, ...], *, small: bool = False, own: str = "") -> None:
    """These curves of a run on one chart; `own` stands beside the title, `small` says that names have little room."""
    drawn = [
        Line(
            titled(name),
            in_unit(name, series),
            (len(series), view.segment),
            _label(view, name, names, small),
            format_metric(name, view.latest.get(name)) if len(names) == 1 else "",
            unit_of(name),
        )
        for name in names
        if (series := view.series.get(name)) is not None
    ]
    title = "" if len(drawn) > 1 else drawn[0].label if drawn else titled(names[0]) if names else ""
    if drawn and own:
        title += f"   {visible(own)}"
    chart.show(drawn, _marks(view), title)


def _label(view: RunView, name: str, names: tuple[str, ...], small: bool) -> str:
    """Name and newest value; a curve and its held-out twin on a small chart have room for two short names alone."""
    value = format_metric(name, view.latest.get(name))
    twin = name.startswith("eval_") and name.removeprefix("eval_") in names
    title = "held-out" if twin else titled(name)
    beside = f"eval_{name}" in names and f"eval_{name}" in view.series and len(title) <= SHORT
    return title if small and (twin or beside) else f"{title} {value}"


def _marks(view: RunView) -> list[tuple[int, str]]:
    """Where the run was taken up again, and where a number was not finite."""
    again, wrong = ("r", "!") if ascii_only() else ("↻", "!")
    marks = [(entry["above"], again) for entry in view.superseded[-20:]]
    if view.resumed_from:
        marks.append((view.resumed_from, again))
    return marks + [(entry["step"], wrong) for entry in view.diverged[-20:] if entry["step"] is not None]
