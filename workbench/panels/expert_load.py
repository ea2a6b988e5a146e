"""The page of a mixture's experts: how many tokens each took, a line a layer."""

from __future__ import annotations

from engine.run.expert_load import FEATURE, explained, picture
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
        if self.view is None or not rows:
            return paragraph(self._nothing(), width, "faint")
        plain, layers = ascii_only(), self.view.expert_layers
        drawn: list[Line] = [[(line, "value")] for line in picture(rows, width, layers=layers, plain=plain)]
        return [*paragraph(explained(rows, width, layers=layers, plain=plain), width, "faint"), [], *drawn]

    def _nothing(self) -> str:
        receipt = self.view.receipt if self.view is not None else []
        if receipt and not any(entry["feature"] == FEATURE for entry in receipt):
            return f"This run's receipt has no line `{FEATURE}`: its model has no layers of experts whose routers are heard."
        return "How tokens spread over experts comes with the first steps of a mixture of experts."
