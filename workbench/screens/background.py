"""What goes on beside the build screen: the session's facts, runs that go on, what was not saved; answers come as messages.

Owns the timers and threads of one window. No function here touches a widget from a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual.screen import Screen
from textual.timer import Timer

from engine.errors import WorkbenchError, redact, visible
from engine.session.build import BuildSession
from workbench.messages import FactsArrived
from workbench.screens.leave import alive

if TYPE_CHECKING:
    from engine.run.store import RunFolder
    from workbench.app import WorkbenchApp
    from workbench.unsaved import UnsavedConfig

RUNS_EVERY = 5.0
SOON = 1.5
KEEP_AFTER = 0.7  # seconds after an edit until what is unsaved is written


class Background:
    """Finds out for one build screen."""

    def __init__(self, screen: Screen[None], app: WorkbenchApp, look: Callable[[], None]) -> None:
        """`look` is called when it is time to look again."""
        self._screen, self._app, self._look_again = screen, app, look
        self.session = BuildSession(
            app.draft,
            lambda do, **params: app.inspector.ask(do, **params),
            runs=app.explicit_runs_dir,
            wake=lambda: screen.post_message(FactsArrived("facts", None)),
        )
        self.activity = "idle"
        """How many runs go on, in words."""
        self.logout = ""
        """What a logout does to runs, where it does something."""
        self.left: list[UnsavedConfig] = []
        """Configs that earlier windows left unsaved."""
        self.starting = False
        self.problem = ""
        """Why the run could not be started."""
        self._timer: Timer | None = None
        self._keeping: Timer | None = None
        self._started = False

    def start(self) -> None:
        """Begin, once the first frame is painted."""
        self._started = True
        self._thread("logout", _logout)
        path = self._app.draft.path
        self._thread("left", lambda: self._app.history.unsaved.left(path))
        self._count_runs()
        self._screen.set_interval(RUNS_EVERY, self._count_runs)
        self._look_again()

    def refresh(self, step: str) -> None:
        """Take in what was found, and look again at whatever has changed; many edits in a row are one look."""
        if not self._started:
            return
        if self._timer is not None:
            self._timer.stop()
        self.session.warm_up(step)
        rest = self.session.facts.refresh(ask=step != "goal")
        self._timer = self._screen.set_timer(rest, self._look_again) if rest > 0 else None

    def count_again(self) -> None:
        """Count the runs that go on once one is back: one that has just ended says so a moment later."""
        if self._started:
            self._count_runs()
            self._screen.set_timer(SOON, self._count_runs)

    def _count_runs(self) -> None:
        root = self._app.runs_dir

        def count() -> str:
            number = sum(1 for _ in alive(root))
            return "idle" if not number else f"{number} run{'s' if number > 1 else ''} going on"

        self._thread("running", count)

    def _thread(self, what: str, find: Callable[[], Any]) -> None:
        """Run `find` in a thread; its value comes back as a message named `what`."""
        screen = self._screen

        def work() -> None:
            try:
                value = find()
            except (WorkbenchError, OSError) as problem:
                value = problem
            screen.post_message(FactsArrived(what, value))

        screen.run_worker(work, thread=True, group=what, exit_on_error=True)

    def learn(self, what: str, value: Any) -> None:
        """Take in what one of the threads found."""
        if what == "logout" and isinstance(value, tuple):
            self.logout = value[1]
        elif what == "left" and not isinstance(value, Exception):
            self.left = value
        elif what == "running":
            self.activity = value

    def keep(self) -> None:
        """Keep the unsaved draft, a moment after an edit."""
        if self._keeping is None:
            self._keeping = self._screen.set_timer(KEEP_AFTER, self._keep_now)

    def _keep_now(self) -> None:
        self._keeping = None
        unsaved = self._app.history.unsaved
        entry = unsaved.entry(self._app.draft)
        self._thread("kept", lambda: unsaved.write(entry))

    def launch(self, then: Callable[[RunFolder | None], None], *, queue: bool = False) -> None:
        """Start or queue the run in a thread; `then(run)` is called on the app's own, with nothing where there is a `problem`."""
        start, app = self.session.launch(queue=queue), self._app
        self.starting, self.problem = True, ""

        def ended(run: RunFolder | None, problem: str) -> None:
            self.starting, self.problem = False, visible(redact(problem))
            then(run)

        def work() -> None:
            try:
                run, problem = start(), ""
            except WorkbenchError as error:
                run, problem = None, error.full_message
            app.call_from_thread(ended, run, problem)

        self._screen.run_worker(work, thread=True, group="launch")


def _logout() -> tuple[bool, str]:
    from engine.run.logout import kills_at_logout

    return kills_at_logout()
