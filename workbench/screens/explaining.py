"""What the explanation says: of the row under the cursor, or of what was found by words and is no row here.

Owns which words belong to which row; the words themselves are the engine's, and how they lie is the panel's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config.recipes import recipes
from engine.config.steps import GOALS, STEPS
from engine.config.terms import TERMS
from engine.config.tree import fields
from engine.errors import redact
from engine.session.explain import of_kind, of_recipe

if TYPE_CHECKING:
    from workbench.panels.explain import Explain
    from workbench.panels.form import Row
    from workbench.screens.pages import View


def explain_row(panel: Explain, row: Row | None, step: str, view: View) -> None:
    """A setting, a kind that was taken, an unsaved config, a recipe; else the question that the step asks."""
    spec = fields.of(view.draft.config, row.key) if row is not None else None
    if spec is not None and spec.name == "kind":
        title, paragraphs = of_kind(spec.section, spec.value(view.draft.config))
        panel.say(title, [*paragraphs, "", f"Enter lists them all. {spec.section}.kind"])
    elif spec is not None:
        panel.show(spec, view.effective.get(spec.path))
    elif row is not None and row.key.startswith("unsaved:") and int(row.key[8:]) < len(view.left):
        kept = view.left[int(row.key[8:])]
        words = f"Its window was ended before it was saved. Until then it lies in {redact(str(kept.place))}."
        panel.say(row.label, [words, "", "Enter goes on with it; u takes that back."])
    elif row is not None and row.key.startswith("recipe:"):
        name = row.key.removeprefix("recipe:")
        panel.say(_recipe_title(name, row), [*of_recipe(name), "", "Enter takes this recipe; u takes it back."])
    else:
        asked = next(known for known in STEPS if known.id == step)
        panel.say(asked.title, [asked.question])


def _recipe_title(name: str, row: Row) -> str:
    """The goal's own words, else the recipe's whole title, which the list may have shortened."""
    if any(goal.recipe == name for goal in GOALS):
        return row.label
    return next((recipe.title for recipe in recipes() if recipe.name == name), row.label)


def explain_term(panel: Explain, name: str) -> None:
    """A term (`term:` and its name), or a setting that the config has no row for now."""
    term = name.removeprefix("term:")
    if term in TERMS:
        panel.say(term, [TERMS[term]])
    else:
        panel.show(fields[name], None)


def explain_kind(panel: Explain, section: str, kind: str) -> None:
    """A kind that the cursor of the open list is on, before it is taken."""
    panel.say(*of_kind(section, kind))
