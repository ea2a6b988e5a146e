"""The first row as training sees it, beside the form on a wide terminal: it follows each edit that changes it.

The inspector draws it up in its own process; a newer edit takes the place of an older question, and until an answer is
there the row of before stays.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from textual.message import Message

from engine.data.gather_facts import countable
from engine.errors import WorkbenchError
from engine.session.rows import RowQuestion, head_text
from workbench.panels.paint import Line, clean, paragraph
from workbench.panels.tokens import TokenView

if TYPE_CHECKING:
    from engine.client import Inspector
    from engine.session.draft import Draft

NONE_YET = "The first row stands here as training sees it, once model and data can be read."


class FirstRow(TokenView, can_focus=False):
    """One row of a draft: how long it is and what of it is trained, then its tokens."""

    DEFAULT_CSS = "FirstRow { width: 5fr; height: 100%; border-left: solid $wb-line; }"

    class Answered(Message):
        """The inspector answered, or said how far it is."""

    def __init__(self, draft: Draft, inspector: Inspector) -> None:
        super().__init__()
        self._draft = draft
        self._question = RowQuestion(draft, inspector.ask, lambda: self.post_message(self.Answered()))
        self._question.packs = False
        self._found: dict[str, Any] = {}
        self._asked = ""

    def follow(self) -> None:
        """Ask anew where an edit made it another row."""
        draft, facts = self._draft, self._draft.facts.model
        known = facts is not None and facts.name == draft.config.model.name and not (facts.missing or facts.remote)
        if not (known and draft.config.data.train and countable(draft.findings)):
            self._question.cancel()
            self._asked, self._found, self.row, self.problem = "", {}, None, ""
            self.redraw()
            return
        named = ("model", "data", "method")
        asked = json.dumps([*map(draft.mapping.get, named), draft.config.run.seed, str(draft.base)], default=str)
        if asked == self._asked:
            return
        self._asked = asked
        rest = self._question.put({"kind": "index", "index": 0}, "reading the first row")
        self.set_timer(max(rest, 0.01), self._question.send)
        self.redraw()

    def on_unmount(self) -> None:
        """Nothing is asked for a panel that is gone."""
        self._question.cancel()

    def on_first_row_answered(self) -> None:
        """Show what came."""
        answer = self._question.take()
        if isinstance(answer, WorkbenchError):
            self.row, self.problem = None, answer.full_message
        elif answer is not None:
            rows = answer.get("rows") or [None]
            self._found, self.row, self.problem = answer, rows[0], "" if rows[0] else "There is no row."
            self.to_top()
        self.redraw()

    def lines(self, width: int) -> list[Line]:
        """What is known of the row, what is being asked, then the row."""
        if not self._asked:
            return paragraph(NONE_YET, width, "faint")
        words = [clean(part) for part in head_text(self._draft, self._found, self.row, 0)]
        drawn: list[Line] = [[(words[0], "bold")], *paragraph(", ".join(words[1:]), width, "dim")]
        warned = [] if self._question.open else self._found.get("warnings", [])[:1]
        drawn += paragraph(clean(warned[0]), width, "warn") if warned else []
        drawn.append([(clean(self._question.progress) if self._question.open else "", "faint")])
        return [*drawn, *super().lines(width), [], [("p shows all rows", "faint")]]
