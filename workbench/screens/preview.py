"""The preview: raw rows at once, then the very tokens of the collator's batch, with what is learned marked.

Learned tokens are coloured and underlined, so that colour is never the only sign; special tokens and control characters
are visible. The inspector does the work in its own process; the screen only asks, shows and cancels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.config.files import absolute
from engine.errors import WorkbenchError
from workbench.actions import bindings
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.drawn import Scrolled
from workbench.panels.figures import count, percent
from workbench.panels.paint import Line, clean, cut, paragraph
from workbench.screens.dialog import Ask

if TYPE_CHECKING:
    from engine.client import Inspector, Ticket
    from engine.config.draft import Draft

WORST = ("longest", "masked", "truncated")
BARS = " ▁▂▃▄▅▆▇█"
RAW_ROWS = 3


class Answered(Message):
    """The inspector gave its batch, said how far it is, or said why not; or raw rows were read."""

    def __init__(self, what: str, found: Any) -> None:
        super().__init__()
        self.what, self.found = what, found


class TokenView(Scrolled):
    """Rows as text with their learned tokens marked, or the raw rows while tokens are on their way."""

    DEFAULT_CSS = "TokenView { height: 1fr; padding: 0 1; }"
    rows: list[dict[str, Any]] | None = None
    raw: tuple[str, ...] = ()
    ids = False
    problem = ""

    def lines(self, width: int) -> list[Line]:
        """Everything there is to show, wrapped by cells."""
        if self.problem:
            return [[("The tokens cannot be shown.", "bad")], *paragraph(clean(self.problem), width, "value")]
        if self.rows is None:
            made: list[Line] = [[("Raw rows; the tokens follow.", "dim")], []]
            for text in self.raw:
                made += [*paragraph(clean(text), width, "value"), []]
            return made
        if not self.rows:
            return [[("No such row.", "dim")]]
        made = []
        for row in self.rows:
            made += self._row(row, width)
        return made

    def _row(self, row: dict[str, Any], width: int) -> list[Line]:
        made: list[Line] = []
        if row.get("error"):
            made += paragraph(clean(row["error"]), width, "bad")
            made += paragraph(clean(row.get("clipped", "")), width, "dim")
        if row.get("left_out"):
            made += paragraph(f"Training leaves this row out: {clean(row['left_out'])}", width, "warn")
        if row.get("documents"):
            apart = "kept apart" if row.get("separate") else "one stream: tokens see the rows before"
            made.append([(f"A pack of {len(row['documents'])} rows, {apart}.", "hint")])
        parts = row.get("parts", {})
        first = self._first_difference(parts)
        for name, tokens in parts.items():
            if len(parts) > 1:
                made += [[], [(name, "accent")]]
            starts = set(_starts(row.get("documents") or [])) if name == "input" else set()
            made += self._tokens(tokens, width, first if name in ("chosen", "rejected") else None, starts)
        if first is not None:
            made += [[], [(f"The answers differ from token {first + 1} on.", "dim")]]
        return made

    @staticmethod
    def _first_difference(parts: dict[str, list[dict[str, Any]]]) -> int | None:
        if "chosen" not in parts or "rejected" not in parts:
            return None
        pairs = zip(parts["chosen"], parts["rejected"], strict=False)
        return next((place for place, (one, other) in enumerate(pairs) if one["id"] != other["id"]), None)

    def _tokens(self, tokens: list[dict[str, Any]], width: int, mark: int | None, starts: set[int]) -> list[Line]:
        """Tokens flowed into lines; a newline in a token ends its line, an id stands behind its token when asked."""
        made: list[Line] = []
        line: list[tuple[str, str]] = []
        used = 0
        for place, token in enumerate(tokens):
            style = "place" if token["trained"] else "dim"
            if place in starts and place:
                made += [line, [("─" * width, "faint")]]
                line, used = [], 0
            if place == mark:
                line, used = [*line, ("▸", "accent")], used + 1
            text = token["text"]
            shown = clean(text) + (f"·{token['id']} " if self.ids else "")
            for piece in _pieces(shown, width):
                size = cell_len(piece)
                if used + size > width:
                    made.append(line)
                    line, used = [], 0
                line.append((piece, "learned" if token["trained"] else style))
                used += size
            if text.endswith("\n") and not self.ids:
                made.append(line)
                line, used = [], 0
        return [*made, line] if line else made


TokenView.COMPONENT_CLASSES = TokenView.COMPONENT_CLASSES | {"drawn--learned"}


def _pieces(text: str, width: int) -> list[str]:
    """`text` in pieces that each fit a line."""
    if cell_len(text) <= width:
        return [text]
    step = max(1, width // 2)
    return [text[place : place + step] for place in range(0, len(text), step)]


def _starts(documents: list[Any]) -> list[int]:
    starts, at = [], 0
    for document in documents:
        starts.append(at)
        at += int(document["tokens"] if isinstance(document, dict) else document)
    return starts


class PreviewScreen(Screen[None]):
    """One row after another, at random, the worst, or those that hold a text."""

    NAME = "preview"
    BINDINGS: ClassVar[list[BindingType]] = bindings("preview")
    DEFAULT_CSS = """
    PreviewScreen #head { height: 2; border-bottom: solid $wb-line; }
    PreviewScreen #foot { height: auto; border-top: solid $wb-line; }
    PreviewScreen .drawn--learned { color: $success; text-style: underline; }
    """

    def __init__(self, draft: Draft, inspector: Inspector, base: Path | None = None) -> None:
        super().__init__()
        self.draft, self.inspector = draft, inspector
        self.base = base or (Path(draft.path).absolute().parent if draft.path else Path.cwd())
        self._wanted: dict[str, Any] = {"kind": "index", "index": 0}
        self._at = 0
        self._worst = 0
        self._ticket: Ticket | None = None
        self.found: dict[str, Any] = {}

    def compose(self) -> ComposeResult:
        """Head, tokens, histogram, keys."""
        head = Bar()
        head.id = "head"
        yield head
        yield TokenView()
        with Vertical(id="foot"):
            status = Bar()
            status.id = "status"
            yield status
            yield KeyLine("preview")

    def on_mount(self) -> None:
        """Raw rows at once, tokens when the inspector has them."""
        self.query_one(TokenView).focus()
        self.run_worker(self._read_raw, thread=True, group="raw", exit_on_error=True)
        self._ask()

    def on_unmount(self) -> None:
        """Nothing goes on for a screen that is gone."""
        if self._ticket is not None:
            self._ticket.cancel()

    def _read_raw(self) -> None:
        from engine.data.rows import open_rows

        sources = absolute(self.draft.mapping, self.base).get("data", {}).get("train") or []
        path = str(sources[0].get("path", "")) if sources and isinstance(sources[0], dict) else ""
        if not path or path.startswith("builtin/"):
            return
        try:
            rows = open_rows(path)
            raw = tuple(json.dumps(row, ensure_ascii=False)[:2000] for row in rows.first(RAW_ROWS))
            rows.close()
        except (WorkbenchError, OSError) as problem:
            raw = (str(problem),)
        self.post_message(Answered("raw", raw))

    def _ask(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()
        self._status("asking …")

        def progress(state: dict[str, Any]) -> None:
            total = state.get("total")
            done = f"{count(state.get('done'))}" + (f" of {count(total)}" if total else "")
            self.post_message(Answered("progress", f"{state.get('what', 'working')}: {done}"))

        mapping = absolute(self.draft.mapping, self.base)
        ticket = self.inspector.ask(
            "preview", on_progress=progress, config=mapping, base=str(self.base), rows=self._wanted, count=1
        )
        self._ticket = ticket

        def answered(done: Ticket) -> None:
            if done is self._ticket:
                problem = done.error
                self.post_message(Answered("problem", problem) if problem else Answered("batch", done.result(0)))

        ticket.add_done_callback(answered)

    def on_answered(self, event: Answered) -> None:
        """Show what came."""
        view = self.query_one(TokenView)
        if event.what == "raw":
            view.raw = event.found
        elif event.what == "progress":
            self._status(event.found)
            return
        elif event.what == "problem":
            problem = event.found
            view.problem = f"{getattr(problem, 'message', problem)} {getattr(problem, 'hint', '')}".strip()
            self._status("")
        else:
            view.problem, view.rows, self.found = "", event.found.get("rows", []), event.found
            if view.rows:
                self._at = view.rows[0]["index"]
            view.to_top()
            self._status(self._spread())
        self._head()
        view.redraw()

    def _head(self) -> None:
        rows = self.query_one(TokenView).rows
        parts = [f"{self.draft.config.method.kind.upper()}"]
        if rows:
            tokens = [token for part in rows[0].get("parts", {}).values() for token in part]
            learned = sum(token["trained"] for token in tokens)
            total = self.found.get("total")
            place = f"Row {count(rows[0]['index'])}" + (f" of {count(total)}" if total else "")
            parts = [place, *parts, f"{count(len(tokens))} tokens", f"{count(learned)} learned"]
            if tokens:
                parts[-1] += f" ({percent(learned / len(tokens))})"
            if template := self.found.get("template"):
                parts.append(clean(template))
            if rows[0].get("truncated"):
                parts.append("cut to data.max_length")
        text = "   ".join(parts)
        self.query_one("#head", Bar).say(Content.styled(" " + cut(text, max(10, self.size.width - 2)), "bold"))

    def _spread(self) -> str:
        """The lengths of all rows as bars, and the rows that are cut or left out."""
        facts = self.draft.facts.data
        warnings = self.found.get("warnings") or []
        parts = []
        if facts is not None and facts.lengths:
            longest = max(facts.lengths) or 1
            bins = [0] * 16
            for length in facts.lengths:
                bins[min(15, 16 * length // (longest + 1))] += 1
            high = max(bins)
            bars = "".join(BARS[-(-8 * n // high)] for n in bins)
            parts.append(f"lengths {bars} up to {count(longest)}, cut at {count(self.draft.config.data.max_length)}")
        if warnings:
            parts.append(f"! {clean(warnings[0])}")
        return "   ".join(parts) or "learned tokens are underlined"

    def _status(self, text: str) -> None:
        self.query_one("#status", Bar).say(Content.styled(" " + cut(text, max(10, self.size.width - 2)), "$wb-dim"))

    # -- actions -------------------------------------------------------------------------------------------------------
    def action_row(self, by: int) -> None:
        """The next or the previous row."""
        total = self.found.get("total")
        self._at = max(0, self._at + by) if total is None else max(0, min(self._at + by, total - 1))
        self._wanted = {"kind": "index", "index": self._at}
        self._ask()

    def action_random(self) -> None:
        """A row at random."""
        self._wanted = {"kind": "random"}
        self._ask()

    def action_worst(self) -> None:
        """The longest row, then the ones without anything to learn, then the most cut ones."""
        self._wanted = {"kind": "worst", "by": WORST[self._worst % len(WORST)]}
        self._worst += 1
        self._ask()

    def action_search(self) -> None:
        """Rows that hold a text."""

        def answered(words: str | None) -> None:
            if words:
                self._wanted = {"kind": "search", "text": words}
                self._ask()

        self.app.push_screen(Ask("Show the next row with this text", ""), answered)

    def action_ids(self) -> None:
        """Token ids behind their tokens, or not."""
        view = self.query_one(TokenView)
        view.ids = not view.ids
        view.redraw()

    def action_cancel(self) -> None:
        """Cancel what is asked; if nothing is, go back."""
        if self._ticket is not None and not self._ticket.done:
            self._ticket.cancel()
            self._status("cancelled")
        else:
            self.app.pop_screen()
