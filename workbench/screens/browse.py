"""Ask for a path or a model: what is typed is completed, and what there is can be picked instead of typed.

One line as wide as the window, and below it what fits: used before, in the hub's cache, files and folders. Every letter is
text here. Enter takes what is typed, or the line that the arrows chose; on a folder it goes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList, Static

from engine.config.text_values import as_typed
from engine.config.tree import FieldSpec
from engine.session.browsing import Offer, Wanted, completed, known_of, offers, wanted
from engine.session.build import BuildSession
from engine.session.start import StartList
from workbench.panels.paint import clean, cut
from workbench.screens.dialog import Dialog

KEYS = "enter take   ↓↑ choose   tab complete   esc leave as it was"


class Browse(Dialog[str]):
    """Gives the text that was taken; nothing where it is left as it was."""

    BINDINGS = [
        Binding("down,ctrl+n", "cursor(1)", show=False, priority=True),
        Binding("up,ctrl+p", "cursor(-1)", show=False, priority=True),
        Binding("tab", "complete", show=False, priority=True),
    ]

    class Known(Message):
        """What was used before and what the cache holds."""

        def __init__(self, known: list[Offer]) -> None:
            super().__init__()
            self.known = known

    def __init__(
        self,
        title: str,
        value: str,
        want: Wanted,
        *,
        base: Path,
        recent: Callable[[], Sequence[str]] = tuple,
        judge: Callable[[str], str] = lambda text: "",
    ) -> None:
        """`recent` is called in a thread; `judge` says in a sentence what is wrong with a text, at each key press."""
        super().__init__()
        self._title, self._value, self._want, self._base = title, value, want, base
        self._recent, self._judge = recent, judge
        self._known: list[Offer] = []
        self._offers: list[Offer] = []

    def compose(self) -> ComposeResult:
        """Title, line, what is found of it, what fits, keys."""
        with Vertical(id="box"):
            yield Static(self._title, id="title", markup=False)
            yield Input(self._value, compact=True, select_on_focus=False, id="line")
            yield Static("", id="found", markup=False)
            yield OptionList(id="list", markup=False, compact=True)
            yield Static(KEYS, classes="note", markup=False)

    def on_mount(self) -> None:
        """The keys go to the line; what takes longer comes when it comes."""
        self.query_one("#line", Input).focus()
        self._list()
        self.run_worker(self._poll, thread=True, exit_on_error=True)

    def _poll(self) -> None:
        self.post_message(self.Known(known_of(self._want, self._recent(), self._base)))

    def on_browse_known(self, event: Known) -> None:
        """More to offer; the cursor stays on its line."""
        self._known = event.known
        self._list()

    @on(Input.Changed, "#line")
    def _typed(self) -> None:
        self._list(stay=False)

    def _list(self, *, stay: bool = True) -> None:
        """What fits the line; of a value that stands there already everything is shown until it is changed."""
        view, text = self.query_one(OptionList), self.query_one("#line", Input).value
        before = self._offers[view.highlighted] if stay and view.highlighted is not None else None
        self._offers = offers(self._base, "" if text == self._value else text, self._want, self._known)
        width = max(20, min(self.app.size.width * 96 // 100, 120) - 6)
        view.clear_options()
        view.add_options([_shown(offer, width) for offer in self._offers])
        view.highlighted = self._offers.index(before) if before in self._offers else None
        view.display = bool(self._offers)
        verdict = self._judge(text) if text != self._value else ""
        self.query_one("#found", Static).update(Content(clean(verdict)))
        self.query_one("#found").display = bool(verdict)

    @on(Input.Submitted, "#line")
    def _enter(self) -> None:
        view = self.query_one(OptionList)
        if view.highlighted is None:
            self.dismiss(self.query_one("#line", Input).value.strip())
        else:
            self._take(self._offers[view.highlighted])

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self._take(self._offers[event.option_index])

    def _take(self, offer: Offer) -> None:
        """A folder is gone into, unless it is what is asked for; anything else is the answer."""
        if offer.folder and not (self._want.what == "model" and offer.about != "folder"):
            self._write(offer.text + "/")
        else:
            self.dismiss(offer.text)

    def _write(self, text: str) -> None:
        line = self.query_one("#line", Input)
        line.value = text
        line.cursor_position = len(text)
        line.focus()

    def action_complete(self) -> None:
        """As far as what fits agrees; the line under the cursor where one was chosen."""
        view = self.query_one(OptionList)
        if view.highlighted is not None:
            offer = self._offers[view.highlighted]
            self._write(offer.text + ("/" if offer.folder else ""))
        else:
            self._write(completed(self.query_one("#line", Input).value, self._offers))

    def action_cursor(self, by: int) -> None:
        """Through what fits, while the line keeps the keys; above the first is the line itself."""
        view = self.query_one(OptionList)
        at = -1 if view.highlighted is None else view.highlighted
        at = max(-1, min(at + by, len(self._offers) - 1))
        view.highlighted = None if at < 0 else at


def _shown(offer: Offer, width: int) -> Content:
    about = cut(clean(offer.about), width // 2)
    room = width - cell_len(about) - 2
    text = cut(clean(offer.text + ("/" if offer.folder else "")), room)
    return Content.assemble(text, " " * max(1, width - cell_len(text) - cell_len(about)), (about, "$wb-dim"))


def edit_path(
    app: App[Any],
    session: BuildSession,
    spec: FieldSpec,
    value: object,
    start: StartList,
    change: Callable[[str], None],
) -> None:
    """Ask for the path or model of a setting; `change` is called with a text other than that of `value`."""
    want, old = wanted(spec), as_typed(value)

    def judge(text: str) -> str:
        return next((finding.text for finding in session.typed(spec.path, text) if finding.path == spec.path), "")

    def keep(text: str | None) -> None:
        if text is not None and text != old:
            change(text)

    recent = start.models if want.what == "model" else tuple
    app.push_screen(Browse(spec.title, old, want, base=session.draft.base, recent=recent, judge=judge), keep)
