"""What the config means in numbers, beside the form, with the change that the last edit made."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from engine.session.consequences import Consequence
from workbench.panels.drawn import Drawn
from workbench.panels.paint import Line

NARROW = 30


class Consequences(Drawn):
    """The numbers of one estimate, and how they differ from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Sequence[Consequence] = ()
        self._height: float = 0

    def show(self, numbers: Sequence[Consequence]) -> None:
        """Draw these."""
        if numbers != self._numbers:
            self._numbers = numbers
            height = len(self.lines(max(20, self.size.width - 1))) + 1
            if height != self._height:
                self._height = self.styles.height = height
            self.redraw()

    def lines(self, width: int) -> list[Line]:
        """A line a number; what is not known at all is left out."""
        made: list[Line] = []
        for each in self._numbers:
            if each.name == "checkpoints_bytes" and width < NARROW:
                continue
            text = each.part if each.part and width < NARROW else each.text
            shown = f"{text} !" if each.over else text
            beside = f"({each.change}) " if each.change else ""
            gap = width - cell_len(each.short) - cell_len(beside) - cell_len(shown)
            style = "bad" if each.over else "accent" if each.change else "value"
            if gap >= 1:
                made.append([(each.short, "dim"), (" " * gap, ""), (beside, "accent"), (shown, style)])
            else:
                gap = max(1, width - cell_len(each.short) - cell_len(shown))
                made.append([(each.short, "dim"), (" " * gap, ""), (shown, style)])
                if each.change:
                    made.append([(f"{each.change} by this edit".rjust(width), "accent")])
        return made or [[("not known yet", "dim")]]
