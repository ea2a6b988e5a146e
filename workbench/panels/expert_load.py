"""The page of a mixture's experts: how many tokens each took, a line a layer."""

from __future__ import annotations

from engine.run.expert_load import explained, picture
from engine.run.view import RunView
from workbench.panels.drawn import Scrolled
from workbench.panels.glyphs import ascii_only
from workbench.panels.paint import Line, paragraph


class Experts(Scrolled):
    """The newest picture of the load of all experts."""

    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """The picture below what it shows."""
        rows = self.view.experts if self.view is not None else []
        if not rows:
            return [[("How tokens spread over experts comes with the first steps of a mixture of experts.", "faint")]]
        plain = ascii_only()
        drawn: list[Line] = [[(line, "value")] for line in picture(rows, width, plain=plain)]
        return [*paragraph(explained(rows, width, plain=plain), width, "faint"), [], *drawn]
