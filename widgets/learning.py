"""What goes on beside the form: machine, model and sources are looked at in a thread, tokens counted by the inspector.

It owns when to look again: only when what a look depends on has changed and a moment of quiet has passed, and a stale
question is cancelled. Nothing is pushed: `refresh` is called whenever a view asks, takes in what is done, and starts
what is due.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.client import Ticket
from engine.config.draft import Draft
from engine.config.facts import DataFacts
from engine.config.files import absolute
from engine.config.schema import fields
from engine.data.look import counted_over, look_at, look_at_sources
from engine.errors import Cancelled, WorkbenchError
from widgets.asking import Asker

QUIET_SECONDS = 0.3


class Learner:
    """Finds out about one draft. `words` says what goes on, `trouble` what could not be found out."""

    def __init__(self, draft: Draft, asker: Asker) -> None:
        self.draft = draft
        self.words = ""
        self.trouble: tuple[str, ...] = ()
        self._asker = asker
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[str, str] = {}
        self._looks: dict[str, Future[Any]] = {}
        self._count: Ticket | None = None
        self._seen = (-1, 0.0)
        self._closed = False

    @property
    def base(self) -> Path:
        """Relative paths in the config are relative to its file, else to the working directory."""
        return self.draft.path.parent if self.draft.path is not None else Path.cwd()

    @property
    def working(self) -> bool:
        quiet = time.monotonic() - self._seen[1] > QUIET_SECONDS
        return bool(self._looks or self._count is not None or not quiet)

    def refresh(self) -> None:
        """Take in what is done, start what is due. Never waits."""
        self._harvest()
        if self._closed:
            return
        content = hash(json.dumps(self.draft.mapping, default=str))
        if content != self._seen[0]:
            self._seen = (content, time.monotonic())
        if not self._asked or time.monotonic() - self._seen[1] > QUIET_SECONDS:
            self._start()

    def _harvest(self) -> None:
        for what, look in list(self._looks.items()):
            if look.done():
                del self._looks[what]
                self._take(what, look)
        ticket = self._count
        if ticket is not None and ticket.done:
            self._count, self.words = None, ""
            if ticket.error is None:
                answer = ticket.result(0)
                self.trouble = tuple(answer.get("warnings") or ())
                self._learn(data=DataFacts.counted(answer))
            elif not isinstance(ticket.error, Cancelled):
                self.trouble = (str(ticket.error),)

    def _take(self, what: str, look: Future[Any]) -> None:
        problem = look.exception()
        if isinstance(problem, WorkbenchError | OSError):
            self.trouble = (str(problem),)
        elif problem is not None:
            raise problem
        elif what == "sources":
            self._learn(sources=look.result())
        else:
            found = look.result()
            self._learn(machine=found.machine, model=found.model, packages=found.packages)

    def _learn(self, **facts: Any) -> None:
        self.draft.learn(replace(self.draft.facts, **facts))

    def _start(self) -> None:
        config, base = self.draft.config, self.base
        model = [config.model.name, config.model.revision, config.run.output_dir, str(base)]
        if self._is_new("model", model):
            self._look("model", lambda: look_at(config, base, sources=False))
        # Training counts where both name one file, so it comes last.
        entries = [*config.data.eval, *config.data.train]
        if self._is_new("sources", [[entry.model_dump() for entry in entries], str(base)]):
            self._look("sources", lambda: look_at_sources(entries, base))
        known = "counted" in self._asked
        if self._is_new("counted", [counted_over(config), str(base)]) and known:
            self._forget_counts()
        facts = self.draft.facts.model
        if self._looks or facts is None or facts.missing or facts.remote or not config.data.train:
            return
        owners = (fields.data.train.section, fields.model.name.section)
        if any(each.severity == "error" and each.path.startswith(owners) for each in self.draft.findings):
            return
        mapping = absolute(self.draft.mapping, base)
        if self._is_new("count", [mapping.get(owner) for owner in owners] + [config.method.kind]):
            self._ask(mapping)

    def _forget_counts(self) -> None:
        """What was counted of other rows, with another tokenizer or for another method is no longer shown."""
        if self._count is not None:
            self._count.cancel()
        self._count, self.words, self.trouble = None, "", ()
        self._asked.pop("count", None)
        self._learn(data=None)

    def _is_new(self, what: str, key: Any) -> bool:
        text = json.dumps(key, default=str)
        if self._asked.get(what) == text:
            return False
        self._asked[what] = text
        return True

    def _look(self, what: str, find: Callable[[], Any]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workbench-look")
        self._looks[what] = self._pool.submit(find)

    def _ask(self, mapping: dict[str, Any]) -> None:
        if self._count is not None:
            self._count.cancel()
        self.words = "counting tokens"

        def progress(state: dict[str, Any]) -> None:
            total = state.get("total")
            self.words = f"{state.get('what', 'counting')}: {state.get('done', 0):,}" + (
                f" of {total:,}" if total else ""
            )

        self._count = self._asker.ask("data", on_progress=progress, config=mapping)

    def close(self) -> None:
        self._closed = True
        if self._count is not None:
            self._count.cancel()
            self._count = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._looks.clear()
