"""Small dialogs over a screen: pick from a list with a filter, type one line. Esc gives nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from workbench.panels.paint import clean

Answer = TypeVar("Answer")


class Dialog(ModalScreen[Answer], Generic[Answer]):
    """A box in the middle; Esc leaves."""

    BINDINGS = [Binding("escape", "nothing", show=False)]

    def action_nothing(self) -> None:
        """Leave without an answer."""
        self.dismiss(None)

    def action_cursor(self, by: int) -> None:
        """Move in the dialog's list, also while typing."""
        view = self.query_one(OptionList)
        view.action_cursor_down() if by > 0 else view.action_cursor_up()


@dataclass(frozen=True)
class Item:
    """One entry to pick: what it is called, what stands under it, and the words by which it is found."""

    key: str
    title: Content
    text: Content | None = None
    search_text: str = ""


class Pick(Dialog[str]):
    """Pick one of many; with `filtered` typing narrows the list. Gives the item's key."""

    BINDINGS = [
        Binding("down,ctrl+n", "cursor(1)", show=False),
        Binding("up,ctrl+p", "cursor(-1)", show=False),
        Binding("j", "cursor(1)", show=False),
        Binding("k", "cursor(-1)", show=False),
    ]

    def __init__(
        self, title: str, items: Sequence[Item], *, filtered: bool = False, empty: str = "Nothing here."
    ) -> None:
        super().__init__()
        self._title, self._items, self._filtered, self._empty = title, list(items), filtered, empty

    def compose(self) -> ComposeResult:
        """Title, filter, list."""
        with Vertical(id="box"):
            yield Static(self._title, id="title", markup=False)
            if self._filtered:
                yield Input(placeholder="words to look for", compact=True, id="filter")
            yield OptionList(*self._options(self._items), id="list", markup=False, compact=True)
            yield Static(self._empty, id="empty", markup=False)
            yield Static("enter choose   esc back", classes="note", markup=False)

    def on_mount(self) -> None:
        """The keys go to the filter, or to the list."""
        self.query_one("#empty").display = not self._items
        self.query_one("#filter" if self._filtered else "#list").focus()

    @staticmethod
    def _options(items: Sequence[Item]) -> list[Option]:
        return [
            Option(Content.assemble(item.title, "\n", item.text) if item.text else item.title, id=item.key)
            for item in items
        ]

    def replace(self, items: Sequence[Item]) -> None:
        """Other words for the entries with these keys; the cursor stays."""
        view = self.query_one(OptionList)
        for option, item in zip(self._options(items), items, strict=True):
            view.replace_option_prompt(item.key, option.prompt)

    @on(Input.Changed, "#filter")
    def _narrow(self, event: Input.Changed) -> None:
        words = event.value.lower().split()
        fitting = [item for item in self._items if all(word in item.search_text for word in words)]
        if words:
            fitting.sort(key=lambda item: not item.title.plain.lower().startswith(words[0]))
        view = self.query_one(OptionList)
        view.clear_options()
        view.add_options(self._options(fitting))
        view.highlighted = 0 if fitting else None
        self.query_one("#empty").display = not fitting

    @on(Input.Submitted, "#filter")
    def _enter(self) -> None:
        self.query_one(OptionList).action_select()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


def offer(app: App[Any], title: str, ways: Sequence[tuple[Item, Callable[[], object] | None]]) -> None:
    """Ask which of some ways is taken, and do that; leaving, like a way without a function, does nothing."""
    do = {item.key: act for item, act in ways}

    def chosen(key: str | None) -> None:
        if key is not None and (act := do[key]) is not None:
            act()

    app.push_screen(Pick(title, [item for item, _ in ways]), chosen)


class Ask(Dialog[str]):
    """Type one line."""

    def __init__(self, title: str, value: str, note: str = "", suggester: Suggester | None = None) -> None:
        super().__init__()
        self._title, self._value, self._note, self._suggester = title, value, note, suggester

    def compose(self) -> ComposeResult:
        """Title, line, what will happen."""
        with Vertical(id="box"):
            yield Static(self._title, id="title", markup=False)
            yield Input(self._value, compact=True, select_on_focus=False, suggester=self._suggester)
            yield Static(clean(self._note) or "enter accept   esc back", classes="note", markup=False)

    @on(Input.Submitted)
    def _enter(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class Show(Dialog[None]):
    """Lines of text to read; Esc leaves, and Enter or `q`, which mean nothing else here."""

    BINDINGS = [Binding("enter,q", "nothing", show=False)]

    DEFAULT_CSS = """
    Show #text { height: auto; max-height: 60vh; }
    """

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        """Title, text, the way back."""
        with Vertical(id="box"):
            yield Static(self._title, id="title", markup=False)
            with VerticalScroll(id="text"):
                yield Static(self._text, markup=False)
            yield Static("esc back", classes="note", markup=False)
