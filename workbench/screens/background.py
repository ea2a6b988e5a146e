"""What goes on beside the build screen: the session's facts, runs that go on, what was not saved; answers come as messages.

Owns the timers and threads of one window. No function here touches a widget from a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual.timer import Timer

from engine.errors import WorkbenchError
from engine.session.build import BuildSession
from workbench.messages import FactsArrived
from workbench.screens.leave import alive

if TYPE_CHECKING:
    from engine.run.store import RunFolder
    from workbench.screens.editing import EditingScreen

RUNS_EVERY = 5.0
KEEP_AFTER = 0.7  # seconds after an edit until what is unsaved is written


class Background:
    """Finds out for one build screen."""

    def __init__(self, screen: EditingScreen) -> None:
        self._screen = screen
        app = screen.app
        self.session = BuildSession(
            app.draft,
            lambda do, **params: app.inspector.ask(do, **params),
            runs=app.explicit_runs_dir,
            wake=lambda: screen.post_message(FactsArrived("facts", None)),
        )
        self._timer: Timer | None = None
        self._keeping: Timer | None = None
        self._started = False

    def start(self) -> None:
        """Begin, once the first frame is painted."""
        self._started = True
        self._thread("logout", _logout)
        path = self._screen.draft.path
        self._thread("left", lambda: self._screen.app.unsaved.left(path))
        self._count_runs()
        self._screen.set_interval(RUNS_EVERY, self._count_runs)
        self._screen.look()

    def look(self) -> None:
        """Take in what was found, and look again at whatever has changed; many edits in a row are one look."""
        if not self._started:
            return
        if self._timer is not None:
            self._timer.stop()
        self.session.warm_up(self._screen.step)
        rest = self.session.facts.refresh(ask=self._screen.step != "goal")
        self._timer = self._screen.set_timer(rest, self._screen.look) if rest > 0 else None

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

    def keep(self) -> None:
        """Keep the unsaved draft, a moment after an edit."""
        if self._keeping is None:
            self._keeping = self._screen.set_timer(KEEP_AFTER, self._keep_now)

    def _keep_now(self) -> None:
        self._keeping = None
        unsaved = self._screen.app.unsaved
        entry = unsaved.entry(self._screen.draft)
        self._thread("kept", lambda: unsaved.write(entry))

    def launch(self, then: Callable[[RunFolder | None, str], None], *, queue: bool = False) -> None:
        """Start or queue the run in a thread; `then(run, problem)` is called on the app's own."""
        start, app = self.session.launch(queue=queue), self._screen.app

        def work() -> None:
            try:
                run, problem = start(), ""
            except WorkbenchError as error:
                run, problem = None, error.told
            app.call_from_thread(then, run, problem)

        self._screen.run_worker(work, thread=True, group="launch")


def _logout() -> tuple[bool, str]:
    from engine.run.logout import kills_at_logout

    return kills_at_logout()
