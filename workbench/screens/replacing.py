"""Another config in place of the one being built: a ready one, or one that a window left unsaved; undo takes it back.

Owns the questions: a config of the person's own is never replaced without asking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from engine.errors import WorkbenchError
from workbench.panels.paint import clean
from workbench.screens.dialog import Item, Pick

if TYPE_CHECKING:
    from engine.session.draft import Draft
    from workbench.screens.editing import EditingScreen

STAY = Item("stay", Content("Leave it as it is"))


def take_recipe(screen: EditingScreen, name: str) -> None:
    """Begin from a ready config."""
    session = screen.session

    def begin(keep_own: bool) -> None:
        session.begin_from(name, keep_own=keep_own)
        screen.changed()
        screen.steps.turn(1)

    def answered(answer: str | None) -> None:
        if answer in ("keep", "replace"):
            begin(answer == "keep")
            screen.tell("u takes it back; nothing is written to the file before w.")

    if not session.is_own:
        begin(False)
        return
    items = [
        Item("keep", Content("Keep my model and data, take the rest from it")),
        Item("replace", Content("Replace all of it, model and data too")),
        STAY,
    ]
    screen.app.push_screen(Pick(f"{_called(session.draft)}: take the ready config {name}?", items), answered)


def take_unsaved(screen: EditingScreen, number: int) -> None:
    """Go on with a config that an earlier window left unsaved."""
    session = screen.session

    def take() -> None:
        kept = screen.background.left.pop(number)
        try:
            session.begin(kept.text, kept.recipe)
        except WorkbenchError as problem:
            screen.tell(f"It cannot be read: {problem.message} It lies in {kept.place}.", bad=True)
            return
        if kept.path is not None and kept.path.exists():
            session.draft.path = kept.path
        screen.changed()
        screen.tell("The unsaved config is back; w saves it.")

    def answered(answer: str | None) -> None:
        if answer == "take":
            take()

    if not session.is_own:
        take()
        return
    items = [Item("take", Content("Put what was not saved in its place")), STAY]
    screen.app.push_screen(Pick(f"{_called(session.draft)}: go on with another config?", items), answered)


def _called(draft: Draft) -> str:
    return clean(draft.path.name) if draft.path else "This config has its own model or data"
