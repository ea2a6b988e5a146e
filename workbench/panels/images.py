"""Images of a row as pictures among the drawn lines: Kitty's graphics, sixel, or half blocks that every terminal shows.

Owns how an image becomes lines of cells and what bytes the terminal gets for it; `workbench.terminal` says which of the
three it can show. Kitty's placeholders are text and half blocks are text, so that they scroll and are cut as any line;
of a sixel picture each line carries its own piece, drawn after its blanks.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from textual.strip import Strip

from workbench.panels.paint import Line, Part
from workbench.terminal import cell_pixels, in_tmux, shows_images

if TYPE_CHECKING:
    from PIL.Image import Image

INK = "ink "
"""Begins the name of a style that is no name in the style sheet but colours, as Rich reads them."""
SIXEL = INK + "sixel "
INDENT = 2  # cells left of a picture
LEAST_ROWS = 8  # a small image is drawn larger, to be seen at all
CHUNK = 4096  # characters of one of Kitty's commands
IDS = range(16, 256)  # of Kitty's images: a colour of the 256, which no theme changes
COLOURS = 64  # of a sixel picture
SIXEL_COLUMNS = 40  # at most: more pixels take longer to send than a key may
PLACEHOLDER = "\U0010eeee"
# The marks with which Kitty numbers rows and columns of a picture: the first of its table, in its order. They bound both.
NUMBERS = (
    "\u0305\u030d\u030e\u0310\u0312\u033d\u033e\u033f\u0346\u034a\u034b\u034c\u0350\u0351\u0352\u0357\u035b\u0363\u0364"
    "\u0365\u0366\u0367\u0368\u0369\u036a\u036b\u036c\u036d\u036e\u036f\u0483\u0484\u0485\u0486\u0487\u0592\u0593\u0594"
    "\u0595\u0597\u0598\u0599\u059c\u059d\u059e\u059f\u05a0\u05a1\u05a8\u05a9\u05ab\u05ac\u05af\u05c4\u0610\u0611\u0612"
    "\u0613\u0614\u0615\u0616\u0617\u0657\u0658"
)


class Images:
    """The pictures of one panel; `write` sends bytes to the terminal, `shows` is one of `terminal.IMAGES`."""

    def __init__(self, write: Callable[[str], None], shows: str = "") -> None:
        self._write = write
        self._shows = shows
        self._sent: dict[tuple[str, int, int], int] = {}
        self._sixels: list[list[str]] = []
        self._known: dict[tuple[str, int, int], list[Line]] = {}

    @property
    def shows(self) -> str:
        """How images are drawn here; asked of the terminal at the first image."""
        self._shows = self._shows or shows_images()
        return self._shows

    def lines(self, image: Mapping[str, Any], width: int, most_rows: int) -> list[Line]:
        """The image at the size that the model sees where it fits into `width` cells and so many rows, else smaller."""
        uri = str(image.get("thumbnail") or "")
        if self.shows == "none" or not uri or width < 4 * INDENT:
            return []
        seen = image["resized"] if image.get("tiles", 1) == 1 and image.get("resized") else None
        across, down = seen or (image["width"], image["height"])
        most_columns = SIXEL_COLUMNS if self.shows == "sixel" else len(NUMBERS)
        columns, rows = cells_of(across, down, min(width - INDENT, most_columns), min(most_rows, len(NUMBERS)))
        key = uri, columns, rows
        if key not in self._known:
            self._known[key] = self._drawn(uri, columns, rows)
        return self._known[key]

    def _drawn(self, uri: str, columns: int, rows: int) -> list[Line]:
        if self.shows == "kitty":
            return self._placed(uri, columns, rows)
        if self.shows == "sixel" and (cell := cell_pixels()):
            self._sixels.append(sixels(opened(uri), columns * cell[0], rows, cell[1]))
            name = f"{SIXEL}{len(self._sixels) - 1} "
            return [[(" " * INDENT, ""), (" " * columns, f"{name}{row}")] for row in range(rows)]
        return half_blocks(opened(uri), columns, rows)

    def _placed(self, uri: str, columns: int, rows: int) -> list[Line]:
        """The image is sent once; its cells are characters in the colour of its number."""
        number = IDS[len(self._sent) % len(IDS)]
        self._sent[uri, columns, rows] = number
        data = uri.partition("base64,")[2]
        pieces = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        for at, piece in enumerate(pieces):
            head = f"a=T,U=1,f=100,i={number},c={columns},r={rows},q=2," if at == 0 else ""
            self._write(passed(f"\x1b_G{head}m={int(at + 1 < len(pieces))};{piece}\x1b\\"))
        style = f"{INK}color({number})"
        return [
            [(" " * INDENT, ""), ("".join(PLACEHOLDER + NUMBERS[row] + NUMBERS[at] for at in range(columns)), style)]
            for row in range(rows)
        ]

    def over(self, line: Line, strip: Strip, left: int) -> Strip:
        """The strip of a line, `left` cells before it, with its piece of a sixel picture drawn after its blanks."""
        end = left
        for text, name in line:
            end += cell_len(text)
            if name.startswith(SIXEL):
                which, row = map(int, name.removeprefix(SIXEL).split())
                return SixelStrip(strip, end - len(text), end, self._sixels[which][row])
        return strip

    def forget(self) -> None:
        """The terminal need not keep them any longer."""
        for number in set(self._sent.values()):
            self._write(passed(f"\x1b_Ga=d,d=I,i={number},q=2\x1b\\"))
        self._sent, self._known, self._sixels = {}, {}, []


class SixelStrip(Strip):
    """A strip with a piece of a picture over its cells from `start` to `end`: drawn after them, and never cut."""

    def __init__(self, strip: Strip, start: int, end: int, piece: str) -> None:
        super().__init__([*strip], strip.cell_length)
        self._plain, self._start, self._end, self._piece = strip, start, end, piece

    def crop(self, start: int, end: int | None = None) -> Strip:
        """The part between two cells; with the picture where it holds all of it."""
        stop = self.cell_length if end is None else end
        part = self._plain.crop(start, end)
        whole = start <= self._start and self._end <= stop
        return SixelStrip(part, self._start - start, self._end - start, self._piece) if whole else part

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """The parts between these cells; with the picture where one holds all of it."""
        ends = [cut for cut in cuts if cut <= self.cell_length]
        return [self.crop(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def render(self, console: Console) -> str:
        """What the terminal gets: the cells up to the picture's end, back to its start and the picture, the other cells."""
        head, tail = self._plain.divide([self._end, self.cell_length])
        back = f"\x1b7\x1b[{self._end - self._start}D{self._piece}\x1b8"
        return head.render(console) + back + tail.render(console)


def passed(command: str) -> str:
    """A command to the terminal; through tmux, which hands on what is wrapped."""
    return f"\x1bPtmux;{command.replace(chr(27), chr(27) * 2)}\x1b\\" if in_tmux() else command


def opened(uri: str) -> Image:
    """The image of a data URI."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2]))).convert("RGB")


def cells_of(width: int, height: int, most_columns: int, most_rows: int) -> tuple[int, int]:
    """Columns and rows of an image of so many pixels: as large as it is, but to be seen, and not larger than may be."""
    across, down = cell_pixels() or (10, 20)
    columns, rows = max(1, width) / across, max(1, height) / down
    scale = min(max(1.0, LEAST_ROWS / rows), most_columns / columns, most_rows / rows)
    return max(1, min(most_columns, round(columns * scale))), max(1, min(most_rows, round(rows * scale)))


def half_blocks(image: Image, columns: int, rows: int) -> list[Line]:
    """Two pixels a cell, one above the other."""
    pixels = image.resize((columns, 2 * rows)).load()
    if pixels is None:
        return []
    lines: list[Line] = []
    for row in range(rows):
        line: list[Part] = [(" " * INDENT, "")]
        for at in range(columns):
            ink = f"{INK}{_colour(pixels[at, 2 * row])} on {_colour(pixels[at, 2 * row + 1])}"
            if line[-1][1] == ink:
                line[-1] = (line[-1][0] + "▀", ink)
            else:
                line.append(("▀", ink))
        lines.append(line)
    return lines


def _colour(pixel: Any) -> str:
    return "#{:02x}{:02x}{:02x}".format(*pixel)


def sixels(image: Image, width: int, rows: int, high: int) -> list[str]:
    """An image `width` pixels wide as a sixel picture for each of `rows` lines, `high` pixels each."""
    from PIL.Image import Dither

    few = image.resize((width, rows * high)).quantize(COLOURS, dither=Dither.NONE)
    palette = few.getpalette() or []
    inks = "".join(
        f"#{at};2;" + ";".join(str(round(part / 2.55)) for part in palette[3 * at : 3 * at + 3])
        for at in range(len(palette) // 3)
    )
    data = few.tobytes()
    lines = [data[at : at + width] for at in range(0, len(data), width)]
    return [
        f'\x1bP0;1q"1;1;{width};{high}{inks}{_bands(lines[row * high : (row + 1) * high])}\x1b\\' for row in range(rows)
    ]


def _bands(lines: Sequence[bytes]) -> str:
    """Six lines of pixels a band, one colour after the other over the same place."""
    width, bands = len(lines[0]), []
    for top in range(0, len(lines), 6):
        six, drawn = lines[top : top + 6], []
        for ink in sorted(set(b"".join(six))):
            bits = 0
            for place, line in enumerate(six):
                bits |= int.from_bytes(line.translate(_only(ink, place)))
            signs = bits.to_bytes(width).translate(_SIGNS).decode("ascii")
            drawn.append(f"#{ink}" + _RUNS.sub(lambda run: f"!{len(run[0])}{run[1]}", signs))
        bands.append("$".join(drawn))
    return "-".join(bands)


@cache
def _only(ink: int, place: int) -> bytes:
    """A table that makes the bit of this place of one colour and nothing of all others."""
    return bytes(1 << place if value == ink else 0 for value in range(256))


_SIGNS = bytes(min(63 + each, 126) for each in range(256))
_RUNS = re.compile(r"(.)\1{3,}")
