"""The guided first run as a person walks it: the page one is at, what was found out, and the rehearsal that goes on.

App and notebook hold one and draw what it says. It belongs to one thread; what threads found waits until `refresh`, and
`wake`, which any thread may call, tells that something waits.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.config.glossary import TERMS
from engine.config.steps import Goal, step_of_path
from engine.config.tree import fields
from engine.errors import WorkbenchError, full_text, visible
from engine.hardware import Machine, this_machine
from engine.run.index import Watch, open_view
from engine.run.store import RunFolder
from engine.run.view import RunView
from engine.session.collector import Ask
from engine.session.first_run import CHOICES, PAGES, TINY, WORDS, FirstRun, about_choice
from engine.session.guided_rehearsal import DATES, examine, judge
from engine.session.pages import GAP, Block

_PAGE_OF = {"run": "rehearsal"}
"""The page of what is looked for, where it is called otherwise."""


class _Asked:
    """What is found out in the background; answers wait until one thread takes them."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._found: queue.SimpleQueue[tuple[str, str, Callable[[], Any]]] = queue.SimpleQueue()
        self.pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="workbench-guide")

    def find(self, what: str, rows: str, find: Callable[[], Any]) -> None:
        """Have a thread find this out about these rows."""
        self.pool.submit(find).add_done_callback(lambda done: self.bring(what, rows, done.result))

    def bring(self, what: str, rows: str, result: Callable[[], Any]) -> None:
        """An answer; `result` gives it or raises. Any thread may call it."""
        self._found.put((what, rows, result))
        self._wake()

    def answers(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """Those that wait, each once."""
        while not self._found.empty():
            yield self._found.get()


class Guide:
    """One walk through the pages: `at` is the number of the page, `run` the rehearsal's folder once it was started."""

    def __init__(
        self,
        ask: Ask,
        *,
        rows: str = DATES,
        base: Path | None = None,
        runs: str | os.PathLike[str] | None = None,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self.first = FirstRun(ask, rows=rows, base=base, runs=runs)
        self.at = 0
        self.goal: Goal = CHOICES[0]
        """What the model shall learn, as chosen on the page of the goal."""
        self.run: RunFolder | None = None
        self._asked = _Asked(wake)
        self._machine: Machine | None = None
        self._watch: Watch | None = None
        self._starting = False
        self._problems: dict[str, str] = {}
        """What went wrong, by the page that it belongs to."""
        self._asked.find("machine", rows, this_machine)
        self._examine()

    # What is shown

    @property
    def page(self) -> str:
        """The name of the page one is at."""
        return PAGES[self.at]

    @property
    def view(self) -> RunView | None:
        """How the rehearsal stands, once there is one."""
        return self._watch.view if self._watch is not None else None

    @property
    def blocks(self) -> list[Block]:
        """What this page says now."""
        if self.page == "goal":
            return about_choice(self.goal)
        page = self.first.page(self.page, self._machine, self.view)
        problem = self._problems.get(self.page)
        return [*page, GAP, Block("bad", visible(problem))] if problem else page

    @property
    def terms(self) -> list[tuple[str, str]]:
        """The words of this page, each with a plain sentence."""
        return [(word, TERMS[word]) for word in WORDS[self.page]]

    @property
    def onward(self) -> str:
        """Where the way goes on from this page: `next`, `rehearse` to start the rehearsal, `rows` for other ones, `config`,
        or `goal` for the config of another goal than the guide's own."""
        if self.page == "goal" and self.goal is not CHOICES[0]:
            return "goal"
        if self.page == "rows" and self.first.examined is not None and self.first.examined.problem:
            return "rows"
        if self.page == "rehearsal" and self._may_begin:
            return "rehearse"
        return "config" if self.page == PAGES[-1] else "next"

    @property
    def going(self) -> bool:
        """Whether a rehearsal starts or goes on."""
        return self._starting or (self.view is not None and not self.view.over)

    @property
    def chats(self) -> bool:
        """Whether this page offers a talk with the rehearsal's model: it is over, and a checkpoint of it was kept."""
        return (
            self.page in ("rehearsal", "next")
            and self.view is not None
            and self.view.over
            and bool(self.view.committed)
        )

    @property
    def _may_begin(self) -> bool:
        """Whether a rehearsal can be started: none goes on, and none has succeeded with these rows."""
        if self._starting or self.first.examined is None or self.first.examined.problem:
            return False
        return self.view is None or judge(self.view, self.first.examined).state == "failed"

    @property
    def step(self) -> str:
        """The step at which the real run's config is opened: one has to name a model where rows of one's own met a toy."""
        if self.onward == "goal":
            return step_of_path(fields.model.name.path)
        toy = self.first.model == TINY and self.first.rows != DATES
        return step_of_path(fields.model.name.path) if toy else "review"

    # What is done

    def choose(self, goal: Goal) -> None:
        """Take another goal, on the page that asks for it."""
        if self.page == "goal":
            self.goal = goal

    def go(self, at: int) -> None:
        """To the page of this number; all but that of the goal are about the first one."""
        self.at = max(0, min(at, len(PAGES) - 1))
        if self.page != "goal":
            self.goal = CHOICES[0]

    def take(self, rows: str) -> None:
        """Other rows: the pages from there on are about those, and a rehearsal of the rows before goes on alone."""
        self._leave_run()
        self.first.take(rows)
        self._problems.clear()
        self._examine()
        self.go(PAGES.index("rows"))

    def begin(self) -> None:
        """Start the rehearsal, where it can be started."""
        if self._may_begin:
            self._leave_run()
            self._starting = True
            self._problems.pop("rehearsal", None)
            self._asked.find("run", self.first.rows, self.first.launch)

    def follow(self, run: RunFolder) -> None:
        """Take a rehearsal that was started already as the one of these rows."""
        self.run, self._watch = run, open_view(run)

    def refresh(self) -> bool:
        """Take in what was found and how the rehearsal stands; tells whether anything is new. One that knows its rows is
        asked to stop, once."""
        new = False
        for what, rows, result in self._asked.answers():
            self._learn(what, rows, result)
            new = True
        if self._watch is not None and self.run is not None and self._watch.poll():
            self.first.follow(self.run, self._watch.view)
            new = True
        return new

    def close(self) -> None:
        """Nothing goes on for a window that is left but the rehearsal, to its end."""
        if self._watch is not None:
            self._watch.close()
        self.first.warm.close()
        self._asked.pool.shutdown(wait=False, cancel_futures=True)

    # Inside

    def _leave_run(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = self.run = None

    def _examine(self) -> None:
        path, base = self.first.rows, self.first.base
        self._asked.find("rows", path, lambda: examine(path, base))

    def _learn(self, what: str, rows: str, result: Callable[[], Any]) -> None:
        """Take in what a thread found for these rows, unless others are shown by now."""
        if what == "run":
            self._starting = False
        if what != "machine" and rows != self.first.rows:
            return
        try:
            value = result()
        except (WorkbenchError, OSError) as problem:
            self._problems[_PAGE_OF.get(what, what)] = full_text(problem)
            return
        if what == "machine":
            self._machine = value
        elif what == "tokens":
            # The inspector has its libraries by now: what loads the worker's takes no time from it.
            self._asked.pool.submit(self.first.warm_up)
            self.first.row = {"refused": value.full_message} if isinstance(value, WorkbenchError) else value
        elif what == "run":
            self.follow(value)
        else:
            self.first.examined = value
            if not value.problem:
                self.first.ask_tokens(lambda row: self._asked.bring("tokens", rows, lambda: row))
