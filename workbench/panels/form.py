"""The form: rows of one step, a cursor, and one editor mounted over the row that is being edited.

Owns moving, drawing and the place of the editor. Refuses to know settings: a `Row` comes ready made, what is typed goes
out as messages, and the screen decides. All rows are drawn by one widget; only the row in edit has a control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Offset
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Input, OptionList

from workbench.messages import EditWanted, FieldChosen
from workbench.panels.drawn import Drawn
from workbench.panels.paint import Line, Part, cut, paragraph, wrap

GUTTER = 2
INDENT = " " * GUTTER
NARROW_FORM = 50
NARROW, LABEL = 14, 25  # cells of the label column: as the longest label on the page wants, within these
MARKS = {"error": ("✗", "bad"), "warning": ("!", "warn"), "hint": ("?", "hint")}


@dataclass(frozen=True)
class Row:
    """One row: a setting (`field`), something to choose (`pick`), something to do (`action`), or lines to read (`text`)."""

    key: str
    kind: str = "field"
    label: str = ""
    value: tuple[Part, ...] = ()
    mark: str = ""
    """error, warning, hint, or nothing"""
    notes: tuple[tuple[str, str], ...] = ()
    """(text, style) of what stands under the row while it is in focus."""
    tail: str = ""
    """A sign at the right edge: `▾` where a list opens."""
    lines: tuple[tuple[str, str, int], ...] = ()
    """For `text` rows: (text, style, how many lines it may take)."""
    chosen: bool = False
    short: str = ""
    """The value where its words do not fit."""


def _few(lines: list[Line], most: int) -> list[Line]:
    """The first lines; an ellipsis where there are more."""
    if len(lines) <= most:
        return lines
    last, style = lines[most - 1][0]
    return [*lines[: most - 1], [(last + " …", style)]]


class Form(Drawn, can_focus=True):
    """The rows of one step, drawn; the cursor stands on the rows that can be used."""

    BINDINGS = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("home,g", "edge(-1)", show=False),
        Binding("end,G", "edge(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("enter", "enter", show=False),
        Binding("left,h", "out", show=False),
    ]

    class Left(Message):
        """The person wants to go to the rail."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows: tuple[Row, ...] = ()
        self.at = 0
        self.editing = False
        self._starts: list[int] = []
        self.label_width = NARROW

    # What is shown

    def show(self, rows: Sequence[Row], key: str | None = None) -> None:
        """Draw these rows; the cursor stays on its row, or goes to `key`."""
        wanted = key or (self.row.key if self.row else None)
        rows = tuple(rows)
        usable = [index for index, row in enumerate(rows) if row.kind != "text"]
        at = next((index for index in usable if rows[index].key == wanted), None)
        if at is None:
            at = min((index for index in usable if index >= self.at), default=usable[-1] if usable else 0)
        if rows == self.rows and at == self.at:
            return
        self.rows, self.at = rows, at
        self.redraw()

    @property
    def row(self) -> Row | None:
        """The row under the cursor; nothing on a page without usable rows."""
        row = self.rows[self.at] if self.at < len(self.rows) else None
        return row if row is not None and row.kind != "text" else None

    def line_of(self, index: int) -> int:
        """The first line of a row, in the content."""
        return self._starts[index] if index < len(self._starts) else 0

    def lines(self, width: int) -> list[Line]:
        """All rows, drawn."""
        drawn: list[Line] = []
        self._starts = []
        space = 1 if width < NARROW_FORM else 3
        longest = max((len(row.label) + space for row in self.rows if row.kind == "field"), default=NARROW)
        self.label_width = min(max(longest, NARROW), LABEL)
        for index, row in enumerate(self.rows):
            self._starts.append(len(drawn))
            if row.kind == "text":
                for text, style, most in row.lines:
                    if most == 1:
                        drawn.append([(INDENT + cut(text, width - 1 - GUTTER), style)])
                    else:
                        drawn.extend(_few(paragraph(text, width - 1, style, INDENT), most))
            else:
                drawn.extend(self._head(row, width, index == self.at))
                if index == self.at:
                    for text, style in row.notes:
                        drawn.extend(paragraph(text, width - GUTTER - 1, style, INDENT))
        return drawn

    def _head(self, row: Row, width: int, here: bool) -> list[Line]:
        sign, look = MARKS.get(row.mark, (" ", ""))
        start: list[Part] = [(sign, look), ("›" if here else " ", "accent")]
        if row.kind == "pick":
            first, *more = wrap(row.label, width - GUTTER - 3)
            style = "bold" if here or row.chosen else ""
            dot = ("● " if row.chosen else "○ ", "accent" if row.chosen else "dim")
            return [[*start, dot, (first, style)], *([(INDENT + "  " + line, style)] for line in more)]
        if row.kind == "action":
            return [[*start, (f"[ {row.label} ]", "here" if here else "accent"), *row.value]]
        label = cut(row.label, self.label_width - 1).ljust(self.label_width)
        room = width - GUTTER - self.label_width - (2 if row.tail else 0)
        value = list(row.value)
        if row.short and sum(len(text) for text, _ in value) > room:
            value = [(row.short, value[0][1])]
        parts: list[Part] = [*start, (label, "bold" if here else "dim")]
        for text, style in value:
            shown = cut(text, room)
            parts.append((shown, style))
            room -= cell_len(shown)
        if row.tail:
            parts.append((" " * max(0, room) + " " + row.tail, "faint"))
        return [parts]

    def ground(self, y: int) -> str:
        """The row under the cursor has a background of its own while the form has the keys."""
        here = self.row is not None and self._starts and y == self.line_of(self.at)
        return "cursor" if here and (self.has_focus or self.editing) else ""

    # Moving

    def _go(self, at: int) -> None:
        self.at = at
        self.redraw()
        total = len(self.rendered_lines)
        first = self.line_of(at)
        last = self._starts[at + 1] if at + 1 < len(self._starts) else total
        usable = [index for index, row in enumerate(self.rows) if row.kind != "text"]
        if at == usable[0]:
            first = 0
        self.show_lines(first, max(1, min(last - first, self.size.height)))
        self.post_message(FieldChosen(self.rows[at].key))

    def go_to(self, key: str) -> bool:
        """Put the cursor on the row of this key."""
        for index, row in enumerate(self.rows):
            if row.key == key and row.kind != "text":
                self._go(index)
                return True
        return False

    def action_move(self, by: int) -> None:
        """To the next usable row; past the last one the page scrolls."""
        step = 1 if by > 0 else -1
        at = self.at + step
        while 0 <= at < len(self.rows) and self.rows[at].kind == "text":
            at += step
        if 0 <= at < len(self.rows):
            self._go(at)
        else:
            self.scroll_lines(step)

    def action_edge(self, way: int) -> None:
        """To the first or the last row."""
        usable = [index for index, row in enumerate(self.rows) if row.kind != "text"]
        if usable:
            self._go(usable[0] if way < 0 else usable[-1])
        self.scroll_lines(way * 1_000_000)

    def action_page(self, way: int) -> None:
        """A page up or down."""
        self.scroll_lines(way * max(1, self.size.height - 2))

    def action_enter(self) -> None:
        """Edit, choose or do."""
        if self.row is not None:
            self.post_message(EditWanted(self.row))

    def action_out(self) -> None:
        """To the rail."""
        self.post_message(self.Left())

    def on_focus(self) -> None:
        """The cursor's background follows the keys."""
        self._paint()

    def on_blur(self) -> None:
        """The cursor's background follows the keys."""
        self._paint()

    def on_click(self, event: events.Click) -> None:
        """A click goes to the row; a click on the row in focus is Enter."""
        y = event.y + self.top
        for index in range(len(self.rows) - 1, -1, -1):
            if self.line_of(index) <= y:
                if self.rows[index].kind != "text":
                    again = index == self.at
                    self._go(index)
                    if again:
                        self.action_enter()
                return


class Choices(OptionList):
    """The list of a choice, opened over its row."""

    BINDINGS = [
        Binding("escape", "dismiss", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("h,left", "dismiss", show=False),
        Binding("l,right", "select", show=False),
    ]

    def action_dismiss(self) -> None:
        """Leave the value as it is."""
        self.post_message(FormPane.Ended(None))


class Line1(Input):
    """The one-line editor of a row: Esc leaves the value as it was."""

    BINDINGS = [Binding("escape", "dismiss", show=False), Binding("ctrl+z", "app.suspend_process", show=False)]

    def action_dismiss(self) -> None:
        """Leave the value as it is."""
        self.post_message(FormPane.Ended(None))


class FormPane(Widget):
    """The form and the editor above it."""

    class Typed(Message):
        """A key changed the text of the row in edit: `typed` has it."""

    class Ended(Message):
        """Editing ended: with a value (wrapped, because None is a value too), or with nothing to keep the old one."""

        def __init__(self, answer: tuple[str, Any] | None) -> None:
            super().__init__()
            self.answer = answer

    class Considered(Message):
        """The cursor stands on a choice that is not taken yet."""

        def __init__(self, key: str, value: Any) -> None:
            super().__init__()
            self.key, self.value = key, value

    editor: reactive[str] = reactive("", layout=False)
    """The editor that is open: `text`, `choice`, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.form = Form(id="form")
        self.typed: tuple[str, str] | None = None
        """The key of the row in edit and the text that was typed there; nothing before the first key."""
        self._editor: Input | OptionList | None = None
        self._key = ""
        self._values: list[Any] = []

    def compose(self) -> ComposeResult:
        """The form alone; editors come when they are needed."""
        yield self.form

    @property
    def editing(self) -> str | None:
        """The key of the row in edit."""
        return self._key if self._editor is not None else None

    def _place(self) -> Offset:
        form = self.form
        y = form.line_of(form.at) - form.top
        return Offset(GUTTER + form.label_width, max(0, min(y, self.size.height - 1)))

    def edit_text(self, row: Row, text: str) -> None:
        """Open the one-line editor on the row."""
        place = self._place()
        editor = Line1(text, compact=True, select_on_focus=False, id="editor")
        editor.styles.width = max(8, self.size.width - place.x - 1)
        editor.offset = place
        self._begin(row, editor)

    def edit_choice(self, row: Row, options: Sequence[tuple[Any, str]], value: Any) -> None:
        """Open the list of choices under the row."""
        place = self._place()
        self._values = [choice for choice, _ in options]
        width = min(max(max(cell_len(label) for _, label in options) + 3, 14), self.size.width)
        height = min(len(options), max(3, self.size.height - 3)) + 2
        editor = Choices(*(Content(label) for _, label in options), id="choices", markup=False, compact=True)
        editor.styles.width, editor.styles.height = width, height
        below = place.y + 1
        y = below if below + height <= self.size.height else max(0, self.size.height - height)
        editor.offset = Offset(max(0, min(place.x - 1, self.size.width - width - 1)), y)
        self._begin(row, editor)
        same = [index for index, choice in enumerate(self._values) if choice == value and type(choice) is type(value)]
        editor.highlighted = same[0] if same else 0

    def _begin(self, row: Row, editor: Input | OptionList) -> None:
        self._key, self._editor = row.key, editor
        self.editor = "text" if isinstance(editor, Input) else "choice"
        self.form.editing = True
        self.mount(editor)
        editor.focus()

    def note(self, notes: tuple[tuple[str, str], ...]) -> None:
        """What stands under the row in edit, now."""
        form = self.form
        if form.row is not None and form.row.notes != notes:
            rows = list(form.rows)
            rows[form.at] = replace(form.row, notes=notes)
            form.rows = tuple(rows)
            form.redraw()

    def close(self) -> None:
        """Take the editor away and give the keys back to the form."""
        if self._editor is not None:
            editor, self._editor, self.typed = self._editor, None, None
            self.editor = ""
            self.form.editing = False
            self.form.focus()
            editor.remove()

    @on(Input.Changed, "#editor")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        if self._editor is event.input:
            self.typed = (self._key, event.value)
            self.post_message(self.Typed())

    @on(Input.Submitted, "#editor")
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self._editor is event.input:
            self.post_message(self.Ended((self._key, event.value)))

    @on(OptionList.OptionSelected, "#choices")
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if self._editor is event.option_list:
            self.post_message(self.Ended((self._key, self._values[event.option_index])))

    @on(OptionList.OptionHighlighted, "#choices")
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if self._editor is event.option_list:
            self.post_message(self.Considered(self._key, self._values[event.option_index]))

    def on_resize(self) -> None:
        """The editor stays on its row."""
        if isinstance(self._editor, Input):
            place = self._place()
            self._editor.offset = place
            self._editor.styles.width = max(8, self.size.width - place.x - 1)
