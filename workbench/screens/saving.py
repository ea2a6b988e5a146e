"""A config into its file, from the form and on leaving.

Owns the question: what a file holds that this config does not know of is never replaced without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.content import Content

from engine.errors import WorkbenchError, full_text
from workbench.panels.paint import clean
from workbench.screens.dialog import Ask, Item, offer

if TYPE_CHECKING:
    from engine.session.draft import Draft

TITLE = "Save the config as"


def suggested_name(draft: Draft) -> str:
    """The file's own name, or one after the recipe that is not taken."""
    return str(draft.path) if draft.path is not None else _free(Path(f"{draft.recipe or 'config'}.yaml"))


def ask_name(app: App[Any], draft: Draft, then: Callable[[Path], object], fail: Callable[[str], object]) -> None:
    """Save under a name that is asked for; leaving saves nothing."""
    app.push_screen(Ask(TITLE, suggested_name(draft)), lambda name: write_file(app, draft, name, then, fail))


def write_file(
    app: App[Any], draft: Draft, name: str | None, then: Callable[[Path], object], fail: Callable[[str], object]
) -> None:
    """Save under a name, and ask first where that would lose what a file holds; `then` gets its place, `fail` why not."""
    from engine.session.draft import FileChanged, save_as

    if not name or not name.strip():
        return
    chosen = name.strip()

    def write(*, replace: bool = False) -> None:
        try:
            place = save_as(draft, chosen, replace=replace)
        except FileChanged as problem:
            keep = Item("keep", Content("keep the file, and save under another name"))
            lose = Item("replace", Content("replace it with the config of this window"))
            offer(app, clean(problem.message), [(keep, other), (lose, lambda: write(replace=True))])
        except (WorkbenchError, OSError) as problem:
            fail(full_text(problem))
        else:
            then(place)

    def other() -> None:
        app.push_screen(Ask(TITLE, _free(Path(chosen))), lambda name: write_file(app, draft, name, then, fail))

    write()


def _free(place: Path) -> str:
    """This name, or one like it that is not taken."""
    for number in range(1, 1000):
        name = place if number == 1 else place.with_name(f"{place.stem}-{number}{place.suffix}")
        if not name.expanduser().exists():
            return str(name)
    return str(place)
