"""The preview: a raw row at once, then the very tokens of the collator's batch, with what is trained marked.

The inspector does the work in its own process; the screen only asks, shows progress and cancels. A row is shown as it
stands in its file as soon as the file's index knows it, which needs no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import Screen

from engine.errors import WorkbenchError
from engine.figures import count
from engine.session.rows import WORST, RowQuestion, head_text, of_prompts, why_none
from workbench.actions import bindings
from workbench.panels.bars import KeyLine, TextBar
from workbench.panels.glyphs import ascii_only
from workbench.panels.raw_rows import RawRows
from workbench.panels.tokens import TokenView
from workbench.screens.dialog import Ask

if TYPE_CHECKING:
    from engine.client import Inspector
    from engine.session.draft import Draft

BARS, BARS_PLAIN = " ▁▂▃▄▅▆▇█", " .:-=+*#%"
BINS = 18
LEARN_SECONDS = 1.0


class Answered(Message):
    """The inspector gave its batch, said how far it is, or said why not; or the files were opened."""

    def __init__(self, what: str, found: Any) -> None:
        super().__init__()
        self.what, self.found = what, found


class PreviewScreen(Screen[None]):
    """One row after another, at random, the worst, or those that hold a text."""

    NAME = "preview"
    BINDINGS: ClassVar[list[BindingType]] = bindings("preview")
    DEFAULT_CSS = """
    PreviewScreen #head { height: 2; border-bottom: solid $wb-line; }
    PreviewScreen #foot { height: auto; border-top: solid $wb-line; }
    """

    def __init__(self, draft: Draft, inspector: Inspector, base: Path | None = None) -> None:
        super().__init__()
        self.draft, self.inspector = draft, inspector
        self.base = base or draft.base
        self.found: dict[str, Any] = {}
        self.question = RowQuestion(draft, inspector.ask, lambda: self.post_message(Answered("row", None)))
        self._at = 0
        self._worst = -1
        self._words = ""
        self._raw: RawRows | None = None
        self._gone = False

    def compose(self) -> ComposeResult:
        """Head, row, lengths, status, keys."""
        yield TextBar("head")
        yield TokenView()
        with Vertical(id="foot"):
            yield TextBar("lengths")
            yield TextBar("status")
            yield KeyLine("preview")

    def on_mount(self) -> None:
        """The raw row at once, tokens when the inspector has them."""
        self.query_one(TokenView).focus()
        self.run_worker(self._open_raw, thread=True, group="raw", exit_on_error=True)
        self._draw()
        self._ask(self.question.wanted, "starting the tokenizer")
        self.set_interval(LEARN_SECONDS, self._draw)

    def on_unmount(self) -> None:
        """Nothing goes on for a screen that is gone."""
        self._gone = True
        self.question.cancel()
        if self._raw is not None:
            self._raw.close()

    # -- asking --------------------------------------------------------------------------------------------------------
    def _open_raw(self) -> None:
        mapping = self.draft.mapping
        sources = (mapping.get("data") or {}).get("train") or []
        raw = RawRows(list(sources), self.base, int(self.draft.config.run.seed or 0))
        raw.wait(self._at, 2.0)
        if self._gone:
            raw.close()
        else:
            self.post_message(Answered("raw", raw))

    def _ask(self, wanted: dict[str, Any], words: str) -> None:
        """Ask for this: at once, or when the last question is a moment ago, by then for the newest wish."""
        rest = self.question.put(wanted, words)
        self._status(f"{self.question.progress}   esc cancels")
        if rest > 0:
            self.set_timer(rest, self.question.send)
        else:
            self.question.send()

    def _go(self, number: int, words: str = "") -> None:
        """Show this row: as it stands at once, its tokens when they come."""
        self._at = number
        view = self.query_one(TokenView)
        view.raw = self._raw.row(number) if self._raw is not None else None
        view.row, view.problem, view.note = None, "", "The row as it stands in its file; its tokens follow."
        view.to_top()
        view.redraw()
        self._draw()
        self._ask({"kind": "index", "index": number}, words or f"row {count(number)}")

    def on_answered(self, event: Answered) -> None:
        """Show what came."""
        view = self.query_one(TokenView)
        if event.what == "raw":
            self._raw = event.found
            if view.raw is None:
                view.raw = self._raw.row(self._at)
                view.note = "The row as it stands in its file; its tokens follow."
            if self._raw.problem and not view.problem:
                view.problem = self._raw.problem
        elif (found := self.question.take()) is not None:
            if isinstance(found, WorkbenchError):
                view.problem = found.full_message
                self._status("")
            else:
                self._take(found, view)
        elif self.question.open:
            self._status(f"{self.question.progress}   esc cancels")
            return
        self._draw()
        view.redraw()

    def _take(self, found: dict[str, Any], view: TokenView) -> None:
        rows = found.get("rows") or []
        if not rows:
            self._status(why_none(self.question.wanted))
            return
        view.problem, view.row, self.found = "", rows[0], found
        moved = rows[0]["index"] != self._at
        self._at = rows[0]["index"]
        if moved or view.raw is None:
            view.raw = self._raw.row(self._at) if self._raw is not None else None
            view.to_top()
        warnings = found.get("warnings") or []
        self._status(f"! {warnings[0]}" if warnings else why_shown(self.question.wanted))

    # -- the one-line parts --------------------------------------------------------------------------------------------
    def _draw(self) -> None:
        parts = head_text(self.draft, self.found, self.query_one(TokenView).row, self._at)
        self.query_one("#head", TextBar).write(*parts, style="bold")
        self.query_one("#lengths", TextBar).write(lengths_text(self.draft))

    def _status(self, text: str) -> None:
        self.query_one("#status", TextBar).write(text, style="$warning" if text.startswith("!") else "$wb-dim")

    # -- actions -------------------------------------------------------------------------------------------------------
    def action_row(self, by: int) -> None:
        """The next or the previous row."""
        total = self.found.get("total")
        last = total - 1 if total else self._at + by
        wanted = max(0, min(self._at + by, last))
        if wanted == self._at and self.query_one(TokenView).row is not None:
            self._status("this is the last row" if by > 0 else "this is the first row")
        else:
            self._go(wanted)

    def action_random(self) -> None:
        """A row at random: among those that are known here, so that it shows at once."""
        known = self._raw.known() if self._raw is not None and self.found.get("total") != 0 else 0
        if known and not self.question.packing:
            self._go(random.randrange(min(known, self.found.get("total") or known)), "a row at random")
        else:
            self._ask({"kind": "random"}, "a row at random")

    def action_worst(self) -> None:
        """The longest row, then one with nothing trained, then the one cut the most."""
        self._worst = (self._worst + 1) % len(WORST)
        by = list(WORST)[self._worst]
        self._ask({"kind": "worst", "by": by}, f"looking for {WORST[by]}")

    def action_search(self) -> None:
        """The next row that holds a text; the same words again go on from here."""

        def answered(words: str | None) -> None:
            if words:
                start = self._at + 1 if words == self._words else 0
                self._words = words
                self._ask({"kind": "search", "text": words, "start": start}, f"looking for {words!r}")

        self.app.push_screen(Ask("Show the next row with this text", self._words), answered)

    def action_turn(self, what: str) -> None:
        """Something of the row's view on or off; says why where it cannot be."""
        if refused := self.query_one(TokenView).turn(what):
            self._status(refused)

    def action_packs(self) -> None:
        """Packs with the borders of their rows, or the rows one by one."""
        if not self.draft.config.data.packing:
            self._status("rows are not packed: data.packing is off")
            return
        self.question.packs = not self.question.packs
        self._go(0, "packing all rows" if self.question.packs else "row 0")

    def action_columns(self) -> None:
        """Which column holds which part; the row is asked for anew where another does now."""
        from workbench.screens.columns import ask_columns

        ask_columns(self, self.draft, lambda kept: self._go(self._at) if kept else None)

    def action_template(self) -> None:
        """The chat template beside this row."""
        from workbench.screens.template import show_template

        ask, at = self.inspector.ask, self._at
        show_template(self, self.draft, ask, at, lambda saved: self._go(self._at) if saved else None)

    def action_cancel(self) -> None:
        """Cancel what is asked; if nothing is, go back."""
        if self.question.cancel():
            self._status("cancelled")
        else:
            self.app.pop_screen()


def why_shown(wanted: Mapping[str, Any]) -> str:
    """Why this row is shown, where it was not asked for by number."""
    if wanted["kind"] == "worst":
        return WORST[wanted["by"]]
    return f"holds {wanted['text']!r}; / again for the next" if wanted["kind"] == "search" else ""


def lengths_text(draft: Draft) -> str:
    """The lengths of all rows as bars with the limit, and the rows that are longer or have nothing trained."""
    facts, limit = draft.facts.data, draft.config.data.max_length
    if facts is None or not facts.lengths:
        if of_prompts(draft):
            return "what is trained is the model's own answers, which are made in training"
        return "trained tokens are underlined and stand between " + ("[ ]" if ascii_only() else "▌ ▐")
    bars, end = histogram(facts.lengths, limit if isinstance(limit, int) else 0)
    parts = [f"lengths {bars} to {count(end)}"]
    edge = f"{'cut at' if draft.config.data.excess_length == 'truncate' else 'longer than'} {count(limit)}"
    rows = "row" if facts.truncated == 1 else "rows"
    parts += [f"{count(facts.truncated)} {rows} {edge}" if facts.truncated else f"at most {count(limit)}"]
    parts += [f"{count(facts.masked)} rows untrained"] if facts.masked else []
    return "   ".join(parts)


def histogram(lengths: tuple[int, ...], limit: int) -> tuple[str, int]:
    """Bars from 0 to the longest row, with a line where rows are cut; and the length at the right end."""
    end = max(max(lengths), 1)
    bins = [0] * BINS
    for length in lengths:
        bins[min(BINS - 1, BINS * length // (end + 1))] += 1
    high = max(bins) or 1
    signs = BARS_PLAIN if ascii_only() else BARS
    text = "".join(signs[-(-8 * number // high)] for number in bins)
    if 0 < limit <= end:
        place = min(BINS, BINS * limit // (end + 1) + 1)
        text = text[:place] + "|" + text[place:]
    return text, end
