"""A list edited line by line: sources by their path, prompts by their text. Leaving keeps it; undo takes it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.suggester import Suggester
from textual.widgets import Input, OptionList, Static

from engine.config.section import plain
from engine.config.tree import FieldSpec
from engine.session.browsing import wanted
from engine.session.draft import Draft
from engine.session.start import StartList
from workbench.panels.paint import clean
from workbench.panels.path_suggester import PathSuggester
from workbench.screens.dialog import Dialog

if TYPE_CHECKING:
    from workbench.screens.browse import Browse

Entry = tuple[int | None, str]  # where the entry stood before (None: new), and its text now


class ListScreen(Dialog[list[Entry]]):
    """Add, edit, remove and reorder lines. Gives the entries, or nothing where none changed.

    No letter is a key here: whatever is typed or pasted begins a new line, so that no path can do anything but stand in it.
    """

    BINDINGS = [
        Binding("escape", "done", show=False),
        Binding("delete,ctrl+d", "remove", show=False),
        Binding("shift+down", "shift(1)", show=False),
        Binding("shift+up", "shift(-1)", show=False),
        Binding("ctrl+o", "browse", show=False, priority=True),
    ]

    def __init__(
        self,
        title: str,
        texts: Sequence[str],
        *,
        what: str,
        suggester: Suggester | None = None,
        browse: Callable[[str], Browse] | None = None,
    ) -> None:
        """`browse` makes what asks for one line by files and what was used before."""
        super().__init__()
        self._title, self._what, self._suggester, self._browse = title, what, suggester, browse
        self._entries: list[Entry] = list(enumerate(texts))
        self._before = list(self._entries)
        self._at: int | None = None

    def compose(self) -> ComposeResult:
        """Title, lines, the line in edit, keys."""
        with Vertical(id="box"):
            yield Static(self._title, id="title", markup=False)
            yield OptionList(id="list", markup=False, compact=True)
            yield Input(
                id="line", compact=True, suggester=self._suggester, select_on_focus=False, placeholder=self._what
            )
            yield Static("", id="keys", classes="note", markup=False)

    def on_mount(self) -> None:
        """An empty list begins with its first line."""
        self._draw(0)
        if self._entries:
            self._edit(None)
        else:
            self._edit(0)

    def _draw(self, at: int) -> None:
        view = self.query_one(OptionList)
        view.clear_options()
        view.add_options([Content(clean(text)) for _, text in self._entries])
        view.highlighted = min(at, len(self._entries) - 1) if self._entries else None
        view.display = bool(self._entries)

    def _edit(self, at: int | None, text: str = "") -> None:
        self._at = at
        line = self.query_one("#line", Input)
        line.display = at is not None
        keys = "enter keep   → complete   esc leave it" if self._suggester else "enter keep   esc leave it"
        keys = keys if at is not None else "type adds  enter edit  ^d remove  shift+↑↓ move  esc done"
        self.query_one("#keys", Static).update(keys + ("  ^o browse" if self._browse else ""))
        if at is None:
            self.query_one(OptionList).focus()
        else:
            line.value = self._entries[at][1] if at < len(self._entries) else text
            line.cursor_position = len(line.value)
            line.focus()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self._edit(event.option_index)

    @on(Input.Submitted)
    def _kept(self, event: Input.Submitted) -> None:
        self._keep(self._at, event.value)

    def _keep(self, at: int | None, text: str) -> None:
        """The text is that line from now on."""
        if at is not None and text.strip():
            if at < len(self._entries):
                self._entries[at] = (self._entries[at][0], text)
            else:
                self._entries.append((None, text))
            self._draw(at)
        self._edit(None)

    def on_key(self, event: events.Key) -> None:
        """A character begins a new line at the end; one that comes before the line has the focus stands behind it."""
        if not event.is_printable or not event.character:
            return
        if self._at is not None:
            event.stop()
            self.query_one("#line", Input).insert_text_at_cursor(event.character)
        elif not event.character.isspace():
            event.stop()
            self._edit(len(self._entries), event.character)

    def on_paste(self, event: events.Paste) -> None:
        """So does what is pasted."""
        if self._at is None and event.text.strip():
            event.stop()
            self._edit(len(self._entries), event.text.strip().splitlines()[0])

    def action_browse(self) -> None:
        """Pick what the line in edit, or a new one, shall be."""
        if self._browse is None:
            return
        at = self._at if self._at is not None else len(self._entries)

        def answered(text: str | None) -> None:
            if text:
                self._edit(at)
                self.query_one("#line", Input).value = text
                self._keep(at, text)

        line = self.query_one("#line", Input).value if self._at is not None else ""
        self.app.push_screen(self._browse(line), answered)

    def action_remove(self) -> None:
        """Remove the line in focus."""
        at = self.query_one(OptionList).highlighted
        if at is not None:
            del self._entries[at]
            self._draw(at)

    def action_shift(self, by: int) -> None:
        """Move the line in focus."""
        at = self.query_one(OptionList).highlighted
        if at is not None and 0 <= at + by < len(self._entries):
            self._entries[at], self._entries[at + by] = self._entries[at + by], self._entries[at]
            self._draw(at + by)

    def action_done(self) -> None:
        """Leave the line in edit; then leave the list, keeping it."""
        if self._at is not None and self._entries:
            self._edit(None)
        else:
            self.dismiss(self._entries if self._entries != self._before else None)


def edit_list(
    app: App[Any], draft: Draft, spec: FieldSpec, path: str, start: StartList, change: Callable[[list[Any]], None]
) -> None:
    """Ask for the sources or prompts of a setting; `change` is called with the new ones. A source keeps what else it says."""
    from workbench.screens.browse import Browse

    written = draft.value(path)
    old = list(written) if isinstance(written, list) else [plain(entry) for entry in spec.value(draft.config)]
    texts = [str(entry.get("path", "")) if isinstance(entry, dict) else str(entry) for entry in old]

    def source(place: int | None, words: str) -> dict[str, Any]:
        before = old[place] if place is not None and isinstance(old[place], dict) else {}
        return {**before, "path": words}

    def browse(text: str) -> Browse:
        return Browse(spec.title, text, wanted(spec), base=draft.base, recent=start.rows)

    def keep_sources(entries: list[Entry] | None) -> None:
        if entries is not None:
            change([source(place, words) for place, words in entries])

    def keep_prompts(entries: list[Entry] | None) -> None:
        if entries is not None:
            change([words for _, words in entries])

    if spec.control == "sources":
        what, suggester = "path of a file, or builtin/dates", PathSuggester(draft.base)
        app.push_screen(ListScreen(spec.title, texts, what=what, suggester=suggester, browse=browse), keep_sources)
    else:
        app.push_screen(ListScreen(spec.title, texts, what="a prompt"), keep_prompts)
