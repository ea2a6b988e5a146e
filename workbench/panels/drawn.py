"""`Drawn`: a panel whose lines are made by a function, drawn by the line and scrolled when there are more than fit.

A form of twenty settings as sixty widgets costs a tenth of a second to mount and restyle; as lines it costs a
millisecond. Subclasses give `lines(width)`; styles are named in the style sheet as `drawn--<name>`.
"""

from __future__ import annotations

from rich.style import Style
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from workbench.panels.paint import Line, strip

STYLES = (
    "dim", "accent", "bold", "good", "bad", "warn", "hint", "here", "key", "value", "given", "code", "added", "removed",
    "faint",
)  # fmt: skip


class Drawn(ScrollView, can_focus=False):
    """Lines of parts; `redraw` makes them anew at the next paint."""

    COMPONENT_CLASSES = {f"drawn--{name}" for name in STYLES}
    DEFAULT_CSS = """
    Drawn { background: transparent; scrollbar-size-vertical: 1; overflow-x: hidden; }
    """

    _lines: list[Line] | None = None
    _made_for: tuple[int, int] = (0, 0)

    def lines(self, width: int) -> list[Line]:
        """What to draw in this width."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Something changed: make the lines again, once, when they are next drawn."""
        self._lines = None
        if self.size.width:
            self._measure()
        self.refresh()

    def on_resize(self) -> None:
        """A new width wraps anew."""
        self._lines = None
        self._measure()

    def _measure(self) -> None:
        width = self.scrollable_content_region.width
        height = len(self._made(width))
        self.virtual_size = Size(width, height)

    def _made(self, width: int) -> list[Line]:
        if self._lines is None or self._made_for[0] != width:
            self._lines = self.lines(width)
            self._made_for = (width, len(self._lines))
        return self._lines

    def look(self, name: str) -> Style:
        """The style of a name, without a background of its own."""
        return self.get_component_rich_style(f"drawn--{name}", partial=True)

    def base(self, y: int) -> Style:
        """The style under line `y`."""
        return self.rich_style

    def render_line(self, y: int) -> Strip:
        """One drawn line."""
        width = self.scrollable_content_region.width
        lines = self._made(width)
        y += round(self.scroll_y)
        base = self.base(y)
        return strip(lines[y] if y < len(lines) else [], self.size.width, self.look, base)

    def show_line(self, y: int, height: int = 1) -> None:
        """Scroll as little as needed to have line `y` in view."""
        self.scroll_to_region(Region(0, y, 1, height), animate=False, force=True, immediate=True)


class Scrolled(Drawn, can_focus=True):
    """Lines that can have the keys, to scroll."""

    BINDINGS = [
        Binding("down,j", "scroll_down", show=False),
        Binding("up,k", "scroll_up", show=False),
        Binding("pagedown,space", "page_down", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("home,g", "scroll_home", show=False),
        Binding("end,G", "scroll_end", show=False),
    ]
