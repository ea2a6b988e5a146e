"""Leaving: asks when a config would be lost, and says what goes on without this window and how to come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from engine.errors import redact, visible
from engine.run.store import RunFolder, runs_in
from engine.run.store import runs_dir as default_runs_dir
from workbench.calling import file_name, run_name
from workbench.panels.paint import clean
from workbench.screens.dialog import Dialog
from workbench.screens.saving import ask_name, write_file

if TYPE_CHECKING:
    from engine.session.draft import Draft

ALIVE = ("queued", "starting", "running", "stopping")
SHOWN = 3


class LeaveScreen(Dialog[str]):
    """The config has changes that no file holds: save, leave without, or stay."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft

    def compose(self) -> ComposeResult:
        """The question and three answers; the careful one first."""
        file = clean(self._draft.path) if self._draft.path else "a file"
        with Vertical(id="box"):
            yield Static("The config has changes that are not saved.", id="title", markup=False)
            yield OptionList(
                Option(Content(f"Save to {file}, then leave"), id="save"),
                Option(Content("Leave without saving"), id="leave"),
                Option(Content("Stay"), id="stay"),
                compact=True,
                markup=False,
            )
            yield Static("Runs are not touched: they go on without this window.", classes="note", markup=False)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        if event.option_id != "save":
            self.dismiss(event.option_id)
            return
        if self._draft.path is None:
            ask_name(self.app, self._draft, self._saved, self._failed)
        else:
            write_file(self.app, self._draft, str(self._draft.path), self._saved, self._failed)

    def _saved(self, place: Path) -> None:
        self.app.goodbye.append(f"The config is in {file_name(place)}.")  # type: ignore[attr-defined]
        self.dismiss("leave")

    def _failed(self, words: str) -> None:
        self.notify(visible(redact(words)), severity="error", markup=False)


def alive(root: Path) -> Iterator[RunFolder]:
    """The runs under `root` that have not ended, as their supervisors last wrote."""
    if root.is_dir():
        for run in runs_in(root):
            if run.read_json().get("state") in ALIVE:
                yield run


def what_goes_on(root: Path) -> list[str]:
    """One line a run that goes on, with the command that shows it again."""
    runs = list(alive(root))
    lines = [goes_on(run) for run in runs[:SHOWN]]
    if len(runs) > SHOWN:
        where = "" if root == default_runs_dir() else f" --runs {file_name(root)}"
        lines.append(f"So do {len(runs) - SHOWN} more; `workbench runs{where}` lists them.")
    return lines


def goes_on(run: RunFolder) -> str:
    """A run that goes on, and the command that shows it again."""
    return f"{visible(run.id)} goes on without this window. `workbench {visible(run_name(run))}` shows it again."


def way_back(run: RunFolder | None, draft: Draft | None) -> str:
    """How to come back where nothing goes on: to the run last watched, the config, or the app."""
    if run is not None:
        return f"`workbench {visible(run_name(run))}` shows {visible(run.id)} again."
    if draft is not None and draft.path is not None:
        return f"`workbench {visible(file_name(draft.path))}` opens {visible(draft.path.name)} again."
    return "`workbench` opens the app again."
