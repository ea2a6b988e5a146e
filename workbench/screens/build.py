"""Build: one screen, seven steps, with a title above them, the finding in view and the keys below.

Owns the frame. The draft is the app's; where the person is, and what stands there, is `Steps`; what changes the draft is
`EditPane`; what is found out on the side comes from `Background`. One decision worth knowing: after every change everything
is made anew from the draft (about two milliseconds), so no two parts of the screen can disagree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import Screen

from engine.errors import redact, visible
from engine.hardware import machine_text
from workbench.actions import bindings
from workbench.messages import EditWanted, FactsArrived, FieldChosen
from workbench.panels.bars import FindingLine, KeyLine, TitleBar
from workbench.panels.form import FormPane
from workbench.screens.background import Background
from workbench.screens.editing import EditPane
from workbench.screens.pages import LAUNCH, QUEUE
from workbench.screens.replacing import take_recipe, take_unsaved
from workbench.screens.steps import Steps

if TYPE_CHECKING:
    from engine.run.store import RunFolder
    from workbench.app import WorkbenchApp
    from workbench.screens.first_row import FirstRow

WIDE = 110
ROOMY = 160
"""From so many columns the first row stands between form and right column."""
NARROW = 72  # below this a row of the form has no room for its value beside the right column
EDIT_KEYS = {
    "text": [("enter", "keep"), ("esc", "leave as it was"), ("^u", "clear")],
    "choice": [("↑↓", "move"), ("enter", "choose"), ("esc", "leave as it was")],
}


class BuildScreen(Screen[None]):
    """The seven steps."""

    app: WorkbenchApp

    NAME = "build"
    BINDINGS: ClassVar[list[BindingType]] = bindings("build")
    AUTO_FOCUS = "#form"

    def __init__(self, step: str = "goal") -> None:
        super().__init__()
        self._first = step
        self._row: FirstRow | None = None

    # Frame

    def compose(self) -> ComposeResult:
        """Title, then the step, then finding and keys; filled before the first paint."""
        self.background = Background(self, self.app, self.reload)
        self.session = self.background.session
        self.draft = self.session.draft
        self.title_bar, self.steps = TitleBar(), Steps(self.background, self._first)
        self.finding_line, self.keys = FindingLine(), KeyLine("build")
        self.pane = self.steps.pane
        self.draw()
        yield self.title_bar
        yield self.steps
        with Vertical(id="foot"):
            yield self.finding_line
            yield self.keys

    def on_mount(self) -> None:
        """What takes longer begins after the first paint."""
        self.watch(self.pane, "editor", lambda kind: self.keys.use(EDIT_KEYS.get(kind, self.keys.usual)))
        self.call_after_refresh(self.background.start)

    def on_screen_resume(self) -> None:
        """Back from a run, it may have ended."""
        self.background.count_again()

    def on_unmount(self) -> None:
        """Open questions are given up."""
        self.session.close()

    def on_resize(self, event: events.Resize) -> None:
        """More room for names and words where there is more; where there is little, `z` brings the right column for the rail."""
        self.set_class(event.size.width >= WIDE, "wide")
        self.set_class(event.size.width < NARROW, "narrow")
        roomy = event.size.width >= ROOMY
        self.set_class(roomy, "roomy")
        if roomy and self._row is None:
            from workbench.screens.first_row import FirstRow  # what it imports is not needed where it has no room

            self._row = FirstRow(self.draft, self.app.inspector)
            self.steps.mount(self._row, before="#side")
            self.draw()

    def draw(self, key: str | None = None) -> None:
        """Make everything from the draft."""
        draft = self.draft
        self.set_class(self.steps.step == "review", "alone")
        self.set_class(self.steps.step == "goal", "goal")
        self.steps.draw(key)
        self.draw_foot()
        # On Goal nothing is read yet, and a narrow window has no room for the first row.
        if self._row is not None and self.has_class("roomy") and self.steps.step != "goal":
            self._row.follow()
        new = f"new config, from recipe {draft.recipe}" if draft.recipe else "new config"
        machine = machine_text(draft.facts.machine) if draft.facts.machine else ""
        self.title_bar.show(draft.path.name if draft.path else new, draft.dirty, machine, self.background.activity)

    @on(FieldChosen)
    @on(FormPane.Typed)
    def draw_foot(self) -> None:
        """The finding nearest to the person; while something is typed no letter is a key, so it offers none."""
        findings, typing = self.pane.findings, self.pane.typed is not None
        first = next(iter(self.steps.nearest(findings)), None)
        shown = replace(first, fix=None) if first is not None and typing else first
        self.finding_line.show(shown, max(0, len(findings) - 1), keys=not typing)

    @on(Steps.Moved)
    def reload(self) -> None:
        """Look again at what the draft names, and draw."""
        self.background.refresh(self.steps.step)
        self.draw()

    @on(FactsArrived)
    def _learned(self, event: FactsArrived) -> None:
        if event.what == "kept" and isinstance(event.facts, Exception):
            self.pane.report(
                f"What is not saved cannot be kept aside here ({event.facts}); w saves it to a file.", bad=True
            )
        self.background.learn(event.what, event.facts)
        self.reload()

    @on(EditPane.Changed)
    def _changed(self, event: EditPane.Changed) -> None:
        """Look again, draw it, and keep what no file holds."""
        if event.edited:
            self.background.refresh(self.steps.step)
            self.background.keep()
        self.draw()

    @on(EditPane.Report)
    def _reported(self, event: EditPane.Report) -> None:
        self.finding_line.show_message(visible(redact(event.text)), bad=event.bad)

    def on_key(self) -> None:
        """What was said in passing has been read."""
        self.finding_line.clear_message()

    # Keys

    def action_steps(self, what: str) -> None:
        """To another step, row or finding, more rows, or less beside them."""
        self.steps.act(what)
        self.draw_foot()

    def action_draft(self, what: str) -> None:
        """Something with the draft."""
        self.pane.act(what)

    def action_preview(self) -> None:
        """The tokens."""
        from workbench.screens.preview import PreviewScreen

        self.app.push_screen(PreviewScreen(self.draft, self.app.inspector))

    def action_columns(self) -> None:
        """Which column holds which part."""
        from workbench.screens.columns import ask_columns

        ask_columns(self, self.draft, lambda kept: self.reload() if kept else None, self.session.edit)

    def action_count(self) -> None:
        """Stop counting the rows, or count them after all."""
        if self.session.facts.stop_counting():
            self.finding_line.show_message("The rows are not counted; c counts them.")
        else:
            self.session.facts.count_again()
        self.reload()

    # What is no setting

    @on(EditWanted)
    def _wanted(self, event: EditWanted) -> None:
        what, _, which = event.row.key.partition(":")
        if what in (LAUNCH, QUEUE):
            self.action_launch(queue=what == QUEUE)
        elif what == "unsaved":
            take_unsaved(self.pane, self.background.left, int(which))
        elif what == "recipe":
            take_recipe(self.pane, which, then=lambda: self.steps.act("on"))

    def action_launch(self, queue: bool = False) -> None:
        """Start the run, or queue it; what is wrong is shown instead when something is."""

        def then(run: RunFolder | None) -> None:
            from workbench.screens.monitor import MonitorScreen

            self.draw() if run is None else self.app.push_screen(MonitorScreen(run))

        self.steps.act("launch")
        if self.session.errors:
            self.steps.act("findings")
        elif not self.background.starting:
            self.background.launch(then, queue=queue)
            self.draw()
