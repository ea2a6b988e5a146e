"""A chat template as it is written, beside a row as it writes it: turn by turn, what is learned, and what is odd."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import TextArea

from engine.errors import WorkbenchError
from engine.session.template import TYPED_SECONDS, TemplateEditing
from workbench.actions import bindings
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.drawn import Drawn
from workbench.panels.paint import Line, clean, paragraph
from workbench.panels.tokens import TokenView, lay_out
from workbench.screens.dialog import Ask, Item, offer

if TYPE_CHECKING:
    from engine.session.collector import Ask as Inquiry
    from engine.session.draft import Draft

NARROW = 100
"""Below so many columns the row stands under the template."""


class Answered(Message):
    """The row was written, or why it was not."""


class RowView(TokenView):
    """What is wrong, then the turns of the row, each with its role and how many tokens it has."""

    DEFAULT_CSS = "RowView { width: 1fr; height: 1fr; border-left: solid $wb-line; }"
    COMPONENT_CLASSES = TokenView.COMPONENT_CLASSES | Drawn.COMPONENT_CLASSES

    def __init__(self, editing: TemplateEditing) -> None:
        super().__init__()
        self.editing = editing

    def lines(self, width: int) -> list[Line]:
        """The newest row that could be written, under what is wrong with the template now."""
        editing, found = self.editing, self.editing.found
        made: list[Line] = paragraph(clean(editing.problem), width, "bad") if editing.problem else []
        for flaw in () if editing.problem else found.get("flaws", ()):
            made += paragraph(clean(flaw), width, "warn")
        made += [[]] if made else []
        before = False
        for turn in found.get("turns", ()):
            tokens = turn["tokens"]
            learned = sum(bool(token["trained"]) for token in tokens)
            words = f"{len(tokens):,} tokens" + (f", {learned:,} trained" if learned else "")
            made.append([(f"{clean(turn['role']) or 'before the turns'}  ", "accent"), (words, "dim")])
            made += [*lay_out(tokens, width, self.ids, trained_before=before), []]
            before = bool(tokens and tokens[-1]["trained"])
        if asked := found.get("asked"):
            made.append([("before an answer it writes", "accent")])
            made += paragraph(clean(asked), width, "value")
        return made or [[("the row is being written …", "faint")]]


class TemplateScreen(Screen[bool]):
    """The template at the left, the row at the right. Gives whether the config names another template now."""

    NAME = "template"
    BINDINGS: ClassVar[list[BindingType]] = bindings("template")
    DEFAULT_CSS = """
    TemplateScreen #head { height: 2; border-bottom: solid $wb-line; }
    TemplateScreen #status { border-top: solid $wb-line; height: 2; }
    TemplateScreen TextArea { width: 1fr; height: 1fr; border: none; padding: 0 1; }
    TemplateScreen TextArea:focus { border: none; }
    TemplateScreen.narrow Horizontal { layout: vertical; }
    """

    def __init__(self, editing: TemplateEditing, edit: Callable[[Callable[[], object]], object]) -> None:
        super().__init__()
        self.editing, self._edit = editing, edit
        self._timer: Timer | None = None
        self._shown = False
        self._saved = False
        self._told, self._bad = "", False
        editing.wake = lambda: self.post_message(Answered())

    def compose(self) -> ComposeResult:
        """Head, template and row, status, keys."""
        yield Bar("head")
        with Horizontal():
            # What is typed before the template is there would be lost when it comes.
            yield TextArea("", soft_wrap=True, show_line_numbers=False, tab_behavior="focus", read_only=True)
            yield RowView(self.editing)
        yield Bar("status")
        yield KeyLine("template")

    def on_mount(self) -> None:
        """The template and the row come together."""
        self.query_one(TextArea).focus()
        self.editing.send()
        self._draw()

    def on_unmount(self) -> None:
        """Nothing is asked for a screen that is gone."""
        self.editing.close()

    def on_resize(self) -> None:
        """Beside each other where there is room."""
        self.set_class(self.app.size.width < NARROW, "narrow")

    def on_answered(self) -> None:
        """Show what came."""
        if not self.editing.poll():
            return
        self.query_one(TextArea).read_only = False
        if not self._shown and "text" in self.editing.found:
            self._shown = True
            with self.prevent(TextArea.Changed):
                self.query_one(TextArea).load_text(str(self.editing.found["text"]))
        self._draw()

    @on(TextArea.Changed)
    def _typed(self, event: TextArea.Changed) -> None:
        """A moment after the newest letter the row is written anew."""
        self.editing.type(event.text_area.text)
        self._told = ""
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(TYPED_SECONDS, self._send)
        self._draw()

    def _send(self) -> None:
        self.editing.send()
        self._draw()

    def _show_message(self, words: str, *, bad: bool = False) -> None:
        """Say this until something is typed."""
        self._told, self._bad = words, bad
        self._draw()

    def _draw(self) -> None:
        editing = self.editing
        self.query_one("#head", Bar).update(Content.styled(f" {clean(editing.summary())}", "bold"))
        changed = "changed, not saved" if editing.changed else ""
        words = self._told or ("writing the row …" if editing.open else changed)
        style = "$error" if self._told and self._bad else "$wb-dim"
        self.query_one("#status", Bar).update(Content.styled(f" {clean(words)}", style))
        self.query_one(RowView).redraw()

    def action_row(self, by: int) -> None:
        """The next row, or the one before."""
        self.editing.go(self.editing.row + by)
        self._draw()

    def action_numbers(self) -> None:
        """Token ids under the tokens, or not."""
        view = self.query_one(RowView)
        view.ids = not view.ids
        view.redraw()

    def action_other(self) -> None:
        """From the template to the row, to scroll it, and back."""
        area, view = self.query_one(TextArea), self.query_one(RowView)
        (view if area.has_focus else area).focus()

    def action_save(self) -> None:
        """Save to a file that the config names from then on."""

        def named(name: str | None) -> None:
            if not name:
                return
            try:
                self._edit(lambda: self.editing.save(name))
            except WorkbenchError as problem:
                self._show_message(problem.full_message, bad=True)
            else:
                self._saved = True
                self._show_message(f"saved; model.chat_template is {name}")
                self.editing.send()

        self.app.push_screen(Ask("Save the chat template as", "template.jinja", "The config names it then."), named)

    def action_cancel(self) -> None:
        """Go back; what was typed and not saved is asked about first."""
        if not self.editing.changed:
            self.dismiss(self._saved)
            return
        leave = Item("leave", Content("leave it, without what was typed"))
        ways = [(Item("stay", Content("stay here")), None), (leave, lambda: self.dismiss(self._saved))]
        offer(self.app, "The template is changed and not saved", ways)


def show_template(screen: Screen[Any], draft: Draft, ask: Inquiry, row: int, then: Callable[[bool], None]) -> None:
    """Show the draft's template beside a row of it; `then` hears whether the config names another now."""
    editing = TemplateEditing(draft, ask, row=row)
    screen.app.push_screen(TemplateScreen(editing, lambda change: change()), lambda saved: then(bool(saved)))
