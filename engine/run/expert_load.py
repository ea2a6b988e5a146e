"""The load of each expert as a picture: a digit for an expert, a line for a layer.

A digit tells the tokens that went to an expert against an even spread over its layer's experts: 0 none, `EVEN` as many, two more
for each doubling and two fewer for each halving, from 1 (a quarter and less) to 9 (four times and more).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FEATURE = "expert load"
"""The line of a receipt that tells of layers whose routers are heard."""
EVEN, MOST = 5, 9
MAX_LAYERS, MAX_EXPERTS = 256, 1024
MAX_NUMBER = 10_000
GLYPHS, PLAIN = "·▁▁▂▃▄▅▆▇█", ".123456789"
WORDS = (
    "A line is a layer with its number, from 0, a column an expert: how many tokens came to it since the last look. {even} is an even share, {most} four "
    "times as many and more, {least} a quarter and less, {none} none. On the right, how many experts had none."
)


def digits(counts: Sequence[int]) -> str:
    """A layer's line from the tokens of each of its experts; zeros where there were none at all."""
    whole = sum(counts)
    return "".join(
        "0" if not each else str(min(MOST, max(1, round(EVEN + 2 * math.log2(each * len(counts) / whole)))))
        for each in counts
    )


def checked(rows: object) -> list[str]:
    """The lines of an event, from whoever wrote it; nothing for what is none."""
    if not isinstance(rows, list) or len(rows) > MAX_LAYERS:
        return []
    fine = all(isinstance(row, str) and len(row) <= MAX_EXPERTS and set(row) <= set("0123456789") for row in rows)
    return list(rows) if fine else []


def numbers(layers: object, rows: Sequence[str]) -> list[int]:
    """The layer of each line by what an event tells; the place of the line where it tells nothing of use."""
    if not isinstance(layers, list) or len(layers) != len(rows):
        return list(range(len(rows)))
    fine = all(type(layer) is int and 0 <= layer < MAX_NUMBER for layer in layers)
    return list(layers) if fine else list(range(len(rows)))


def differs_visibly(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether an expert's load doubled or halved, or went to none or from none: two digits, as one may be rounding."""
    if [len(row) for row in before] != [len(row) for row in now]:
        return True
    pairs = (
        (int(old), int(new)) for past, row in zip(before, now, strict=True) for old, new in zip(past, row, strict=True)
    )
    return any(abs(old - new) > 1 or (old == 0) != (new == 0) for old, new in pairs)


def picture(rows: Sequence[str], width: int, *, layers: Sequence[int] = (), plain: bool = False) -> list[str]:
    """The lines at most `width` cells wide, each with its layer of `layers` or else its place; where experts have no cell each, one shows the fullest of its neighbours."""
    glyphs = PLAIN if plain else GLYPHS
    layers = layers or range(len(rows))
    number, unused, room = _widths(rows, width, layers)
    found = []
    for layer, row in zip(layers, rows, strict=True):
        each = max(1, math.ceil(len(row) / room))
        cells = "".join(glyphs[int(max(row[at : at + each]))] for at in range(0, len(row), each))
        found.append(f"{layer:>{number}} {cells} {row.count('0') or '':>{unused}}".rstrip())
    return found


def _widths(rows: Sequence[str], width: int, layers: Sequence[int]) -> tuple[int, int, int]:
    """Cells of a line's number, of how many experts had no token, and what is left for the experts."""
    number = max((len(str(layer)) for layer in layers), default=1)
    unused = max((len(str(row.count("0"))) for row in rows), default=1)
    return number, unused, max(1, width - number - unused - 2)


def explained(rows: Sequence[str], width: int, *, layers: Sequence[int] = (), plain: bool = False) -> str:
    """What the picture shows, in words."""
    glyphs = PLAIN if plain else GLYPHS
    words = WORDS.format(even=glyphs[EVEN], most=glyphs[MOST], least=glyphs[1], none=glyphs[0])
    each = math.ceil(max(map(len, rows), default=0) / _widths(rows, width, layers or range(len(rows)))[2])
    return f"{words} A column holds {each} experts and shows the fullest." if each > 1 else words
