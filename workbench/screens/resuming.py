"""Going on with a run that ended: as it is, with the change that mends it, for longer, or in a new run from its config.

Each way on asks first where it would end the same way again, or where the rows are not those of before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from textual.content import Content
from textual.screen import Screen

from engine.errors import WorkbenchError
from engine.run import proposals
from engine.run.data_record import DataChanged
from engine.run.ending import End, end_of
from engine.run.store import RunFolder
from workbench.calling import run_name
from workbench.panels.paint import clean
from workbench.screens.dialog import Item, offer
from workbench.screens.screen_thread import LONG, SECONDS, Beside

if TYPE_CHECKING:
    from engine.run.view import RunView


class Resuming:
    """The ways on from one screen; `started` is called with a run that was started in the place of another."""

    def __init__(self, screen: Screen[None], beside: Beside, started: Callable[[RunFolder], object]) -> None:
        self._screen, self._beside, self._started = screen, beside, started

    def resume(self, run: RunFolder, view: RunView) -> None:
        if not view.over:
            self._beside.show(f"This run is {view.state}; it goes on as it is.", SECONDS)
        elif view.state in ("failed", "lost"):
            self._beside.run(
                "resume", lambda: end_of(view, run, run_name(run)), lambda end: self._way_on(run, view, end)
            )
        else:
            self.go_on(run)

    def _way_on(self, run: RunFolder, view: RunView, end: End) -> None:
        """Go on where that may help; where it would end the same way a person is asked, with what would mend it first."""
        if end.change is None and not end.blocked:
            self.go_on(run)
            return
        as_it_is = Item("on", Content("Go on as it is"), Content("  Nothing is put right, so it may end the same way."))
        if end.change is not None:
            title = Content(f"Change {clean(end.change.summary)}")
            first = Item("mend", title, Content(f"  {clean(end.way_on)}; {end.change.why}."))
        else:
            first = Item("form", Content("Change its config in the form"), Content(f"  {clean(end.way_on)}."))
        ways = [(first, lambda: self.first_way(run, view, end)), (as_it_is, lambda: self.go_on(run))]
        offer(self._screen.app, f"{clean(run.id)} is {view.state}", ways)

    def go_on(self, run: RunFolder, settings: Mapping[str, Any] | None = None, *, accept_data: bool = False) -> None:
        """Resume, with other values for some settings; asks first where the rows are not those of before."""

        def work() -> Callable[[], None]:
            from engine.session.resume import resume

            try:
                newest, skipped = resume(run, settings=settings, accept_data=accept_data)
            except DataChanged as problem:
                words = problem.message
                return lambda: self._ask_about_rows(run, words, settings)
            words = f"{run.id} goes on from {newest.name}" if newest else f"{run.id} starts again from the beginning"
            words += "".join(f"; {path.name} was passed over ({reason})" for path, reason in skipped[:3])
            return lambda: self._beside.finished(words)

        self._beside.show(f"{run.id}: comparing its rows, looking for its newest whole checkpoint …", LONG)
        self._beside.run("resume", work, lambda show: show())

    def first_way(self, run: RunFolder, view: RunView, end: End) -> None:
        """What Enter does on the card of a run that has failed: make the change that it proposes, or go on where that may help."""
        if end.change is not None:
            self._mend(run, view, end)
        elif end.blocked:
            self.build_from(run)
        else:
            self.go_on(run)

    def _mend(self, run: RunFolder, view: RunView, end: End) -> None:
        """Make the proposed change and launch; a new run opens."""
        if not end.anew:
            assert end.change is not None
            self.go_on(run, end.change.settings)
            return

        def work() -> RunFolder:
            from engine.session.apply_proposal import apply

            return apply(run, view, end)

        def show(new: RunFolder) -> None:
            self._beside.show(f"{new.id} starts from the beginning.", SECONDS)
            self._started(new)

        self._beside.show("starting a new run …", LONG)
        self._beside.run("resume", work, show)

    def _ask_about_rows(self, run: RunFolder, words: str, settings: Mapping[str, Any] | None) -> None:
        """Name the rows that differ and let a person decide; leaving leaves the run as it is."""
        leave = Item("leave", Content("Leave the run as it is"), Content("Put the rows back, then resume."))
        kept = Content("The run's log keeps what differs.")
        accept = Item("accept", Content("Go on with the rows as they are now"), kept)
        self._beside.show(f"The rows are not those {run.id} was trained on.", SECONDS)
        note = f"{clean(words)}\n\nworkbench preview {clean(run.config)} --against {clean(run.id)} shows every token."
        ways = [(leave, None), (accept, lambda: self.go_on(run, settings, accept_data=True))]
        offer(self._screen.app, note, ways)

    def longer(self, run: RunFolder, view: RunView) -> None:
        if view.state != "finished":
            self._beside.show(f"This run is {view.state}; one that is finished can be trained longer.", SECONDS)
            return
        change = proposals.longer(run)
        on = Item(
            "on",
            Content(f"Go on with {clean(run.id)}: {clean(change.summary)}"),
            Content(f"  From its newest checkpoint; {change.why}."),
        )
        stays = Content("  It begins at step 0; this one stays.")
        new = Item("new", Content("Build a new run from its config"), stays)
        ways = [(on, lambda: self.go_on(run, change.settings)), (new, lambda: self.build_from(run))]
        offer(self._screen.app, "Train longer", ways)

    def build_from(self, run: RunFolder) -> None:
        """The form on a copy of the run's config."""
        from engine.session.draft import Draft

        try:
            draft = Draft()
            draft.replace_text(run.read_config())
        except WorkbenchError as problem:
            self._beside.show(problem.full_message, SECONDS)
        else:
            self._screen.app.navigation.build(draft, "method")  # type: ignore[attr-defined]
