"""`builtin/shapes`: drawn pictures of two shapes, a question that names one of them, and its colour as the answer.

Owns which pictures are held out and how they are drawn. The split is by what is shown, two shapes with their colours:
what is shown to a held-out question is in no training row at any place, so a right answer on it was not learned by
heart. Both colours of a picture differ, and each shape stands in a quarter of its own. Pillow and the standard library.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import random
from typing import TYPE_CHECKING, Any

from engine.builtin.dates import pick

if TYPE_CHECKING:
    from PIL.Image import Image

Row = dict[str, Any]
Shown = tuple[tuple[str, str], tuple[str, str]]
"""Two shapes, each with its colour; the shapes in the order of `SHAPES`."""


SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "pink": (250, 130, 200),
}
SIDE = 32
"""Pixels of a picture's side."""
TRAIN_ROWS = 10_000
HELD_OUT_ROWS = 400
HELD_OUT_SHOWN = 12
"""Pairs of coloured shapes, of 180, that no training row shows."""
QUESTIONS = (
    "What colour is the {}?",
    "Which colour does the {} have?",
    "The {}: what colour?",
)


def rows(split: str = "train", seed: int = 0, count: int | None = None) -> list[Row]:
    """`count` rows of a picture (`images`, a PNG of 32 x 32 pixels as a data URI) and `messages`, a question and its answer;
    10,000 for training, 400 held-out ones by default."""
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval; got {split!r}")
    draw = random.Random(f"builtin/shapes {split} {seed}")
    shown = held_out() if split == "eval" else trained()
    total = {"train": TRAIN_ROWS, "eval": HELD_OUT_ROWS}[split] if count is None else count
    return [_row(pick(draw, shown), draw) for _ in range(total)]


@functools.cache
def held_out() -> tuple[Shown, ...]:
    """What only held-out pictures show, in a fixed mixed order."""
    draw = random.Random("builtin/shapes held out")
    return tuple(sorted(_all(), key=lambda _: draw.random())[:HELD_OUT_SHOWN])


@functools.cache
def trained() -> tuple[Shown, ...]:
    """What training pictures show."""
    kept = set(held_out())
    return tuple(shown for shown in _all() if shown not in kept)


def _all() -> list[Shown]:
    pairs = itertools.combinations(SHAPES, 2)
    return [((one, a), (two, b)) for one, two in pairs for a, b in itertools.permutations(COLOURS, 2)]


def picture(shown: Shown, draw: random.Random) -> str:
    """A PNG of both shapes as a data URI; their quarters, sizes and places in them are drawn at random."""
    from PIL import ImageDraw

    image = blank()
    canvas = ImageDraw.Draw(image)
    quarters = [0, 1, 2, 3]
    for shape, colour in shown:
        quarter = quarters.pop(int(draw.random() * len(quarters)))
        side = 12 + int(draw.random() * 2)
        left, top = (
            corner * SIDE // 2 + 1 + int(draw.random() * (SIDE // 2 - 1 - side))
            for corner in (quarter % 2, quarter // 2)
        )
        _draw(canvas, shape, COLOURS[colour], (left, top, left + side, top + side))
    return encoded(image)


def blank() -> Image:
    """A picture of nothing."""
    from PIL import Image

    return Image.new("RGB", (SIDE, SIDE), "white")


def encoded(image: Image) -> str:
    """A picture as the data URI of a PNG."""
    saved = io.BytesIO()
    image.save(saved, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(saved.getvalue()).decode()}"


def _draw(canvas: Any, shape: str, colour: tuple[int, int, int], box: tuple[int, int, int, int]) -> None:
    left, top, right, bottom = box
    middle, third = (left + right) // 2, (right - left) // 3
    if shape == "circle":
        canvas.ellipse(box, fill=colour)
    elif shape == "square":
        canvas.rectangle(box, fill=colour)
    elif shape == "triangle":
        canvas.polygon([(middle, top), (right, bottom), (left, bottom)], fill=colour)
    else:
        canvas.rectangle((left + third, top, right - third, bottom), fill=colour)
        canvas.rectangle((left, top + third, right, bottom - third), fill=colour)


def _row(shown: Shown, draw: random.Random) -> Row:
    shape, colour = pick(draw, shown)
    question = pick(draw, QUESTIONS).format(shape)
    return {
        "images": [picture(shown, draw)],
        "messages": [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": colour}],
    }
