"""Lines of styled text as strips: cropped, padded and wrapped by cell width, never parsed as markup.

Owns the small vocabulary that the drawn panels share: a `Part` is text with the name of a style, a line is a list of
parts. Text is made visible here, so a control character in a value is a picture and not a command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from engine.errors import visible

Part = tuple[str, str]
Line = Sequence[Part]
LONGEST = 2000  # cells of one value that are ever drawn; a megabyte in one cell would stall the app


def clean(text: object) -> str:
    """One line of any value, safe to draw."""
    text = str(text)
    short = text[:LONGEST]
    return visible(short.replace("\n", "⏎").replace("\t", "→")) + ("…" if len(text) > LONGEST else "")


def cut(text: str, width: int) -> str:
    """`text` in at most `width` cells; what is missing is shown by an ellipsis."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)).rstrip() + "…" if width > 0 else ""


def wrap(text: str, width: int) -> list[str]:
    """Words of `text` in lines of at most `width` cells; a longer word is broken."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split():
            while cell_len(word) > width > 0:
                room = width - (cell_len(line) + 1 if line else 0)
                if room < width // 3:
                    lines.append(line)
                    line, room = "", width
                head = set_cell_size(word, room).rstrip()
                lines.append(f"{line} {head}" if line else head)
                line, word = "", word[len(head) :]
            if line and cell_len(line) + 1 + cell_len(word) > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def fold(text: str, width: int, indent: str = "  ") -> list[str]:
    """`text` as it stands, its spaces kept, in pieces of at most `width` cells; all but the first are indented."""
    pieces: list[str] = []
    room = max(8, width)
    while cell_len(text) > room:
        head = set_cell_size(text, room)
        if not text.startswith(head):  # a wide character did not fit: its place was filled with a space
            head = head[:-1]
        pieces.append(head)
        text = indent + text[len(head) :]
    return [*pieces, text]


def strip(line: Line, width: int, look: Callable[[str], Style], base: Style) -> Strip:
    """The line in exactly `width` cells over the `base` style."""
    segments: list[Segment] = []
    left = width
    for text, name in line:
        if left <= 0:
            break
        size = cell_len(text)
        if size > left:
            text, size = cut(text, left), left
            text = set_cell_size(text, left)
        segments.append(Segment(text, base + look(name) if name else base))
        left -= size
    if left > 0:
        segments.append(Segment(" " * left, base))
    return Strip(segments, width)


def paragraph(text: str, width: int, style: str = "", indent: str = "") -> list[Line]:
    """`text` wrapped into lines of one style."""
    return [[(indent + line, style)] for line in wrap(text, max(8, width - cell_len(indent)))]


def columns(label: str, value: str, width: int, style: str = "", label_style: str = "dim") -> Line:
    """A label at the left and a value at the right edge."""
    value = cut(value, width)
    room = width - cell_len(value) - 1
    shown = cut(label, max(0, room))
    return [(shown, label_style), (" " * max(0, width - cell_len(shown) - cell_len(value)), ""), (value, style)]


def side_by_side(blocks: Sequence[Sequence[Line]], width: int, between: Part) -> list[Line]:
    """Blocks of lines next to each other, each padded to `width` cells but for the last, with `between` after each."""
    rows: list[Line] = []
    for parts in zip_longest(*blocks, fillvalue=()):
        *before, last = parts
        row: list[Part] = []
        for line in before:
            row += [*line, (" " * (width - sum(cell_len(text) for text, _ in line)), ""), between]
        rows.append([*row, *last])
    return rows
