"""The list of runs as lines: state, name, method, step, loss or reward with a small curve, age, disk, and the model where there is room.

Columns are as wide as what stands in them. A narrow window gives up the curve, then disk and age, before names that can no
longer be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual.binding import Binding, BindingType
from textual.message import Message

from engine.figures import brief, number, size
from engine.run.curves import told_by
from engine.run.store import RunFolder
from workbench.panels.drawn import Drawn
from workbench.panels.glyphs import ascii_only, sign, style_of
from workbench.panels.paint import Line, clean, cut

if TYPE_CHECKING:
    from engine.run.view import RunView

SPARK, SIGNS = "▁▂▃▄▅▆▇█", 6
STYLE = {"running": "good", "finished": "good", "failed": "bad", "lost": "bad", "stopped": "warn", "stopping": "warn"}

FACTS = ("state", "run", "method", "step", "loss", "curve", "age", "disk", "model")
AT_RIGHT = ("step", "loss", "age", "disk")
LOOKS = {"run": "given", "curve": "accent", "age": "dim", "disk": "dim", "model": "dim"}
LEAST_NAME, LEAST_MODEL = 16, 12
GIVEN_UP = ("curve", "disk", "age")
"""What a narrow window leaves out, in this order, for names that can be told apart."""
MOST_ROOM = {"method": 9, "step": 15, "loss": 15}
LEAST_ROOM = {"loss": 7, "age": 6}  # these change while one looks, and nothing beside them shall move
ENDS = {"run": 5, "model": 0}
"""Names whose end tells them from their like: a run's number, or of a model's path (0) as much as there is room for."""
STATE_ROOM = 11


@dataclass(frozen=True)
class Row:
    """One run as the list shows it."""

    run: RunFolder
    view: RunView
    bytes: int
    curve: tuple[float, ...]
    stamp: tuple[int, ...]
    read: float

    @property
    def told(self) -> tuple[str, float | None]:
        """What tells it in a line, a loss or a reward, and its newest value."""
        name = told_by(self.view.latest)[0]
        return name, self.view.latest.get(name)


class RunTable(Drawn, can_focus=True):
    """The rows, one a line, with a cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    class Moved(Message):
        """The cursor stands on another run."""

    rows: Sequence[Row] = ()
    marked: frozenset[str] = frozenset()
    at = 0
    empty = "Reading the runs …"

    def lines(self, width: int) -> list[Line]:
        """The head, then a line a run."""
        if not self.rows:
            return [[], *[[(" " + text, "dim")] for text in self.empty.split("\n")]]
        cells = [_cells(row) for row in self.rows]
        columns = _columns(cells, width)
        drawn: list[Line] = [[(cut(_line({each: each for each in FACTS} | {"curve": ""}, columns), width), "faint")]]
        for row, cell in zip(self.rows, cells, strict=True):
            marked = row.run.id in self.marked
            line: Line = [
                (("*" if ascii_only() else "•") if marked else " ", "accent"),
                (
                    f"{cell['state']:10}",
                    STYLE.get(row.view.state, "dim") if row.view.silent_seconds is None else "warn",
                ),
                *((" " + _placed(cell[name], name, room), LOOKS.get(name, "value")) for name, room in columns.items()),
            ]
            drawn.append(line)
        return drawn

    def ground(self, y: int) -> str:
        """The cursor's line stands out."""
        return "cursor" if self.rows and y == self.at + 1 else ""

    @property
    def chosen(self) -> Row | None:
        """The run under the cursor."""
        return self.rows[self.at] if 0 <= self.at < len(self.rows) else None

    def action_move(self, by: int) -> None:
        """The cursor up or down."""
        self.at = max(0, min(self.at + by, len(self.rows) - 1))
        self.redraw()
        self.show_lines(self.at + 1 if self.at else 0)
        self.post_message(self.Moved())


def _cells(row: Row) -> dict[str, str]:
    """What is told of a run, by column."""
    view, (metric, value) = row.view, row.told
    return {
        "state": f"{sign(view.state)} {style_of(view.state).word}" if view.silent_seconds is None else "! silent",
        "run": clean(view.id or row.run.id),
        "method": clean(view.method),
        "step": f"{view.step:,}" + (f"/{view.max_steps:,}" if view.max_steps else ""),
        "loss": number(value) if metric == "loss" else f"{metric} {number(value)}",
        "curve": spark(row.curve),
        "age": brief(time.time() - view.started) if view.started else "-",
        "disk": size(row.bytes),
        # Of a run that nobody can look after, what is wrong with it matters more than its model.
        "model": clean(view.cause if view.state == "lost" and view.cause else view.model),
    }


def _columns(cells: Sequence[dict[str, str]], width: int) -> dict[str, int]:
    """The room of each column behind the state: as much as it needs; names get what is left, then models."""
    need = {
        name: max(len(name), LEAST_ROOM.get(name, 0), *(cell_len(cell[name]) for cell in cells)) for name in FACTS[1:]
    }
    rooms = {name: min(need[name], MOST_ROOM.get(name, need[name])) for name in FACTS[2:-1]} | {"curve": SIGNS}
    least = min(need["run"], LEAST_NAME)
    for given_up in GIVEN_UP:
        if _left(rooms, width) < least:
            del rooms[given_up]
    room = max(3, min(need["run"], _left(rooms, width)))
    model = _left(rooms, width) - room - 1
    return {"run": room} | rooms | ({"model": min(model, need["model"])} if model >= LEAST_MODEL else {})


def _left(rooms: Mapping[str, int], width: int) -> int:
    """Cells for the name beside the state and these columns, with one between each."""
    return width - STATE_ROOM - 1 - sum(room + 1 for room in rooms.values())


def _placed(text: str, name: str, room: int) -> str:
    if cell_len(text) > room >= 8 and name in ENDS:
        end = ENDS[name] or room - 1
        text = cut(text, room - end) + text[-end:]
    text = cut(text, room)
    blank = " " * (room - cell_len(text))
    return blank + text if name in AT_RIGHT else text + blank


def _line(cell: Mapping[str, str], columns: Mapping[str, int]) -> str:
    return f" {cell['state']:10}" + "".join(" " + _placed(cell[name], name, room) for name, room in columns.items())


def spark(values: Sequence[float], signs: int = SIGNS) -> str:
    """A small curve of at most so many signs."""
    kept = [value for value in values if value == value]
    if len(kept) < 2 or ascii_only():
        return ""
    groups = [kept[len(kept) * i // signs : len(kept) * (i + 1) // signs] for i in range(signs)]
    means = [sum(group) / len(group) for group in groups if group]
    low, high = min(means), max(means)
    return "".join(SPARK[round(7 * (mean - low) / (high - low))] if high > low else SPARK[0] for mean in means)
