"""What goes on beside a draft: machine, model and sources are looked at in threads, rows counted by the inspector.

It owns when to look again: only when what a look depends on has changed and a moment of quiet has passed; a stale question
is cancelled. One decision worth knowing: threads change nothing. What they found waits until the owner of the draft calls
`refresh`, on its own thread; `wake`, which any thread may call, tells it that something waits.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.adapter import Lora
from engine.config.facts import DataFacts, Facts, SourceFacts
from engine.config.files import absolute, place_of
from engine.config.tree import RunConfig, fields
from engine.errors import Cancelled, WorkbenchError, full_text
from engine.figures import doing
from engine.session.draft import Draft

if TYPE_CHECKING:
    from engine.client import Ticket
    from engine.session.first_rows import SourcePreview

QUIET_SECONDS = 0.3
"""After an edit, before rows and models are looked at."""
Ask = Callable[..., "Ticket"]
"""`Inspector.ask`, or what stands for it."""


class NewestQuestion:
    """One question to the inspector at a time: a newer one cancels the older. `wake` may be called from any thread."""

    def __init__(self, ask: Ask, wake: Callable[[], object]) -> None:
        self._ask, self._wake = ask, wake
        self._ticket: Ticket | None = None

    def send(self, do: str, **params: Any) -> None:
        """Ask it, in place of the one before."""
        self.cancel()
        self._ticket = self._ask(do, **params)
        self._ticket.add_done_callback(lambda _: self._wake())

    @property
    def put_forward(self) -> bool:
        """Whether something was asked that nobody has cancelled or taken the answer of."""
        return self._ticket is not None

    @property
    def open(self) -> bool:
        """Whether an answer is still to come."""
        return self._ticket is not None and not self._ticket.done

    def take(self) -> dict[str, Any] | WorkbenchError | None:
        """The answer, or what went wrong, once; nothing while there is none."""
        ticket = self._ticket
        if ticket is None or not ticket.done:
            return None
        self._ticket = None
        if isinstance(ticket.error, Cancelled):
            return None
        answer: dict[str, Any] = ticket.result(0) if ticket.error is None else {}
        return ticket.error or answer

    def cancel(self) -> None:
        """Give up what is asked."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None


class FactsCollector:
    """Finds out about one draft. `asking` says what the inspector is busy with, `problems` what could not be found out."""

    def __init__(
        self,
        draft: Draft,
        ask: Ask,
        wake: Callable[[], object] = lambda: None,
        runs: str | os.PathLike[str] | None = None,
    ) -> None:
        self.draft = draft
        self._runs = runs
        self.looks: dict[str, SourcePreview] = {}
        self.tokenizer: dict[str, Any] | None = None
        self._ask, self._wake = ask, wake
        self._pool: ThreadPoolExecutor | None = None
        self._known: dict[str, str] = {}
        """What each look and question was about."""
        self._looking: dict[str, Future[Any]] = {}
        self._tickets: dict[str, Ticket] = {}
        self._doing: dict[str, str] = {}
        """How far each question is; of one that was given up it may come late, and is then shown nowhere."""
        self._troubles: dict[str, tuple[str, ...]] = {}
        self._seen = ("", 0.0)
        self.stopped = False
        """Whether the rows are left uncounted because a person stopped it."""
        self._closed = False

    @property
    def asking(self) -> str:
        """What the inspector is busy with, by the newest question."""
        return next((self._doing[what] for what in reversed(self._tickets)), "")

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be found out and what was noticed, each sentence once."""
        return tuple(dict.fromkeys(words for sentences in self._troubles.values() for words in sentences))

    @property
    def working(self) -> bool:
        """Whether more will be known without another edit."""
        return bool(self._looking or self._tickets) or time.monotonic() - self._seen[1] <= QUIET_SECONDS

    def refresh(self, *, ask: bool = True) -> float:
        """Take in what is done, start what is due; the inspector is asked where `ask` says so. Never waits.

        Returns the seconds until it should be called again though nothing was found, or nothing.
        """
        self._harvest()
        if self._closed:
            return 0.0
        content, now = json.dumps([self.draft.mapping, str(self.draft.base)], default=str), time.monotonic()
        if content != self._seen[0]:
            self._seen = (content, now)
        left = self._seen[1] + QUIET_SECONDS - now
        if left > 0 and self._known:
            return left
        self._start()
        if ask:
            self._ask_due()
        return 0.0

    @property
    def counting(self) -> bool:
        """Whether all rows are being counted."""
        return "counts" in self._tickets

    def stop_counting(self) -> bool:
        """Leave the rows uncounted until an edit makes them others, or `count_again`; False where nothing is counted."""
        ticket = self._tickets.get("counts")
        if ticket is None or ticket.done:
            return False
        del self._tickets["counts"]
        ticket.cancel()
        self.stopped = True
        return True

    def count_again(self) -> None:
        """Count the rows, also where counting was stopped."""
        self._known.pop("counts", None)
        self.stopped = False
        self.refresh()

    def close(self) -> None:
        """Give up what is open."""
        self._closed = True
        self._give_up_questions()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._looking.clear()

    # Looks

    def _start(self) -> None:
        draft, config, base = self.draft, self.draft.config, self.draft.base
        adapter = config.adapter.path if isinstance(config.adapter, Lora) else None
        about = [place_of(config.model.name, base), config.model.revision, config.run.output_dir, adapter]
        if self._is_new("model", about):
            self._submit("model", lambda: _facts_without_sources(config, base, self._runs))
        # Training counts where both name one file: its rows are looked at last, and stand.
        written = [*_entries(draft.value(fields.data.eval.path)), *_entries(draft.value(fields.data.train.path))]
        if self._is_new("sources", [written, str(base), config.run.seed]):
            self._submit("sources", lambda: _inspect_sources(config, written, base))
        from engine.data.gather_facts import counted_over

        known = "counted" in self._known
        if self._is_new("counted", [counted_over(config), str(base)]) and known:
            # What was counted of other rows, with another tokenizer or for another method is no longer shown.
            self._give_up_questions()
            self.tokenizer = None
            self._learn(data=None)

    def _submit(self, what: str, find: Callable[[], Any]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="workbench-look")
        self._looking[what] = self._pool.submit(find)
        self._looking[what].add_done_callback(lambda _: self._wake())

    def _is_new(self, what: str, about: Any) -> bool:
        text = json.dumps(about, default=str)
        if self._known.get(what) == text:
            return False
        self._known[what] = text
        return True

    # Questions to the inspector

    def _ask_due(self) -> None:
        """The tokenizer and the counts, once the config can be read and has rows."""
        from engine.data.gather_facts import countable

        draft, config, facts = self.draft, self.draft.config, self.draft.facts.model
        if facts is None or facts.name != config.model.name or facts.missing or facts.remote:
            self._give_up_questions()
            return
        if self._looking:
            return
        mapping = absolute(draft.mapping, draft.base)
        model = mapping.get(fields.model.name.section)
        if self._is_new("tokenizer", model):
            self._question("tokenizer", "reading the tokenizer", "model", name=config.model.name, config=mapping)
        # All that the prepared rows hang on: what the count leaves in their cache is what a launch finds there.
        about = [model, mapping.get(fields.data.train.section), config.method.kind, config.run.seed]
        if countable(draft.findings) and config.data.train and self._is_new("counts", about):
            self.stopped = False
            self._question("counts", "counting tokens", "data", config=mapping)

    def _question(self, what: str, words: str, do: str, **params: Any) -> None:
        if what in self._tickets:
            self._tickets.pop(what).cancel()

        def on_progress(state: dict[str, Any]) -> None:
            self._doing[what] = doing(state, words)
            self._wake()

        self._doing[what] = f"{words} …"
        self._troubles.pop(what, None)
        ticket = self._tickets[what] = self._ask(do, on_progress=on_progress, **params)
        ticket.add_done_callback(lambda _: self._wake())

    def _give_up_questions(self) -> None:
        """What was asked or answered is about something else; asked again once this is known."""
        self.stopped = False
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()
        for what in ("tokenizer", "counts"):
            self._known.pop(what, None)
            self._troubles.pop(what, None)

    # What came back

    def _harvest(self) -> None:
        for what, look in [(what, look) for what, look in self._looking.items() if look.done()]:
            del self._looking[what]
            problem = look.exception()
            if problem is None:
                self._troubles.pop(what, None)
                self._take(what, look.result())
            elif isinstance(problem, WorkbenchError | OSError):
                self._troubles[what] = (full_text(problem),)
            else:
                raise problem
        for what, ticket in [(what, ticket) for what, ticket in self._tickets.items() if ticket.done]:
            del self._tickets[what]
            if isinstance(ticket.error, Cancelled):
                continue
            self._troubles[what] = (full_text(ticket.error),) if ticket.error is not None else ()
            self._take(what, None if ticket.error is not None else ticket.result(0))

    def _take(self, what: str, answer: Any) -> None:
        if what == "model":
            data = self.draft.facts.data or answer.data
            known = {"machine": answer.machine, "model": answer.model, "packages": answer.packages}
            self._learn(**known, adapter=answer.adapter, data=data)
        elif what == "sources":
            facts, self.looks = answer
            self._learn(sources=facts)
        elif what == "tokenizer":
            self.tokenizer = answer
        else:
            self._learn(data=DataFacts.counted_from(answer) if answer is not None else None)
            if answer is not None:
                # What the findings say already, of rows left out and cut, is not said twice.
                self._troubles[what] = tuple(answer.get("counts", {}).get("notes") or ())

    def _learn(self, **facts: Any) -> None:
        self.draft.learn(replace(self.draft.facts, **facts))


# What runs in threads; the imports stand here because the app's first frame does not wait for them.


def _facts_without_sources(config: RunConfig, base: Path, runs: str | os.PathLike[str] | None) -> Facts:
    from engine.data.gather_facts import gather_facts

    return gather_facts(config, base, sources=False, runs=runs)


def _inspect_sources(
    config: RunConfig, written: list[dict[str, Any]], base: Path
) -> tuple[dict[str, SourceFacts], dict[str, SourcePreview]]:
    """What the rules want to know of the sources, and what a person wants to see of them."""
    from engine.data.gather_facts import inspect_sources
    from engine.session.first_rows import first_rows_of

    facts = inspect_sources([*config.data.train, *config.data.eval], base, config.data.image_base_dir)
    return facts, {key_of(entry): first_rows_of(entry, base, config.run.seed) for entry in written}


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    """The sources as written, a bare path as an entry."""
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, (dict, str)):
            yield entry if isinstance(entry, dict) else {"path": entry}


def key_of(entry: Any) -> str:
    """Under which a source's first rows are kept."""
    return repr(sorted(entry.items(), key=str)) if isinstance(entry, dict) else str(entry)
