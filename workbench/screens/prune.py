"""Removing checkpoints of a run: which would go, which stay and why, and a question before anything is removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from engine.errors import WorkbenchError
from engine.figures import size
from engine.run.pruning_choice import Choice, Kept, choose
from engine.run.store import RunFolder
from workbench.panels.paint import clean, cut, wrap
from workbench.screens.dialog import Dialog

PROMPTS = 1
"""Pinned prompts whose answer stands below a checkpoint."""
WIDTH = 70


class Looked(Message):
    """The folder was looked at: what would stay and go, or why nothing can."""

    def __init__(self, choice: Choice | None, problem: str) -> None:
        super().__init__()
        self.choice, self.problem = choice, problem


class PruneScreen(Dialog[Choice]):
    """Gives the choice that a person agreed to, or nothing. `+` and `-` keep more or fewer of the newest, the page keys
    scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "keep(1)", show=False),
        Binding("minus", "keep(-1)", show=False),
        Binding("pagedown", "page(1)", show=False, priority=True),
        Binding("pageup", "page(-1)", show=False, priority=True),
    ]
    DEFAULT_CSS = """
    PruneScreen #text { height: auto; max-height: 60vh; }
    """

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self._run, self._keep = run, 1
        self._choice: Choice | None = None

    def compose(self) -> ComposeResult:
        """Title, the checkpoints, the two answers, keys."""
        with Vertical(id="box"):
            yield Static(f"Checkpoints of {clean(self._run.id)}", id="title", markup=False)
            with VerticalScroll(id="text", can_focus=False):
                yield Static("looking at its checkpoints …", id="table", markup=False)
            yield Static("")
            yield OptionList(id="list", markup=False, compact=True)
            yield Static("enter choose   + - so many of the newest stay   esc back", classes="note", markup=False)

    def on_mount(self) -> None:
        """Look at the folder beside the screen."""
        self._choose()

    def _choose(self) -> None:
        keep = self._keep

        def look() -> None:
            try:
                self.post_message(Looked(choose(self._run, keep, hashes=False), ""))
            except WorkbenchError as problem:
                self.post_message(Looked(None, problem.full_message))

        self.run_worker(look, thread=True, exclusive=True, group="prune", exit_on_error=True)

    def on_looked(self, event: Looked) -> None:
        """Draw what would stay and go."""
        view = self.query_one(OptionList)
        view.clear_options()
        view.focus()
        self._choice = event.choice
        if event.choice is None:
            self.query_one("#table", Static).update(event.problem)
            view.add_option(Option("Go back", id="keep"))
        else:
            self.query_one("#table", Static).update(table(event.choice))
            view.add_option(Option("Remove nothing", id="keep"))
            if event.choice.go:
                words = f"Remove {event.choice.count()}, which frees {size(event.choice.bytes)}"
                view.add_option(Option(words, id="remove"))
        view.highlighted = 0

    def action_keep(self, by: int) -> None:
        """So many more of the newest stay."""
        most = len([*self._choice.stay, *self._choice.go]) if self._choice else 1
        self._keep = min(most, max(1, self._keep + by))
        self._choose()

    def action_page(self, by: int) -> None:
        """Scroll the checkpoints, where they are more than fit."""
        view = self.query_one("#text", VerticalScroll)
        view.scroll_page_down(animate=False) if by > 0 else view.scroll_page_up(animate=False)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._choice if event.option_id == "remove" else None)


def table(choice: Choice) -> Content:
    """A line for each checkpoint, with the answer to the first pinned prompt there."""
    name = max(len(each.name) for each in (*choice.stay, *choice.go))
    return Content("\n").join([*_lines("stays", "bold", choice.stay, name), *_lines("goes", "$error", choice.go, name)])


def _lines(sign: str, style: str, checkpoints: Sequence[Kept], name: int) -> list[Content]:
    lines = []
    for each in checkpoints:
        head = f"{each.name:<{name}} {size(each.bytes):>9}  "
        first, *more = wrap(clean(each.summary()), WIDTH - 7 - len(head)) or [""]
        lines.append(Content.assemble((f"{sign:<7}", style), head, first))
        lines += [Content(" " * (7 + len(head)) + words) for words in more]
        for asked in each.answers[:PROMPTS]:
            said = clean(asked["text"]).strip() or "no words"
            lines.append(Content.styled(f"{'':9}{cut(clean(asked['prompt']), 28)} → {cut(said, 32)}", "$wb-dim"))
    return lines
