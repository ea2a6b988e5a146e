"""What goes on beside the form: facts are found in threads and by the inspector, and come back as messages.

Owns when to look again: a look is repeated only when what it depends on has changed, an open question that has become
stale is cancelled. No function here touches a widget from a thread; answers are posted to the screen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.timer import Timer

from engine.config.facts import DataFacts
from engine.config.files import absolute, place_of, placed
from engine.config.schema import RunConfig, fields
from engine.errors import Cancelled, WorkbenchError
from workbench.messages import FactsArrived
from workbench.screens.leave import alive

if TYPE_CHECKING:
    from engine.client import Ticket
    from engine.config.facts import Facts, SourceFacts
    from engine.run.store import RunFolder
    from workbench.screens.build import BuildScreen
    from workbench.screens.learn import Look

WAIT = 0.3  # seconds of quiet after an edit before rows and models are looked at
RUNS_EVERY = 5.0
KEEP_AFTER = 0.7  # seconds after an edit until what is unsaved is written


class Background:
    """Finds out about machine, model and data for one build screen."""

    def __init__(self, screen: BuildScreen) -> None:
        self._screen = screen
        self._asked: dict[str, Hashable] = {}
        self._counted = ""
        self._tickets: dict[str, Ticket] = {}
        self._timer: Timer | None = None
        self.looks: dict[str, Look] = {}
        self.tokenizer: dict[str, Any] | None = None
        self.asking = ""
        self.trouble: tuple[str, ...] = ()
        self.logout = ""
        self._started = False
        self._keeping: Timer | None = None

    def start(self) -> None:
        """Begin, once the first frame is painted."""
        self._started = True
        self._thread("logout", _logout)
        path = self._screen.draft.path
        self._thread("left", lambda: self._screen.app.unsaved.left(path))
        self._count_runs()
        self._screen.set_interval(RUNS_EVERY, self._count_runs)
        self.look()

    def stop(self) -> None:
        """Give up what is open."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()

    def _count_runs(self) -> None:
        root = self._screen.app.runs_dir

        def count() -> str:
            number = sum(1 for _ in alive(root))
            return "idle" if not number else f"{number} run{'s' if number > 1 else ''} going on"

        self._thread("running", count)

    def _thread(self, what: str, find: Callable[[], Any]) -> None:
        """Run `find` in a thread; its value comes back as a message named `what`."""
        screen = self._screen

        def work() -> None:
            try:
                found = find()
            except (WorkbenchError, OSError) as problem:
                found = problem
            screen.post_message(FactsArrived(what, found))

        screen.run_worker(work, thread=True, group=what, exit_on_error=True)

    # Keeping

    def keep(self) -> None:
        """Keep the unsaved draft, a moment after an edit."""
        if self._keeping is None:
            self._keeping = self._screen.set_timer(KEEP_AFTER, self._keep_now)

    def _keep_now(self) -> None:
        self._keeping = None
        unsaved = self._screen.app.unsaved
        entry = unsaved.entry(self._screen.draft)
        self._thread("kept", lambda: unsaved.write(entry))

    # Looking again

    def look(self) -> None:
        """Look again soon at whatever has changed; many edits in a row are one look."""
        if not self._started:
            return
        if self._timer is not None:
            self._timer.stop()
        self._timer = self._screen.set_timer(WAIT, self._look_now)

    def _look_now(self) -> None:
        draft, base = self._screen.draft, self._screen.base
        config = draft.config
        name = [place_of(config.model.name, base), config.model.revision, config.run.output_dir]
        if self._new("model", json.dumps(name)):
            self._thread("model", lambda: _look(config, base))
        # training counts where both name one file, so it comes last
        paths = (fields.data.eval.path, fields.data.train.path)
        sources = [entry for path in paths for entry in _entries(draft.value(path))]
        if self._new("rows", json.dumps([sources, str(base), config.run.seed], default=str)):
            self._thread("rows", lambda: _looks(config, sources, base))
        self._forget_others()
        if self._screen.step in ("model", "data", "method", "memory", "review", "launch"):
            self._ask()

    def _new(self, what: str, key: Hashable) -> bool:
        if self._asked.get(what) == key:
            return False
        self._asked[what] = key
        return True

    def _forget_others(self) -> None:
        """What was counted of other rows, with another tokenizer or for another method is no longer shown."""
        from engine.data.look import counted_over

        of = json.dumps([counted_over(self._screen.draft.config), str(self._screen.base)], default=str)
        before, self._counted = self._counted, of
        if before in ("", of):
            return
        self._forget_questions()
        self.tokenizer = None
        self._learn(data=None)
        self._screen.draw()

    def _ask(self) -> None:
        """The tokenizer and the counts, once the config can be read and has rows."""
        draft = self._screen.draft
        mapping = absolute(draft.mapping, self._screen.base)
        model = mapping.get("model") or {}
        facts = draft.facts.model
        if facts is None or facts.name != draft.config.model.name or facts.missing or facts.remote:
            self._forget_questions()
            return
        if self._new("tokenizer", json.dumps(model, default=str)):
            self._question("tokenizer", "reading the tokenizer", "model", name=draft.config.model.name, config=mapping)
        broken = any(
            finding.severity == "error" and finding.path.startswith(("data", "model")) for finding in draft.findings
        )
        if not broken and draft.config.data.train:
            what = [model, mapping.get("data"), draft.config.method.kind]
            if self._new("counts", json.dumps(what, default=str)):
                self._question("counts", "counting tokens", "data", config=mapping)

    def _question(self, what: str, words: str, do: str, **params: Any) -> None:
        screen = self._screen
        if what in self._tickets:
            self._tickets[what].cancel()

        def progress(state: dict[str, Any]) -> None:
            total = state.get("total")
            done = f"{state.get('done', 0):,}" + (f" of {total:,}" if total else "")
            screen.post_message(FactsArrived("asking", f"{state.get('what', words)}: {done}"))

        def answered(ticket: Ticket) -> None:
            problem = ticket.error
            if not isinstance(problem, Cancelled):
                screen.post_message(FactsArrived(what, problem if problem is not None else ticket.result(0)))

        self.asking, self.trouble = f"{words} …", ()
        ticket = screen.app.inspector.ask(do, on_progress=progress, **params)
        self._tickets[what] = ticket
        ticket.add_done_callback(answered)

    def _forget_questions(self) -> None:
        """What was asked or answered is about another model; asked again once this one is known."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()
        for what in ("tokenizer", "counts"):
            self._asked.pop(what, None)
        self.asking, self.trouble = "", ()

    # What came back

    def take(self, event: FactsArrived) -> None:
        """Keep what arrived; facts go to the draft, the rest stays here for the pages."""
        what, found = event.what, event.facts
        if what == "asking":
            self.asking = found
        elif what == "logout":
            self.logout = found[1] if isinstance(found, tuple) else ""
        elif what == "model" and not isinstance(found, Exception):
            self._learn(machine=found.machine, model=found.model, packages=found.packages)
        elif what == "rows" and not isinstance(found, Exception):
            facts, self.looks = found
            self._learn(sources=facts)
        elif what == "tokenizer":
            self._settled(what, found)
            self.tokenizer = None if isinstance(found, Exception) else found
        elif what == "counts":
            self._settled(what, found)
            self._learn(data=None if isinstance(found, Exception) else DataFacts.counted(found))
            if not isinstance(found, Exception):
                self.trouble = tuple(found.get("warnings") or ())

    def _settled(self, what: str, found: Any) -> None:
        self._tickets.pop(what, None)
        if not self._tickets:
            self.asking = ""
        problem = found.told if isinstance(found, WorkbenchError) else str(found)
        self.trouble = (problem,) if isinstance(found, Exception) else ()

    def _learn(self, **facts: Any) -> None:
        draft = self._screen.draft
        draft.learn(replace(draft.facts, **facts))

    # The run

    def launch(self, then: Callable[[RunFolder | None, str], None]) -> None:
        """Start the run in a thread; `then(run, problem)` is called on the app's own."""
        draft, base, app = self._screen.draft, self._screen.base, self._screen.app
        mapping, config, known, source = absolute(draft.mapping, base), draft.config, draft.facts, draft.path
        explicit = app.explicit_runs_dir

        def work() -> None:
            from engine.data.look import completed

            run, problem = None, ""
            try:
                facts = placed(completed(known, config, base), base)
                run = start(mapping, facts, explicit, source)
            except WorkbenchError as error:
                problem = error.told
            except OSError as error:
                problem = f"The run could not be started: {error}."
            app.call_from_thread(then, run, problem)

        self._screen.run_worker(work, thread=True, group="launch")


def start(mapping: dict[str, Any], facts: Facts, explicit: Any, source: Any) -> RunFolder:
    """Read once more with all that is known, and launch."""
    from engine.config.schema import read
    from engine.memory.estimate import estimate
    from engine.run.from_config import launch_config, runs_dir_of

    reading = read(mapping, facts)
    if not reading.ok:
        first = next(finding for finding in reading.findings if finding.severity == "error")
        raise WorkbenchError(f"The config has an error, so no run was started. {first.message}")
    return launch_config(
        reading.config,
        facts,
        runs_dir=runs_dir_of(reading.config, reading.given, explicit),
        name=source.stem if source is not None else None,
        forecast_bytes=estimate(reading.config, facts).checkpoints_bytes,
        source=source,
    )


# What runs in threads; the imports stand here because the first paint does not wait for them.


def _logout() -> tuple[bool, str]:
    from workbench.screens.learn import kills_at_logout

    return kills_at_logout()


def _look(config: RunConfig, base: Path) -> Facts:
    from engine.data.look import look_at

    return look_at(config, base, sources=False)


def _looks(
    config: RunConfig, sources: list[dict[str, Any]], base: Path
) -> tuple[dict[str, SourceFacts], dict[str, Look]]:
    """What the rules want to know of the sources, and what a person wants to see of them."""
    from engine.data.look import look_at_sources
    from workbench.screens.learn import look_at

    facts = look_at_sources([*config.data.train, *config.data.eval], base)
    return facts, {_key(entry): look_at(entry, base, config.run.seed) for entry in sources}


def _entries(value: Any) -> list[dict[str, Any]]:
    """The sources as written, a bare path as an entry."""
    if isinstance(value, (str, dict)):
        value = [value]
    found = value if isinstance(value, list) else []
    return [entry if isinstance(entry, dict) else {"path": entry} for entry in found if isinstance(entry, (dict, str))]


def _key(entry: dict[str, Any]) -> str:
    return repr(sorted(entry.items(), key=str))
