"""The batch behind a point of the curve: which rows the step was trained on, and their text."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.errors import WorkbenchError
from engine.figures import count
from engine.run.batches import rows_of
from engine.run.store import RunFolder
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, cut, paragraph
from workbench.panels.raw_rows import RawRows, raw_lines

SHOWN = 64  # rows whose text is read; the numbers of all are named


class BatchRead(Message):
    """The batch was read: its row numbers and their rows, or a sentence."""

    def __init__(self, numbers: list[int], rows: list[Any], problem: str = "") -> None:
        super().__init__()
        self.numbers, self.rows, self.problem = numbers, rows, problem


class BatchView(Scrolled):
    """Rows one under the other."""

    DEFAULT_CSS = "BatchView { height: 1fr; padding: 0 1; }"
    answer: BatchRead | None = None

    def lines(self, width: int) -> list[Line]:
        """A head and the text of each row."""
        if self.answer is None:
            return [[("reading the batch …", "dim")]]
        if self.answer.problem:
            return paragraph(clean(self.answer.problem), width, "warn")
        drawn: list[Line] = []
        for number, row in zip(self.answer.numbers, self.answer.rows, strict=False):
            drawn.append([(f"row {count(number)}", "accent")])
            drawn += raw_lines(row, width) if row is not None else [[("its text cannot be shown from here", "faint")]]
            drawn.append([])
        rest = self.answer.numbers[len(self.answer.rows) :]
        if rest:
            drawn += paragraph(f"and rows {', '.join(map(str, rest[:500]))}", width, "dim")
        return drawn


class BatchScreen(Screen[None]):
    """The rows of one step."""

    NAME = "batch"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter", "back", show=False)]
    DEFAULT_CSS = "BatchScreen #head { height: 2; border-bottom: solid $wb-line; }"

    def __init__(self, folder: RunFolder, step: int) -> None:
        super().__init__()
        self.folder, self.step = folder, step

    def compose(self) -> ComposeResult:
        """Head, rows, keys."""
        yield Bar("head")
        yield BatchView()
        keys = KeyLine("batch")
        keys.use([("↑↓", "scroll"), ("esc", "back")])
        yield keys

    def on_mount(self) -> None:
        """Read in a thread: the files may be large."""
        self._show_head(f"step {count(self.step)}")
        self.query_one(BatchView).focus()
        self.run_worker(self._read, thread=True, exit_on_error=True)

    def _show_head(self, words: str) -> None:
        text = f" {clean(self.folder.id)}   {words}"
        self.query_one("#head", Bar).update(Content.styled(cut(text, max(10, self.app.size.width - 1)), "bold"))

    def _read(self) -> None:
        try:
            numbers = rows_of(self.folder, self.step)
            if not numbers:
                words = (
                    f"No batch was noted for step {count(self.step)}: long runs note every few steps, up to a limit."
                )
                self.post_message(BatchRead([], [], words))
                return
            self.post_message(BatchRead(numbers, self._texts(numbers[:SHOWN])))
        except (WorkbenchError, OSError) as problem:
            self.post_message(BatchRead([], [], str(problem)))

    def _texts(self, numbers: list[int]) -> list[Any]:
        """The rows as they stand in their files now; None where they cannot be read."""
        from engine.config.files import parse, place_of
        from engine.data.streaming.cuts import PLACE, row_at

        mapping = parse(self.folder.read_config(), path=self.folder.config).mapping
        data, run = mapping.get("data") or {}, mapping.get("run") or {}
        if max(numbers) >= PLACE:
            paths = [place_of(str(source.get("path") or ""), self.folder.path) for source in data.get("train") or []]
            return [row_at(paths, number) for number in numbers]
        raw = RawRows(list(data.get("train") or []), self.folder.path, int(run.get("seed") or 0), most=max(numbers) + 1)
        try:
            raw.wait(max(numbers), 5.0)
            return [raw.row(number) for number in numbers]
        finally:
            raw.close()

    def on_batch_read(self, event: BatchRead) -> None:
        """Show them."""
        view = self.query_one(BatchView)
        view.answer = event
        view.redraw()
        if not event.problem:
            self._show_head(f"step {count(self.step)}   the {count(len(event.numbers))} rows it was trained on")

    def action_back(self) -> None:
        """Back to the curve."""
        self.dismiss()
