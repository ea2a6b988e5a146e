"""The colours as a terminal of 256 colours shows them, which is what a session over SSH inside tmux usually has."""

from __future__ import annotations

import itertools

import pytest
from rich.color import Color, ColorSystem

from workbench.app import THEMES

GROUNDS = ("background", "wb-field", "wb-cursor")


def shown(colour: str) -> tuple[int, int, int]:
    return tuple(Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT).get_truecolor())


@pytest.mark.parametrize("theme", THEMES[:2], ids=lambda theme: theme.name)
def test_grounds_stay_grey_and_apart_in_256_colours(theme):
    grounds = [shown({"background": theme.background, **theme.variables}[name]) for name in GROUNDS]
    assert all(max(ground) == min(ground) for ground in grounds), grounds
    steps = [abs(after[0] - before[0]) for before, after in itertools.pairwise(grounds)]
    assert min(steps) >= 8, grounds  # one step of the terminal's own greys
