"""The explanation of the setting in focus: its help, what it takes, who needs it, where it comes from."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.coercion import expectation
from engine.config.tree import FieldSpec
from engine.planning.auto import Effective
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, paragraph


class Explain(Scrolled):
    """Plain words for the row in focus; Tab leads here where they are longer than the room."""

    def __init__(self) -> None:
        super().__init__()
        self._about: tuple[object, ...] = ()
        self._spec: FieldSpec | None = None
        self._effective: Effective | None = None
        self._text: tuple[str, Sequence[str]] = ("", ())

    def show(self, spec: FieldSpec, effective: Effective | None) -> None:
        """Explain a setting."""
        if (spec.path, effective) != self._about:
            self._about = (spec.path, effective)
            self._spec, self._effective = spec, effective
            self._fresh()

    def say(self, title: str, paragraphs: Sequence[str]) -> None:
        """Explain something that is no setting."""
        if (title, tuple(paragraphs)) != self._about:
            self._about = (title, tuple(paragraphs))
            self._spec, self._text = None, (title, paragraphs)
            self._fresh()

    def _fresh(self) -> None:
        self.top = 0
        self.redraw()

    def lines(self, width: int) -> list[Line]:
        """Title, help, then the facts."""
        spec = self._spec
        if spec is None:
            title, texts = self._text
            drawn = list(paragraph(title, width, "bold")) if title else []
            for text in texts:
                drawn += paragraph(clean(text).replace("`", ""), width) if text else [[]]
            return drawn
        drawn = [*paragraph(spec.title, width, "bold"), *paragraph(clean(spec.help).replace("`", ""), width)]
        if self._effective is not None and self._effective.requested != self._effective.effective:
            reason = self._effective.reason
            drawn += [[], *paragraph(f"Here it becomes {clean(self._effective.effective)}: {clean(reason)}.", width)]
        drawn += [
            [],
            *paragraph(
                f"Takes {expectation(spec).replace(chr(96), '')}{' ' + spec.unit if spec.unit else ''}.", width, "dim"
            ),
        ]
        default = "none" if spec.default in (None, "", [], {}) else spec.label(spec.default)
        drawn += paragraph(f"Default: {clean(default)}.", width, "dim")
        drawn += paragraph(spec.path, width, "faint")
        if spec.source:
            drawn += paragraph(spec.source, width, "faint")
        return drawn
