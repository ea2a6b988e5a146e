"""`Drawn`: a panel whose lines are made by a function, drawn by the line, scrolled when there are more than fit.

A form of twenty settings as sixty widgets costs a tenth of a second to mount and restyle; as lines it costs a
millisecond. One decision worth knowing: it scrolls by itself instead of being a scroll view, because a scroll view lays
out the whole screen anew whenever its content grows, which is the longest part of a key press; and it asks only for
those lines to be painted that differ from what is on screen, which also keeps slow connections quiet.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from workbench.panels.paint import Line, strip

STYLES = (
    "dim", "accent", "bold", "good", "bad", "warn", "hint", "here", "value", "given", "code", "faint", "cursor", "place",
)  # fmt: skip
WHEEL = 3


class Drawn(Widget):
    """Lines of parts; styles are named in the style sheet as `drawn--<name>`."""

    COMPONENT_CLASSES = {f"drawn--{name}" for name in STYLES}

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Line] | None = None
        self._lines_width = -1
        self._painted: list[tuple[Line | None, str]] = []
        self.top = 0

    def lines(self, width: int) -> list[Line]:
        """What to draw in this width."""
        raise NotImplementedError

    def ground(self, y: int) -> str:
        """The name of the style behind content line `y`; nothing for the panel's own."""
        return ""

    # Drawing

    @property
    def rendered_lines(self) -> list[Line]:
        """The lines for the present width; one column is kept for the scroll bar."""
        width = max(1, self.size.width - 1)
        if self._lines is None or self._lines_width != width:
            self._lines, self._lines_width = self.lines(width), width
        return self._lines

    def redraw(self) -> None:
        """Something changed: make the lines again and paint those that differ."""
        self._lines = None
        if self.size:
            self._paint()

    def _paint(self) -> None:
        lines, height, width = self.rendered_lines, self.size.height, self.size.width
        self.top = max(0, min(self.top, len(lines) - height))
        bar = self._bar()
        now = [
            (lines[y] if y < len(lines) else None, f"{self.ground(y)}{bar(y - self.top)}")
            for y in range(self.top, self.top + height)
        ]
        if len(now) != len(self._painted):
            self.refresh()
        else:
            changed = [y for y, (old, new) in enumerate(zip(self._painted, now, strict=True)) if old != new]
            if changed:
                self.refresh(*(Region(0, y, width, 1) for y in changed))
        self._painted = now

    def _bar(self) -> _Bar:
        return _Bar(len(self.rendered_lines), self.size.height, self.top)

    def on_resize(self) -> None:
        """A new size lays out anew."""
        self._painted, self._lines = [], None
        self._paint()

    def style_of(self, name: str) -> Style:
        """The style of a name, without a background of its own."""
        return self.get_component_rich_style(f"drawn--{name}", partial=True)

    def _bare(self, name: str) -> Style:
        return self.style_of(name).without_color

    def render_line(self, y: int) -> Strip:
        """One drawn line with its piece of the scroll bar."""
        width = self.size.width
        lines, at = self.rendered_lines, y + self.top
        name = self.ground(at)
        base = self.rich_style + self.style_of(name) if name else self.rich_style
        # Of 16 colours some cannot be read on the cursor's: there its row has one colour, and words and signs say the rest.
        look = self._bare if name == "cursor" and self.app.current_theme.ansi else self.style_of
        drawn = strip(lines[at] if at < len(lines) else [], max(1, width - 1), look, base)
        sign = self._bar()(y)
        return Strip([*drawn, Segment(sign, self.rich_style + self.style_of("faint"))], width)

    # Scrolling

    def scroll_lines(self, by: int) -> None:
        """So many lines down, or up."""
        self.top += by
        self._paint()

    def show_lines(self, first: int, count: int = 1) -> None:
        """Scroll as little as needed to have these lines in view."""
        height = self.size.height
        if height:
            self.top = min(max(self.top, first + count - height), first)
            self._paint()

    def to_top(self) -> None:
        """Back to the first line."""
        self.top = 0
        if self.size:
            self._paint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel scrolls."""
        event.stop()
        self.scroll_lines(WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel scrolls."""
        event.stop()
        self.scroll_lines(-WHEEL)


class _Bar:
    """The scroll bar, a cell a line: empty where everything fits."""

    def __init__(self, total: int, height: int, top: int) -> None:
        self._start, self._end = -1, -1
        if total > height > 0:
            size = max(1, round(height * height / total))
            self._start = round((height - size) * top / (total - height))
            self._end = self._start + size

    def __call__(self, y: int) -> str:
        return "▐" if self._start <= y < self._end else " "


class Scrolled(Drawn, can_focus=True):
    """Lines that can have the keys, to scroll."""

    BINDINGS = [
        Binding("down,j", "lines(1)", show=False),
        Binding("up,k", "lines(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home,g", "lines(-1000000)", show=False),
        Binding("end,G", "lines(1000000)", show=False),
    ]

    def action_lines(self, by: int) -> None:
        """Line by line."""
        self.scroll_lines(by)

    def action_page(self, way: int) -> None:
        """Page by page."""
        self.scroll_lines(way * max(1, self.size.height - 2))
