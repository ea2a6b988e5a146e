"""Which column of a source holds which part: a choice for each, and three rows that follow it at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.config.files import short_path
from engine.errors import WorkbenchError
from engine.figures import count
from engine.session.column_map import DETECT, ColumnMap
from workbench.actions import bindings
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.drawn import Drawn
from workbench.panels.paint import Line, clean, cut, paragraph
from workbench.screens.dialog import Item, Pick

if TYPE_CHECKING:
    from engine.session.draft import Draft
    from workbench.app import WorkbenchApp

LINES = 4
"""Lines of one part of a row."""


class Answered(Message):
    """The inspector says what the rows are under the choice."""


class ColumnView(Drawn, can_focus=True):
    """Format and parts with what is chosen for each; below, the first rows."""

    DEFAULT_CSS = "ColumnView { height: 1fr; padding: 0 1; }"

    def __init__(self, columns: ColumnMap) -> None:
        super().__init__()
        self.columns, self.at = columns, 0

    @property
    def here(self) -> str:
        """The part under the cursor; empty for the format."""
        parts = self.columns.parts
        self.at = max(0, min(self.at, len(parts)))
        return str(parts[self.at - 1]["name"]) if self.at else ""

    def ground(self, y: int) -> str:
        """The line of the choice under the cursor."""
        return "cursor" if y == self.at and self.has_focus else ""

    def lines(self, width: int) -> list[Line]:
        """Choices, then rows."""
        chosen, found = self.columns, self.columns.found
        gutter = max((len(str(part["name"])) for part in chosen.parts), default=6) + 4
        told = chosen.format or f"{DETECT}: {found.get('title') or 'none that fits'}"
        made: list[Line] = [[(f"{'format':{gutter}}", "dim"), (cut(clean(told), width - gutter), "accent")]]
        samples = {str(name): str(text) for name, text in found.get("columns", ())}
        for part in chosen.parts:
            name = str(part["name"])
            column = chosen.column(name)
            words = f"{name}{' *' if part['needed'] else ''}"
            style = "value" if column else "bad" if part["needed"] else "faint"
            line = clean(column) if column else "no column" if part["needed"] else "-"
            room = width - gutter - cell_len(line) - 2
            beside = cut(clean(samples.get(column, "")), max(0, room))
            made.append([(f"{words:{gutter}}", "dim"), (cut(line, width - gutter), style), (f"  {beside}", "faint")])
        made.append([])
        problem = chosen.problem or str(found.get("problem") or "")
        made += paragraph(clean(problem), width, "bad") if problem else []
        for row in found.get("rows", ()):
            made += [*_row(row, width), []]
        return made


def _row(row: Mapping[str, Any], width: int) -> list[Line]:
    """A row as its parts say it, or what is wrong with it."""
    made: list[Line] = [[(f"row {count(row['index'])}", "accent")]]
    if row["problem"]:
        return [*made, *paragraph(clean(row["problem"]), width, "bad")]
    gutter = min(24, max((cell_len(clean(label)) for label, _ in row["says"]), default=0) + 2)
    for label, text in row["says"]:
        lines = paragraph(clean(text), width - gutter, "value")
        if len(lines) > LINES:
            lines = [*lines[: LINES - 1], [("…", "faint")]]
        head = cut(clean(label), gutter - 1)
        for place, line in enumerate(lines or [[]]):
            made.append([(f"{head if not place else '':{gutter}}", "dim"), *line])
    return made


class ColumnsScreen(Screen[bool]):
    """The columns of one source of the draft. Gives whether what is chosen shall be kept."""

    NAME = "columns"
    BINDINGS: ClassVar[list[BindingType]] = bindings("columns")
    DEFAULT_CSS = """
    ColumnsScreen #head { height: 2; border-bottom: solid $wb-line; }
    ColumnsScreen #status { border-top: solid $wb-line; height: 2; }
    """

    def __init__(self, columns: ColumnMap) -> None:
        super().__init__()
        self.columns = columns
        columns.wake = lambda: self.post_message(Answered())

    def compose(self) -> ComposeResult:
        """Head, choices and rows, status, keys."""
        yield Bar("head")
        yield ColumnView(self.columns)
        yield Bar("status")
        yield KeyLine("columns")

    def on_mount(self) -> None:
        """Rows come when they are read."""
        self.query_one(ColumnView).focus()
        self.columns.send()
        self._draw()

    def on_unmount(self) -> None:
        """Nothing is asked for a screen that is gone."""
        self.columns.close()

    def on_answered(self) -> None:
        """Show what came."""
        if self.columns.poll():
            self._draw()

    def _draw(self) -> None:
        chosen = self.columns
        others = len(chosen.draft.config.data.train)
        which = f", source {chosen.source + 1} of {others}" if others > 1 else ""
        name = clean(short_path(chosen.entry.path))
        self.query_one("#head", Bar).update(Content.styled(f" Columns of {name}{which}", "bold"))
        state = "reading rows …" if chosen.open else "* needed by the format"
        state += "   changed: enter keeps it" if chosen.changed else ""
        self.query_one("#status", Bar).update(Content.styled(f" {state}", "$wb-dim"))
        self.query_one(ColumnView).redraw()

    def action_part(self, by: int) -> None:
        """The next part, or the one before."""
        view = self.query_one(ColumnView)
        view.at = max(0, min(view.at + by, len(self.columns.parts)))
        view.show_lines(view.at)
        view.redraw()

    def action_take(self, by: int) -> None:
        """Another column for the part under the cursor, or another format."""
        part = self.query_one(ColumnView).here
        self.columns.turn(part, by) if part else self.columns.turn_format(by)
        self._draw()

    def action_none(self) -> None:
        """The column that the format takes if none is named."""
        part = self.query_one(ColumnView).here
        if part:
            self.columns.choose(part, "")
        else:
            self.columns.choose_format(DETECT)
        self._draw()

    def action_keep(self) -> None:
        """Go back; the choice is kept."""
        self.dismiss(self.columns.changed)

    def action_cancel(self) -> None:
        """Go back without a change."""
        self.dismiss(False)


def ask_columns(
    screen: Screen[Any],
    draft: Draft,
    then: Callable[[bool], object],
    edit: Callable[[Callable[[], object]], object] | None = None,
) -> None:
    """Let a person pick the columns of the draft's rows; of several sources, first which. `edit` makes a change of the draft."""
    sources = draft.config.data.train
    app: WorkbenchApp = screen.app  # type: ignore[assignment]

    def pick(number: int) -> None:
        try:
            columns = ColumnMap(draft, app.inspector.ask, source=number)
        except WorkbenchError as problem:
            app.notify(problem.full_message, severity="warning", markup=False)
            return

        def left(kept: bool | None) -> None:
            if kept:
                (edit or (lambda change: change()))(columns.keep)
            then(bool(kept))

        app.push_screen(ColumnsScreen(columns), left)

    if len(sources) < 2:
        pick(0)
        return
    items = [Item(str(at), Content(clean(short_path(each.path)))) for at, each in enumerate(sources)]
    app.push_screen(Pick("Columns of which rows?", items), lambda key: pick(int(key)) if key is not None else None)
