"""The right column of the build screen: what the row in focus means, and the config in numbers.

Owns which words belong to which row, and which of the two parts has the room; the words themselves are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Vertical

from engine.config.coercion import expectation
from engine.config.glossary import TERMS
from engine.config.recipes import recipes
from engine.config.steps import GOALS, STEPS
from engine.config.tree import FieldSpec, fields
from engine.errors import redact
from engine.planning.auto import Effective
from engine.session.consequences import Consequence
from engine.session.explain import of_kind, of_recipe
from workbench.panels.drawn import Drawn, Scrolled
from workbench.panels.paint import Line, clean, paragraph

if TYPE_CHECKING:
    from workbench.panels.form import Row
    from workbench.screens.pages import View

NARROW = 30


class Side(Vertical):
    """The explanation above, the consequences below."""

    def __init__(self) -> None:
        super().__init__(id="side")
        self.explain, self.consequences = Explain(), Consequences()
        self.aside: str | None = None
        """A term (`term:` and its name) or a setting that was looked up and is no row here: explained until the cursor moves."""

    def compose(self) -> ComposeResult:
        """The two parts."""
        yield self.explain
        yield self.consequences

    def draw(self, row: Row | None, step: str, view: View) -> None:
        """Explain this row of a step, or what was looked up."""
        recipe = row.key.removeprefix("recipe:") if row is not None and row.key.startswith("recipe:") else None
        # Nothing follows from what is not taken yet, and its words need the room.
        self.consequences.display = recipe in (None, view.draft.recipe)
        if self.aside is None:
            self._explain_row(row, step, view)
        elif (term := self.aside.removeprefix("term:")) in TERMS:
            self.explain.show_text(term, [TERMS[term]])
        else:
            self.explain.show(fields[self.aside], None)

    def consider(self, section: str, kind: str) -> None:
        """Explain a kind that the cursor of the open list is on, before it is taken."""
        self.consequences.display = False  # the words need the room, and nothing follows before one is taken
        self.explain.show_text(*of_kind(section, kind))

    def _explain_row(self, row: Row | None, step: str, view: View) -> None:
        """A setting, a kind that was taken, an unsaved config, a recipe; else the question that the step asks."""
        say = self.explain.show_text
        spec = fields.of(view.draft.config, row.key) if row is not None else None
        if spec is not None and spec.name == "kind":
            title, paragraphs = of_kind(spec.section, spec.value(view.draft.config))
            say(title, [*paragraphs, "", f"Enter lists them all. {spec.section}.kind"])
        elif spec is not None:
            self.explain.show(spec, view.effective.get(spec.path))
        elif row is not None and row.key.startswith("unsaved:") and int(row.key[8:]) < len(view.left):
            config = view.left[int(row.key[8:])]
            words = f"Its window was ended before it was saved. Until then it lies in {redact(str(config.place))}."
            say(row.label, [words, "", "Enter goes on with it; u takes that back."])
        elif row is not None and row.key.startswith("recipe:"):
            name = row.key.removeprefix("recipe:")
            say(_recipe_title(name, row), [*of_recipe(name), "", "Enter takes this recipe; u takes it back."])
        else:
            asked = next(known for known in STEPS if known.id == step)
            say(asked.title, [asked.question])


def _recipe_title(name: str, row: Row) -> str:
    """The goal's own words, else the recipe's whole title, which the list may have shortened."""
    if any(goal.recipe == name for goal in GOALS):
        return row.label
    return next((recipe.title for recipe in recipes() if recipe.name == name), row.label)


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

    def show_text(self, title: str, paragraphs: Sequence[str]) -> None:
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
            self._fit()
            self.redraw()

    def on_resize(self) -> None:
        """A wider column has lines that a narrow one leaves out, and each of them is in view."""
        super().on_resize()
        self._fit()

    def _fit(self) -> None:
        height = len(self.lines(max(20, self.size.width - 1))) + 1
        if height != self._height:
            self._height = self.styles.height = height

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
