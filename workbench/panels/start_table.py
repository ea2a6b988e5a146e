"""What the app opens on, as lines: headings, runs, configs and ways to begin, with one cursor over all of them.

Columns are as wide as what stands in them, so that on a wide window the eye has no gap to cross; a narrow one cuts the
words of how a run stands first, then leaves out disk and age.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from engine.figures import brief, size
from engine.session.start import Entry, Section
from workbench.panels.drawn import Drawn
from workbench.panels.glyphs import sign
from workbench.panels.paint import Line, clean, cut
from workbench.panels.run_table import STYLE

MOST_TITLE, LEAST_DETAIL, MOST_MODEL = 34, 18, 32
LEAST_MODEL_WIDTH = 110
"""Below this many columns the models are left out."""


class StartTable(Drawn, can_focus=True):
    """Headings and their lines; the cursor stands on lines that can be opened."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    class Opened(Message):
        """Enter was pressed on a line."""

        def __init__(self, entry: Entry) -> None:
            super().__init__()
            self.entry = entry

    sections: Sequence[Section] = ()
    at = 0
    moved = False
    """Whether the person has moved the cursor: from then on it stays on its line, whatever comes above it."""

    @property
    def entries(self) -> list[Entry]:
        """All lines that can be opened, in order."""
        return [entry for section in self.sections for entry in section.entries]

    @property
    def chosen(self) -> Entry | None:
        """The line under the cursor."""
        entries = self.entries
        return entries[self.at] if self.at < len(entries) else None

    def show(self, sections: Sequence[Section]) -> None:
        """Draw these; the cursor stays on its line, and stands on the first until it is moved."""
        before = self.chosen
        self.sections = sections
        keys = [(entry.kind, entry.key) for entry in self.entries]
        wanted = (before.kind, before.key) if before is not None and self.moved else None
        self.at = keys.index(wanted) if wanted in keys else min(self.at if self.moved else 0, max(0, len(keys) - 1))
        self.redraw()

    def lines(self, width: int) -> list[Line]:
        """Each heading with its lines, a blank line between."""
        rooms = _rooms(self.entries, width)
        drawn: list[Line] = []
        self._starts: list[int] = []
        for section in self.sections:
            drawn += [[]] if drawn else []
            drawn.append([(" " + section.title, "bold")])
            for entry in section.entries:
                here = len(self._starts) == self.at
                self._starts.append(len(drawn))
                drawn.append(_line(entry, rooms, width, here))
        return drawn

    def ground(self, y: int) -> str:
        """The cursor's line stands out."""
        return "cursor" if self.entries and y == self._starts[self.at] else ""

    def action_move(self, by: int) -> None:
        """The cursor up or down."""
        self.moved = True
        self.at = max(0, min(self.at + by, len(self.entries) - 1))
        self.redraw()
        if self.entries:
            self.show_lines(self._starts[self.at] if self.at else 0)

    def on_click(self, event: events.Click) -> None:
        """A click goes to the line; a click on the line under the cursor opens it."""
        y = event.y + self.top
        if y in self._starts:
            again = self._starts.index(y) == self.at
            self.at, self.moved = self._starts.index(y), True
            self.redraw()
            if again and self.chosen is not None:
                self.post_message(self.Opened(self.chosen))


def _cells(entry: Entry) -> dict[str, str]:
    """What stands in each column."""
    return {
        "title": clean(entry.title),
        "method": clean(entry.method),
        "word": entry.word,
        "detail": clean(entry.detail),
        "age": _ago(time.time() - entry.when) if entry.when else "",
        "disk": size(entry.bytes) if entry.bytes is not None else "",
        "model": clean(entry.model),
    }


def _rooms(entries: Sequence[Entry], width: int) -> dict[str, int]:
    """The room of each column of runs and configs; nothing for one that is left out."""
    cells = [_cells(entry) for entry in entries if entry.kind != "begin"]
    need = (
        {name: max((cell_len(cell[name]) for cell in cells), default=0) for name in _cells(entries[0])} if cells else {}
    )
    titles = max((cell_len(clean(entry.title)) for entry in entries), default=0)
    need["title"] = min(titles, MOST_TITLE, max(12, width // 4))
    if width < LEAST_MODEL_WIDTH:
        need.pop("model", None)
    elif "model" in need:
        need["model"] = min(need["model"], MOST_MODEL)
    # A cause may be cut, a number may not.
    figures = max(
        (cell_len(clean(entry.detail)) for entry in entries if entry.state in ("finished", "stopped")), default=0
    )
    for given_up in ("", "disk", "age"):
        need.pop(given_up, None)
        room = width - 4 - sum(cell + 2 for name, cell in need.items() if name != "detail" and cell)
        if room >= max(figures, min(LEAST_DETAIL, need.get("detail", 0))):
            break
    if "detail" in need:
        need["detail"] = max(0, min(need["detail"], room))
    return need


def _line(entry: Entry, rooms: dict[str, int], width: int, here: bool) -> Line:
    cells = _cells(entry)
    look = STYLE.get(entry.state, "dim") if entry.word != "silent" else "warn"
    title = _title(cells["title"], rooms["title"], entry.kind == "run")
    line: list[tuple[str, str]] = [
        ("›" if here else " ", "accent"),
        (f"{sign(entry.state) if entry.state else ' '} ", look),
    ]
    line.append((title, "given"))
    if entry.kind == "begin":
        return [*line, ("  " + cut(cells["detail"], width - rooms["title"] - 5), "dim")]
    rooms = dict(rooms)
    if not cells["age"] and not cells["disk"]:  # what goes on has more to tell, and the room of the others
        rooms["detail"] = rooms.get("detail", 0) + sum(
            room + 2 for name in ("age", "disk") if (room := rooms.pop(name, 0))
        )
    looks = {"method": "value", "word": look, "detail": "value"}
    for name in ("method", "word", "detail", "age", "disk", "model"):
        if room := rooms.get(name, 0):
            text = cut(cells[name], room)
            blank = " " * (room - cell_len(text))
            line.append(("  " + (blank + text if name in ("age", "disk") else text + blank), looks.get(name, "dim")))
    return line


def _title(text: str, room: int, numbered: bool) -> str:
    """A name in its room; of a run's the number at its end tells it from its like."""
    if numbered and cell_len(text) > room:
        text = cut(text, room - 5) + text[-5:]
    text = cut(text, room)
    return text + " " * (room - cell_len(text))


def _ago(seconds: float) -> str:
    return "just now" if seconds < 60 else f"{brief(seconds)} ago"
