"""The guided first run in a cell: the pages, the rehearsal and what leads on, as the terminal has them.

Nothing is looked for until a view opens it. A view asks again and again and gets the page anew only where it changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from engine.errors import UsageError, visible
from engine.session.build import BuildSession
from engine.session.collector import Ask
from engine.session.first_run import CHOICES, PAGES, ROWS_NOTE, TITLES, choices
from engine.session.guide import Guide
from engine.session.guided_rehearsal import DATES
from engine.session.start import GUIDED
from widgets.pages import drawn
from widgets.protocol import Part, news, shown, verb
from widgets.reader import Runs


class GuidePart(Part):
    """Answers what a guided first run asks; what it leads to becomes the draft of `session`."""

    def __init__(
        self,
        session: BuildSession,
        ask: Ask,
        runs: Runs,
        opened: Callable[[str], object],
        before: Guide | None = None,
    ) -> None:
        self._session, self._ask, self._runs, self._opened = session, ask, runs, opened
        self._before = before
        self._guide: Guide | None = None

    @property
    def so_far(self) -> Guide | None:
        """The walk of this view, or the one that it goes on with, where there is one."""
        return self._guide or self._before

    @verb
    def guide_offer(self) -> dict[str, Any]:
        """What it is, for where one begins."""
        return {"title": GUIDED.title, "detail": GUIDED.detail}

    @verb
    def guide(self, *, mark: int = 0) -> dict[str, Any]:
        """The page as it stands; its mark alone where the view holds that already."""
        guide = self._walk
        guide.refresh()
        if guide.run is not None:
            self._runs.give(guide.run)
        state = {
            "at": guide.at,
            "pages": [{"id": page, "title": TITLES[page]} for page in PAGES],
            "page": guide.page,
            "blocks": list(drawn(guide.blocks)),
            "choices": [
                {"id": goal.id, "words": goal.description, "here": goal is guide.goal} for goal in choices(guide.page)
            ],
            "terms": [list(term) for term in guide.terms],
            "rows": visible(guide.first.rows),
            "built_in": DATES,
            "note": ROWS_NOTE,
            "onward": guide.onward,
            "run": guide.run.id if guide.run is not None else "",
            "going": guide.going,
            "chats": guide.chats,
            "question": guide.first.question,
        }
        return news(state, mark)

    @verb
    def guide_go(self, *, at: Annotated[int, Field(ge=0, lt=len(PAGES))]) -> dict[str, Any]:
        self._walk.go(at)
        return self.guide()

    @verb
    def guide_choose(self, *, goal: Annotated[str, Field(max_length=40)]) -> dict[str, Any]:
        """Take a goal of those that the page offers."""
        known = {offered.id: offered for offered in CHOICES}
        if goal not in known:
            raise UsageError("There is no such goal.", f"It is one of {', '.join(known)}.")
        self._walk.choose(known[goal])
        return self.guide()

    @verb
    def guide_rows(self, *, path: Annotated[str, Field(max_length=4096)]) -> dict[str, Any]:
        """Take other rows."""
        if not path.strip():
            raise UsageError("Name a file of rows.", ROWS_NOTE)
        self._walk.take(path.strip())
        return self.guide()

    @verb
    def guide_begin(self) -> dict[str, Any]:
        """Start the rehearsal."""
        self._walk.begin()
        return self.guide()

    @verb
    def guide_config(self, *, sure: bool = False) -> dict[str, Any]:
        """Make the config of the real run, or of another goal, the draft. One that is a person's own is not replaced unasked."""
        session = self._session
        if session.is_own and not sure:
            path = session.draft.path
            name, saving = (path.name, " Save would write over the file.") if path is not None else ("your config", "")
            return {"asks": shown(f"This takes the place of {name} in the form; Undo brings that back.{saving}")}
        real, step = self._walk.first.real(self._walk.goal), self._walk.step
        session.begin(real.text(), real.recipe)
        self._opened(step)
        return {}

    @property
    def _walk(self) -> Guide:
        if self._guide is None:
            before = self._before
            rows = before.first.rows if before is not None else DATES
            self._guide = Guide(self._ask, rows=rows, runs=self._session.runs_dir)
            if before is not None:
                self._guide.go(before.at)
                if before.run is not None:
                    self._guide.follow(before.run)
        return self._guide

    def close(self) -> None:
        """A rehearsal that goes on ends by itself."""
        if self._guide is not None:
            self._guide.close()
