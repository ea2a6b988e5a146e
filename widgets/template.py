"""A chat template in a notebook: written in a box, beside a row as it writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from engine.errors import visible
from engine.session.draft import Draft
from engine.session.template import TemplateEditing
from widgets.asking import Asker
from widgets.protocol import Part, shown, verb

MOST_TOKENS = 600
"""Tokens of one turn that travel."""


class TemplatePart(Part):
    """Answers what a view of a template asks. `edit` makes a change of the draft."""

    def __init__(
        self, draft: Draft, asker: Asker, edit: Callable[[Callable[[], object]], object] = lambda change: change()
    ) -> None:
        self.draft = draft
        self._asker, self._edit = asker, edit
        self._editing: TemplateEditing | None = None

    @verb
    def template_open(self, *, row: Annotated[int, Field(ge=0)] = 0) -> dict[str, Any]:
        """Begin with the draft's template and this row."""
        self.close()
        self._editing = TemplateEditing(self.draft, self._asker.ask, row=row)
        self._editing.send()
        return self._state()

    @verb
    def template_type(self, *, text: Annotated[str, Field(max_length=1_048_576)]) -> dict[str, Any]:
        """Try this template."""
        self._opened().type(text)
        self._opened().send()
        return self._state()

    @verb
    def template_row(self, *, row: Annotated[int, Field(ge=0)]) -> dict[str, Any]:
        """Look at another row."""
        self._opened().go(row)
        return self._state()

    @verb
    def template_news(self) -> dict[str, Any]:
        """How it stands."""
        return self._state()

    @verb
    def template_save(self, *, path: Annotated[str, Field(min_length=1, max_length=4096)]) -> dict[str, Any]:
        """Save what was typed to a file that the draft names from then on."""
        self._edit(lambda: self._opened().save(path))
        return self._state()

    def _opened(self) -> TemplateEditing:
        if self._editing is None:
            self._editing = TemplateEditing(self.draft, self._asker.ask)
        return self._editing

    def _state(self) -> dict[str, Any]:
        editing = self._opened()
        editing.poll()
        found = editing.found
        turns = [
            {
                "role": shown(turn["role"] or "before the turns", 100),
                "tokens": [
                    [token["id"], visible(token["text"], lines=True), bool(token["trained"])]
                    for token in turn["tokens"][:MOST_TOKENS]
                ],
                "left": max(0, len(turn["tokens"]) - MOST_TOKENS),
            }
            for turn in found.get("turns", ())
        ]
        return {
            "done": not editing.open,
            "words": visible(editing.summary()),
            "row": editing.row,
            "text": found.get("text", ""),
            "changed": editing.changed,
            "problem": shown(editing.problem, 800),
            "flaws": [] if editing.problem else [shown(flaw, 400) for flaw in found.get("flaws", ())],
            "asked": shown(found.get("asked", ""), 800),
            "turns": turns,
        }

    def close(self) -> None:
        if self._editing is not None:
            self._editing.close()
            self._editing = None
