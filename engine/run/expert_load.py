"""The load of each expert as a picture: a digit for an expert, a line for a layer.

A digit tells the tokens that went to an expert against an even spread over its layer's experts: 0 none, `EVEN` as many, two more
for each doubling and two fewer for each halving, from 1 (a quarter and less) to 9 (four times and more).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EVEN, MOST = 5, 9
MAX_LAYERS, MAX_EXPERTS = 256, 1024
GLYPHS, PLAIN = "·▁▁▂▃▄▅▆▇█", ".123456789"
WORDS = (
    "A line is a layer, a column an expert: how many tokens came to it since the last look. {even} is an even share, {most} four "
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


def picture(rows: Sequence[str], width: int, *, plain: bool = False) -> list[str]:
    """The lines at most `width` cells wide; where experts have no cell each, one shows the fullest of its neighbours."""
    glyphs = PLAIN if plain else GLYPHS
    number, unused = len(str(len(rows))), max((len(str(row.count("0"))) for row in rows), default=1)
    room = max(1, width - number - unused - 2)
    found = []
    for layer, row in enumerate(rows):
        each = max(1, math.ceil(len(row) / room))
        cells = "".join(glyphs[int(max(row[at : at + each]))] for at in range(0, len(row), each))
        found.append(f"{layer:>{number}} {cells} {row.count('0') or '':>{unused}}".rstrip())
    return found


def explained(rows: Sequence[str], width: int, *, plain: bool = False) -> str:
    """What the picture shows, in words."""
    glyphs = PLAIN if plain else GLYPHS
    words = WORDS.format(even=glyphs[EVEN], most=glyphs[MOST], least=glyphs[1], none=glyphs[0])
    number, unused = len(str(len(rows))), max((len(str(row.count("0"))) for row in rows), default=1)
    each = math.ceil(max(map(len, rows), default=0) / max(1, width - number - unused - 2))
    return f"{words} A column holds {each} experts and shows the fullest." if each > 1 else words
