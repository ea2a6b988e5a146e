"""Build: one screen, seven steps, with a title above them, the finding in view and the keys below.

Owns the frame and what the keys of the screen do. The draft is the app's; where the person is, and what stands there, is
`Steps`; what is found out on the side comes from `Background`. One decision worth knowing: after every change everything
is made anew from the draft (about two milliseconds), so no two parts of the screen can disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical

from engine.config.findings import Finding
from engine.config.steps import STEPS
from engine.config.tree import fields
from engine.session.pages import machine_words
from workbench.actions import bindings
from workbench.messages import EditWanted, FactsArrived
from workbench.panels.bars import FindingLine, KeyLine, TitleBar
from workbench.screens.background import Background
from workbench.screens.editing import EditingScreen
from workbench.screens.pages import LAUNCH, QUEUE
from workbench.screens.replacing import take_recipe, take_unsaved
from workbench.screens.steps import Steps

if TYPE_CHECKING:
    from engine.run.store import RunFolder
    from workbench.screens.row_beside import RowBeside

WIDE = 110
ROOMY = 160
"""From so many columns the first row stands between form and right column."""
NARROW = 72  # below this a row of the form has no room for its value beside the right column


class BuildScreen(EditingScreen):
    """The seven steps."""

    NAME = "build"
    BINDINGS: ClassVar[list[BindingType]] = bindings("build")
    AUTO_FOCUS = "#form"

    def __init__(self, step: str = "goal") -> None:
        super().__init__()
        self._first = step
        self._row: RowBeside | None = None

    # Frame

    @property
    def step(self) -> str:
        """The id of the step on screen."""
        return self.steps.step

    def compose(self) -> ComposeResult:
        """Title, then the step, then finding and keys; filled before the first paint."""
        self.background = Background(self, self.app, self.look)
        self.session = self.background.session
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
        self.call_after_refresh(self.background.start)

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
            from workbench.screens.row_beside import RowBeside  # what it imports is not needed where it has no room

            self._row = RowBeside(self.draft, self.app.inspector)
            self.steps.mount(self._row, before="#side")
            self._follow()

    def draw(self, key: str | None = None) -> None:
        """Make everything from the draft."""
        draft = self.draft
        self.set_class(self.step == "review", "alone")
        self.set_class(self.step == "goal", "goal")
        self.steps.draw(key)
        self.draw_foot()
        self._follow()
        new = f"new config, from recipe {draft.recipe}" if draft.recipe else "new config"
        machine = machine_words(draft.facts.machine) if draft.facts.machine else ""
        self.title_bar.show(draft.path.name if draft.path else new, draft.dirty, machine, self.background.activity)

    @on(Steps.Moved)
    def look(self) -> None:
        """Look again at what the draft names, and draw."""
        self.background.look(self.step)
        self.draw()

    def _follow(self) -> None:
        """The row beside the form is that of the draft; on Goal nothing is read yet, and a narrow window has no room for it."""
        if self._row is not None and self.has_class("roomy") and self.step != "goal":
            self._row.follow()

    @on(FactsArrived)
    def _learned(self, event: FactsArrived) -> None:
        if event.what == "kept" and isinstance(event.facts, Exception):
            self.tell(f"What is not saved cannot be kept aside here ({event.facts}); w saves it to a file.", bad=True)
        self.background.learn(event.what, event.facts)
        self.look()

    def on_key(self) -> None:
        """What was said in passing has been read."""
        self.finding_line.hush()

    # Moving between steps

    def action_turn(self, by: int) -> None:
        """So many steps on, or back."""
        self.steps.turn(by)

    def action_step(self, step: str) -> None:
        """To a step by its id."""
        self.steps.go(next(index for index, each in enumerate(STEPS) if each.id == step))

    def action_to_form(self) -> None:
        """From the rail or the explanation back to the form."""
        self.steps.to_form()

    # Looking

    def action_levels(self) -> None:
        """Basic, advanced, expert, basic."""
        self.steps.more()
        self.draw()

    def action_fold(self) -> None:
        """Fold the right column."""
        self.toggle_class("folded")

    def action_find(self) -> None:
        """Find a setting or a term."""
        from workbench.screens.dialog import Pick
        from workbench.screens.find import find_items

        def found(path: str | None) -> None:
            if path is None:
                return
            if not path.startswith("term:") and fields[path].applies(self.draft.config):
                self.steps.jump(path)
            else:
                self.steps.look_up(path)

        self.app.push_screen(Pick("Find a setting or a term", find_items(self.draft.config), filtered=True), found)

    def action_findings(self) -> None:
        """All findings."""
        from workbench.screens.findings import FindingsScreen

        def chosen(answer: tuple[str, Finding] | None) -> None:
            if answer is None:
                return
            what, finding = answer
            if what == "fix":
                self.apply(finding)
                self.action_findings()
            else:
                self.steps.jump(finding.path)

        self.app.push_screen(FindingsScreen(self.draft.findings), chosen)

    def action_preview(self) -> None:
        """The tokens."""
        from workbench.screens.preview import PreviewScreen

        self.app.push_screen(PreviewScreen(self.draft, self.app.inspector))

    def action_columns(self) -> None:
        """Which column holds which part."""
        from workbench.screens.columns import ask_columns

        ask_columns(self, self.draft, lambda kept: self.look() if kept else None, self.session.edit)

    def action_count(self) -> None:
        """Stop counting the rows, or count them after all."""
        if self.session.facts.stop_counting():
            self.tell("The rows are not counted; c counts them.")
        else:
            self.session.facts.count_again()
        self.look()

    # What is no setting

    @on(EditWanted)
    def _wanted(self, event: EditWanted) -> None:
        what, _, which = event.row.key.partition(":")
        if what in (LAUNCH, QUEUE):
            self.action_launch(queue=what == QUEUE)
        elif what == "unsaved":
            take_unsaved(self, int(which))
        elif what == "recipe":
            take_recipe(self, which)

    def action_launch(self, queue: bool = False) -> None:
        """Start the run, or queue it; what is wrong is shown instead when something is."""

        def then(run: RunFolder | None) -> None:
            from workbench.screens.monitor import MonitorScreen

            self.draw() if run is None else self.app.push_screen(MonitorScreen(run))

        self.action_step("launch")
        if self.session.errors:
            self.action_findings()
        elif not self.background.starting:
            self.background.launch(then, queue=queue)
            self.draw()
