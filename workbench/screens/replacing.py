"""Another config in place of the one being built: a ready one, or one that a window left unsaved; undo takes it back.

Owns the questions: a config of the person's own is never replaced without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.content import Content

from engine.errors import WorkbenchError
from workbench.panels.paint import clean
from workbench.screens.dialog import Item, offer

if TYPE_CHECKING:
    from engine.session.draft import Draft
    from workbench.screens.editing import EditPane
    from workbench.unsaved import UnsavedConfig

STAY = Item("stay", Content("Leave it as it is"))


def take_recipe(pane: EditPane, name: str, then: Callable[[], object]) -> None:
    """Begin from a ready config; `then` follows if it was taken."""
    session = pane.session

    def begin(keep_own: bool) -> None:
        session.begin_from(name, keep_own=keep_own)
        pane.changed()
        then()

    def replace(keep_own: bool) -> None:
        begin(keep_own)
        pane.report("u takes it back; nothing is written to the file before w.")

    if not session.is_own:
        begin(False)
        return
    ways = [
        (Item("keep", Content("Keep my model and data, take the rest from it")), lambda: replace(True)),
        (Item("replace", Content("Replace all of it, model and data too")), lambda: replace(False)),
        (STAY, None),
    ]
    offer(pane.app, f"{_called(session.draft)}: take the ready config {name}?", ways)


def take_unsaved(pane: EditPane, left: list[UnsavedConfig], number: int) -> None:
    """Go on with one of the configs that earlier windows left unsaved."""
    session = pane.session

    def take() -> None:
        kept = left.pop(number)
        try:
            session.begin(kept.text, kept.recipe)
        except WorkbenchError as problem:
            pane.report(f"It cannot be read: {problem.message} It lies in {kept.place}.", bad=True)
            return
        kept.name_file(session.draft)
        pane.changed()
        pane.report("The unsaved config is back; w saves it.")

    if not session.is_own:
        take()
        return
    ways = [(Item("take", Content("Put what was not saved in its place")), take), (STAY, None)]
    offer(pane.app, f"{_called(session.draft)}: go on with another config?", ways)


def _called(draft: Draft) -> str:
    return clean(draft.path.name) if draft.path else "This config has its own model or data"
