"""The scroll bar of a panel, and how far it scrolls to have a line in view."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from workbench.panels.drawn import Drawn, _Bar


def thumb(total: int, height: int, top: int) -> list[int]:
    bar = _Bar(total, height, top)
    return [y for y in range(height) if bar(y) != " "]


def test_the_bar_says_how_much_there_is_and_reaches_both_ends() -> None:
    assert thumb(10, 10, 0) == thumb(3, 10, 0) == []
    assert thumb(40, 10, 0) == [0, 1]
    assert thumb(40, 10, 15) == [4, 5]
    assert thumb(40, 10, 30) == [8, 9]
    assert thumb(10_000, 10, 9_990) == [9], "it is never gone"


def test_a_panel_scrolls_no_further_than_to_have_the_lines_in_view() -> None:
    panel: Any = SimpleNamespace(size=SimpleNamespace(height=10), top=20, _paint=lambda: None)
    for first, count, top in ((22, 1, 20), (29, 1, 20), (30, 1, 21), (30, 4, 24), (5, 1, 5), (40, 20, 40)):
        Drawn.show_lines(panel, first, count)
        assert panel.top == top
