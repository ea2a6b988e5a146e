"""The guided first run: six pages, one idea each, and a rehearsal on the person's own rows that stops by itself.

What the pages say is `engine.session.first_run`; this screen turns them, asks for rows and follows the rehearsal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from engine.config.terms import TERMS
from engine.errors import WorkbenchError, visible
from engine.hardware import Machine, this_machine
from engine.run.index import Watch, open_view
from engine.run.view import RunView
from engine.session.first_run import PAGES, TITLES, FirstRun, examine, judge
from workbench.actions import bindings
from workbench.panels.bars import Bar, KeyLine
from workbench.panels.chart import Chart
from workbench.panels.charts import draw
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, paragraph, wrap
from workbench.screens.dialog import Ask, Show
from workbench.screens.listing import PathSuggester

if TYPE_CHECKING:
    from engine.run.store import RunFolder
    from engine.session.pages import Block

LOOK_SECONDS = 0.25
LABEL = 10
_STYLES = {"title": "bold", "dim": "dim", "warn": "warn", "bad": "bad", "code": "code"}
_WORDS = {
    "machine": (),
    "goal": ("fine-tuning", "base model", "chat model"),
    "rows": ("prompt", "completion"),
    "tokens": ("token", "chat template", "mask", "label"),
    "rehearsal": ("loss", "step", "learning rate", "optimizer"),
    "next": ("overfitting", "held-out data", "epoch", "LoRA"),
}


class Found(Message):
    """Something that was looked for in a thread: `machine`, `rows`, `tokens` or `run`, for these rows."""

    def __init__(self, what: str, rows: str, value: Any) -> None:
        super().__init__()
        self.what, self.rows, self.value = what, rows, value


class Page(Scrolled):
    """One page of the guide."""

    blocks: list[Block] = []

    def lines(self, width: int) -> list[Line]:
        """Its blocks, wrapped; code stands further in."""
        made: list[Line] = [[]]
        for block in self.blocks:
            text, style = clean(block.text), _STYLES.get(block.kind, "")
            if block.kind == "code":
                first, *rest = wrap(text, width - 6)
                made += [[("  " + first, style)], *([("    " + line, style)] for line in rest)]
            elif block.kind == "table":
                for label, value in block.rows:
                    first, *rest = wrap(clean(value), width - LABEL - 2) or [""]
                    made += [
                        [(f"  {label:<{LABEL}}", "dim"), (first, "")],
                        *([(" " * (LABEL + 2) + more, "")] for more in rest),
                    ]
            else:
                made += paragraph(text, min(width, 90), style)
        return made


class GuideScreen(Screen[None]):
    """The guided first run."""

    NAME = "guide"
    BINDINGS = bindings("guide")
    DEFAULT_CSS = """
    GuideScreen #head { height: 2; border-bottom: solid $wb-line; }
    GuideScreen Page { height: 1fr; padding: 0 0 0 1; }
    GuideScreen Chart { height: 7; display: none; }
    GuideScreen.curve Chart { display: block; }
    GuideScreen #foot { height: auto; border-top: solid $wb-line; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.run: RunFolder | None = None
        self._machine: Machine | None = None
        self._watch: Watch | None = None
        self._launching = False
        self._problem = ""

    @property
    def page(self) -> str:
        """The page that is shown."""
        return PAGES[self.at]

    @property
    def view(self) -> RunView | None:
        """How the rehearsal stands, once there is one."""
        return self._watch.view if self._watch is not None else None

    def compose(self) -> ComposeResult:
        """Where one is, the page, the curve of the rehearsal, the keys."""
        app: Any = self.app
        self.first = FirstRun(app.inspector.ask, runs=app.explicit_runs_dir)
        head = Bar()
        head.id = "head"
        yield head
        yield Page()
        yield Chart("loss")
        with Vertical(id="foot"):
            yield KeyLine("guide")

    def on_mount(self) -> None:
        """What is asked of machine, rows and tokenizer is asked at once, so that it is there when its page is opened."""
        self.query_one(Page).focus()
        self._find("machine", this_machine)
        self._read_rows()
        self._draw()
        self.set_interval(LOOK_SECONDS, self._look)

    def on_unmount(self) -> None:
        """The rehearsal goes on to its end without this window."""
        if self._watch is not None:
            self._watch.close()

    # What is found out

    def _find(self, what: str, find: Any) -> None:
        rows = self.first.rows

        def work() -> None:
            try:
                value = find()
            except (WorkbenchError, OSError) as problem:
                value = problem
            self.post_message(Found(what, rows, value))

        self.run_worker(work, thread=True, group=what, exclusive=True, exit_on_error=True)

    def _read_rows(self) -> None:
        path, base = self.first.rows, self.first.base
        self._find("rows", lambda: examine(path, base))

    def on_found(self, event: Found) -> None:
        """Show it, unless other rows were taken meanwhile."""
        if event.what == "machine":
            self._machine = event.value if isinstance(event.value, Machine) else None
        elif event.rows == self.first.rows:
            self._learn(event.what, event.value)
        self._draw()

    def _learn(self, what: str, value: Any) -> None:
        if what == "run":
            self._launching = False
        if isinstance(value, Exception):
            self._problem = str(value)
        elif what == "rows":
            self.first.examined = value
            if not value.problem:
                rows = self.first.rows
                self.first.ask_tokens(lambda row: self.post_message(Found("tokens", rows, row)))
        elif what == "tokens":
            self.first.row = value
        else:
            self.run, self._watch = value, open_view(value)
            self.app.watched = value  # type: ignore[attr-defined]

    def _look(self) -> None:
        if self._watch is not None and self._watch.poll() and self.run is not None:
            self.first.follow(self.run, self._watch.view)
            self._draw()

    # Drawing

    def _draw(self) -> None:
        page = self.query_one(Page)
        page.blocks = self.first.page(self.page, self._machine, self.view)
        if self._problem:
            from engine.session.pages import GAP, Block

            page.blocks = [*page.blocks, GAP, Block("bad", visible(self._problem))]
        page.redraw()
        place = f"{self.at + 1} of {len(PAGES)}"
        self.query_one("#head", Bar).say(
            Content.assemble(
                (" Guided first run", "bold $accent"), "   ", (place, "$wb-dim"), "   ", (TITLES[self.page], "bold")
            )
        )
        curve = self.page == "rehearsal" and self.view is not None and "loss" in self.view.series
        self.set_class(curve, "curve")
        if curve and self.view is not None:
            draw(self.query_one(Chart), self.view, ("loss",), small=True)
        self.query_one(KeyLine).use(self._keys())

    def _keys(self) -> list[tuple[str, str]]:
        on = {"rehearsal": "rehearse" if self._may_begin else "next", "next": "config"}.get(self.page, "next")
        keys = [("enter", on)] + ([("←", "back")] if self.at else [])
        keys += [("r", "other-rows")] if self.page in ("rows", "rehearsal") else []
        keys += [("t", "terms")] if _WORDS[self.page] else []
        keys += [("o", "open-run")] if self.run is not None else []
        return [*keys, ("q", "leave"), ("?", "help")]

    @property
    def _may_begin(self) -> bool:
        """Whether a rehearsal can be started: none goes on, and none has succeeded with these rows."""
        if self._launching or self.first.examined is None or self.first.examined.problem:
            return False
        return self.view is None or judge(self.view, self.first.examined).state == "failed"

    def _go(self, at: int) -> None:
        self.at, self._problem = max(0, min(at, len(PAGES) - 1)), ""
        self.query_one(Page).to_top()
        self._draw()

    # Keys

    def action_on(self) -> None:
        """The next page; on the rehearsal's its start, on the last one the config of the real run."""
        if self.page == "rehearsal" and self._may_begin:
            self._launching, self._problem = True, ""
            if self._watch is not None:
                self._watch.close()
                self._watch = self.run = None
            self._find("run", self.first.launch)
            self._draw()
        elif self.page == "next":
            self.app.draft = self.first.real()  # type: ignore[attr-defined]
            self.app.action_build()  # type: ignore[attr-defined]
        elif self.page == "rows" and self.first.examined is not None and self.first.examined.problem:
            self.action_rows()
        else:
            self._go(self.at + 1)

    def action_back(self) -> None:
        """The page before."""
        self._go(self.at - 1)

    def action_rows(self) -> None:
        """Take other rows; the pages from there on are about those."""

        def taken(path: str | None) -> None:
            if path and path.strip():
                if self._watch is not None:
                    self._watch.close()
                self._watch = self.run = None
                self.first.take(path.strip())
                self._read_rows()
                self._go(PAGES.index("rows"))

        note = "A JSON, JSONL or CSV file of questions and answers; builtin/dates is built in.   → completes"
        self.app.push_screen(Ask("Your rows", self.first.rows, note, PathSuggester(self.first.base)), taken)

    def action_terms(self) -> None:
        """The words of this page in plain sentences."""
        told = [f"{word}: {TERMS[word]}" for word in _WORDS[self.page] if word in TERMS]
        if told:
            self.app.push_screen(Show("Words of this page", "\n\n".join(told)))

    def action_open(self) -> None:
        """The rehearsal's own run, with all its curves."""
        if self.run is not None:
            from workbench.screens.monitor import MonitorScreen

            self.app.push_screen(MonitorScreen(self.run))
