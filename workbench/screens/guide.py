"""The guided first run: six pages, one idea each, and a rehearsal on the person's own rows that stops by itself.

What the pages say is `engine.session.first_run`, where one is on them `engine.session.guide`; this screen draws it and has the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.session.browsing import Wanted
from engine.session.first_run import PAGES, ROWS_NOTE, TITLES, choices
from engine.session.guide import Guide
from engine.session.guided_rehearsal import DATES
from engine.session.pages import GAP
from workbench.actions import bindings
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.chart import Chart
from workbench.panels.charts import draw
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, paragraph, wrap
from workbench.screens.browse import Browse
from workbench.screens.dialog import Show

if TYPE_CHECKING:
    from engine.session.pages import Block

LOOK_SECONDS = 0.25
LABEL = 12
_ONWARD = {"next": "next", "rehearse": "rehearse", "rows": "other-rows", "config": "real-run", "goal": "new-config"}
_STYLES = {"title": "bold", "dim": "dim", "warn": "warn", "bad": "bad", "code": "code"}


class Woken(Message):
    """Something that the guide looked for in a thread was found."""


class Page(Scrolled):
    """One page of the guide."""

    blocks: list[Block] = []
    choices: tuple[str, ...] = ()
    at = 0
    """The choice under the cursor."""
    _first = 0
    """The line of the first choice."""

    class Chosen(Message):
        """Another choice is under the cursor."""

    def lines(self, width: int) -> list[Line]:
        """Its blocks, wrapped, code further in; the choices stand before the last block, which speaks of the one chosen."""
        *before, last = self.blocks or [GAP]
        if not self.choices:
            return [[], *self._drawn(self.blocks, width)]
        drawn: list[Line] = [[], *self._drawn(before, width)]
        self._first = len(drawn)
        for place, words in enumerate(self.choices):
            here = place == self.at
            drawn.append([("› " if here else "  ", "accent"), (clean(words), "bold" if here else "")])
        return [*drawn, [], *self._drawn([last], width)]

    def ground(self, y: int) -> str:
        """The chosen line stands out."""
        return "cursor" if self.choices and y == self._first + self.at else ""

    def action_lines(self, by: int) -> None:
        """Through the choices where there are any, else line by line."""
        if not self.choices:
            super().action_lines(by)
        else:
            self._move(max(0, min(self.at + by, len(self.choices) - 1)))

    def on_click(self, event: events.Click) -> None:
        """A click chooses."""
        if self.choices and 0 <= (at := event.y + self.top - self._first) < len(self.choices):
            self._move(at)

    def _move(self, at: int) -> None:
        """The cursor moves at once: the next key may already wait."""
        self.at = at
        self.redraw()
        self.show_lines(self._first + at)
        self.post_message(self.Chosen())

    def _drawn(self, blocks: Sequence[Block], width: int) -> list[Line]:
        drawn: list[Line] = []
        for block in blocks:
            text, style = clean(block.text), _STYLES.get(block.kind, "")
            if block.kind == "code":
                first, *rest = wrap(text, width - 6)
                drawn += [[("  " + first, style)], *([("    " + line, style)] for line in rest)]
            elif block.kind == "table":
                for label, value in block.rows:
                    first, *rest = [
                        line for part in value.split("\n") for line in wrap(clean(part), width - LABEL - 2) or [""]
                    ]
                    drawn += [
                        [(f"  {label:<{LABEL}}", "dim"), (first, "")],
                        *([(" " * (LABEL + 2) + more, "")] for more in rest),
                    ]
            else:
                drawn += paragraph(text, min(width, 90), style)
        return drawn


class GuideScreen(Screen[None]):
    """The guided first run."""

    NAME = "guide"
    BINDINGS = bindings("guide")
    DEFAULT_CSS = """
    GuideScreen #head { height: 2; border-bottom: solid $wb-line; }
    GuideScreen Page { height: 1fr; padding: 0 0 0 1; }
    GuideScreen Chart { height: 7; display: none; padding: 0 1; }
    GuideScreen.curve Chart { display: block; }
    GuideScreen #foot { height: auto; border-top: solid $wb-line; }
    """

    def compose(self) -> ComposeResult:
        """Where one is, the page, the curve of the rehearsal, the keys."""
        app: Any = self.app
        self.guide = Guide(app.inspector.ask, runs=app.explicit_runs_dir, wake=lambda: self.post_message(Woken()))
        yield Bar("head")
        yield Page()
        yield Chart("loss")
        with Vertical(id="foot"):
            yield KeyLine("guide")

    def on_mount(self) -> None:
        """Machine, rows and tokenizer are asked already, so that the answer is there when its page is opened."""
        self.query_one(Page).focus()
        self._draw()
        self.set_interval(LOOK_SECONDS, self._poll)

    def on_unmount(self) -> None:
        """The rehearsal goes on to its end without this window."""
        self.guide.close()

    def on_woken(self) -> None:
        """Show what was found."""
        self._poll()

    def _poll(self) -> None:
        waits = self.guide.page == "rehearsal" and self.guide.going and not (self.guide.view and self.guide.view.step)
        if self.guide.refresh() or waits:  # seconds go on
            if self.guide.run is not None:
                self.app.watched = self.guide.run  # type: ignore[attr-defined]
            self._draw()

    # Drawing

    def _draw(self) -> None:
        guide, page = self.guide, self.query_one(Page)
        page.blocks = guide.blocks
        offered = choices(guide.page)
        page.choices, page.at = tuple(goal.description for goal in offered), offered.index(guide.goal) if offered else 0
        page.redraw()
        place = f"{guide.at + 1} of {len(PAGES)}"
        self.query_one("#head", Bar).update(
            Content.assemble(
                (" Guided first run", "bold $accent"), "   ", (place, "$wb-dim"), "   ", (TITLES[guide.page], "bold")
            )
        )
        curve = guide.page == "rehearsal" and guide.view is not None and "loss" in guide.view.series
        self.set_class(curve, "curve")
        if curve and guide.view is not None:
            self.query_one(Chart).styles.height = max(7, self.app.size.height // 3 - 1)
            draw(self.query_one(Chart), guide.view, ("loss",), small=True)
        self.query_one(KeyLine).use(self._keys())

    def _keys(self) -> list[tuple[str, str]]:
        guide = self.guide
        keys = (
            [("enter", _ONWARD[guide.onward])]
            + ([("↑↓", "choose")] if choices(guide.page) else [])
            + ([("←", "back")] if guide.at else [])
        )
        keys += [("r", "other-rows")] if guide.page in ("rows", "rehearsal") else []
        keys += [("t", "terms")] if guide.terms else []
        keys += [("c", "chat")] if guide.chats else []
        keys += [("o", "open-run")] if guide.run is not None else []
        return [*keys, ("q", "leave"), ("?", "help")]

    def _go(self, at: int) -> None:
        self.guide.go(at)
        self.query_one(Page).to_top()
        self._draw()

    # Keys

    def action_on(self) -> None:
        """The next page; on the rehearsal's its start, on the last one the config of the real run."""
        self._choose()
        onward = self.guide.onward
        if onward == "rehearse":
            self.guide.begin()
            self._draw()
        elif onward in ("config", "goal"):
            self.app.navigation.build(self.guide.first.real(self.guide.goal), self.guide.step)  # type: ignore[attr-defined]
        elif onward == "rows":
            self.action_rows()
        else:
            self._go(self.guide.at + 1)

    @on(Page.Chosen)
    def _chosen(self) -> None:
        self._choose()
        self._draw()

    def _choose(self) -> None:
        if self.query_one(Page).choices and (offered := choices(self.guide.page)):
            self.guide.choose(offered[self.query_one(Page).at])

    def action_back(self) -> None:
        """The page before."""
        self._go(self.guide.at - 1)

    def action_rows(self) -> None:
        """Take other rows; the pages from there on are about those."""
        first = self.guide.first

        def taken(path: str | None) -> None:
            if path and path.strip():
                self.guide.take(path.strip())
                self._go(self.guide.at)

        want = Wanted("path", (".jsonl", ".json", ".csv"), builtin=(DATES,))
        self.app.push_screen(
            Browse(f"Your rows: {ROWS_NOTE[0].lower()}{ROWS_NOTE[1:]}", first.rows, want, base=first.base), taken
        )

    def action_terms(self) -> None:
        """The words of this page in plain sentences."""
        if terms := [f"{word}: {sentence}" for word, sentence in self.guide.terms]:
            self.app.push_screen(Show("Words of this page", "\n\n".join(terms)))

    def action_chat(self) -> None:
        """Talk to the model that has learned these rows, beside the one that knew nothing."""
        if self.guide.run is not None and self.guide.chats:
            from workbench.screens.chat import ChatScreen, chat_of

            self.app.push_screen(ChatScreen(chat_of(self.guide.run), self.guide.first.question))

    def action_open(self) -> None:
        """The rehearsal's own run, with all its curves."""
        if self.guide.run is not None:
            from workbench.screens.monitor import MonitorScreen

            self.app.push_screen(MonitorScreen(self.guide.run))
