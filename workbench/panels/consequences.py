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
        drawn: list[Line] = []
        for number in self._numbers:
            if number.name == "checkpoints_bytes" and width < NARROW:
                continue
            text = number.part if number.part and width < NARROW else number.text
            shown = f"{text} !" if number.over else text
            beside = f"({number.change}) " if number.change else ""
            gap = width - cell_len(number.short) - cell_len(beside) - cell_len(shown)
            style = "bad" if number.over else "accent" if number.change else "value"
            if gap >= 1:
                drawn.append([(number.short, "dim"), (" " * gap, ""), (beside, "accent"), (shown, style)])
            else:
                gap = max(1, width - cell_len(number.short) - cell_len(shown))
                drawn.append([(number.short, "dim"), (" " * gap, ""), (shown, style)])
                if number.change:
                    drawn.append([(f"{number.change} by this edit".rjust(width), "accent")])
        return drawn or [[("not known yet", "dim")]]
