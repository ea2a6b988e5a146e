"""The stop menu: the ways to stop a run, each with what it keeps."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from engine.run.stopping import Way, ways
from engine.run.view import RunView
from workbench.panels.paint import wrap
from workbench.screens.dialog import Item, Pick

LETTERS = {"save_stop": "s", "checkpoint": "c", "end_of_epoch": "e", "stop": "n"}


class StopMenu(Pick):
    """Gives one of the words of `engine.run.control`, or nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(letter, f"take('{do}')", show=False) for do, letter in LETTERS.items()
    ]

    def __init__(self, view: RunView) -> None:
        super().__init__("How should it stop?", [_item(way) for way in ways(view)])

    def action_take(self, do: str) -> None:
        """The way with this letter."""
        self.dismiss(do)


def _item(way: Way) -> Item:
    title = Content.assemble((f"{LETTERS[way.do]}  ", "bold $accent"), (way.title, "bold"))
    return Item(way.do, title, Content("\n".join(f"   {line}" for line in wrap(way.keeps, 55))))
