"""Build: one screen, seven steps. The rail at the left, the form in the middle, explanation and consequences at right.

Owns the current step, the level and what the panels show. The draft is the app's; a page's rows are made by `pages`;
what is found out on the side comes from `Background`. One decision worth knowing: after every change everything is
made anew from the draft (about two milliseconds), so no two parts of the screen can disagree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical

from engine.config.findings import RANK, Finding
from engine.config.steps import STEPS, step_of_path
from engine.config.tree import fields
from engine.errors import redact, visible
from engine.session.build import standings
from engine.session.pages import machine_words
from workbench.actions import bindings
from workbench.messages import FactsArrived, FieldChosen
from workbench.panels.bars import FindingLine, KeyLine, TitleBar
from workbench.panels.consequences import Consequences
from workbench.panels.explain import Explain
from workbench.panels.fields import findings_at
from workbench.panels.form import Form, FormPane
from workbench.panels.rail import Rail, Stop
from workbench.screens.background import Background
from workbench.screens.editing import EditingScreen
from workbench.screens.explaining import explain_found, explain_kind, explain_row
from workbench.screens.pages import LEVELS, View, page

WIDE = 110
NARROW = 72  # below this a row of the form has no room for its value beside the right column


class BuildScreen(EditingScreen):
    """The seven steps."""

    NAME = "build"
    BINDINGS: ClassVar[list[BindingType]] = bindings("build")
    AUTO_FOCUS = "#form"

    def __init__(self, step: str = "goal") -> None:
        super().__init__()
        self._at = next(index for index, each in enumerate(STEPS) if each.id == step)
        self._visited = {self._at}
        self._level = "basic"
        self._focus: dict[str, str] = {}
        self._drawn = ""
        """The step whose rows the form holds."""
        self._activity = "idle"
        self._logout = ""
        self._starting = False
        self._problem = ""
        self._aside: str | None = None
        """What was found by `/` and is no row here: explained until the cursor moves."""
        self.left = []

    # Frame

    @property
    def step(self) -> str:
        """The id of the step on screen."""
        return STEPS[self._at].id

    def compose(self) -> ComposeResult:
        """Title, then rail, form and side, then finding and keys; filled before the first paint."""
        self.title_bar, self.rail, self.pane = TitleBar(), Rail(), FormPane()
        self.explain, self.consequences = Explain(), Consequences()
        self.finding_line, self.keys = FindingLine(), KeyLine("build")
        self.background = Background(self)
        self.session = self.background.session
        self.draw()
        yield self.title_bar
        with Horizontal(id="body"):
            yield self.rail
            yield self.pane
            with Vertical(id="side"):
                yield self.explain
                yield self.consequences
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

    # Drawing

    def view(self) -> View:
        """All that a page may show, as it is now."""
        return View(
            self.session,
            self._level,
            self.session.becomes,
            logout=self._logout,
            problem=self._problem,
            starting=self._starting,
            left=tuple(self.left),
        )

    def draw(self, key: str | None = None) -> None:
        """Make everything from the draft."""
        draft = self.draft
        view = self.view()
        self.read_typed()
        row = self.pane.form.row
        if self._drawn == self.step and row is not None and row.key:
            self._focus[self.step] = row.key  # a key that moved the cursor just now may not have been heard of yet
        self.pane.form.show(page(self.step, view), key or self._focus.get(self.step))
        self.note_typed()
        self._drawn = self.step
        self.set_class(self.step == "review", "alone")
        self._draw_rail()
        self.consequences.show(self.session.consequences)
        self._draw_focus(view)
        file = (
            draft.path.name
            if draft.path
            else f"new config, from recipe {draft.recipe}"
            if draft.recipe
            else "new config"
        )
        machine = machine_words(draft.facts.machine) if draft.facts.machine else ""
        self.title_bar.show(file, draft.dirty, machine, self._activity)

    def draw_typed(self) -> None:
        """Rail, note and foot from what is being typed; nothing else follows from it before it is kept."""
        self.read_typed()
        self.note_typed()
        self._draw_rail()
        self._draw_foot()

    @property
    def found(self) -> tuple[Finding, ...]:
        """The findings that the screen shows: of what is being typed, else of the draft."""
        return self.live if self.live is not None else self.draft.findings

    def _draw_rail(self) -> None:
        stops = tuple(
            Stop(each.id, each.title, now.worst or ("done" if self._is_done(index) else "open"))
            for index, (each, now) in enumerate(zip(STEPS, standings(self.found), strict=True))
        )
        totals = dict(Counter[str](finding.severity for finding in self.found))
        self.rail.show(stops, self._at, totals, self.session.uncounted)

    def _is_done(self, index: int) -> bool:
        return index in self._visited and index != self._at and STEPS[index].id != "launch"

    def _draw_focus(self, view: View) -> None:
        row = self.pane.form.row
        if row is not None and row.key:
            self._focus[self.step] = row.key
        # Nothing follows from what is not taken yet, and its words need the room.
        recipe = row.key.removeprefix("recipe:") if row is not None and row.key.startswith("recipe:") else None
        self.consequences.display = not self._considering and recipe in (None, self.draft.recipe)
        if self._aside is not None and not self._considering:
            explain_found(self.explain, self._aside)
        elif not self._considering:  # else the kind under the cursor of the open list is explained
            explain_row(self.explain, row, self.step, view)
        self._draw_foot()

    def _draw_foot(self) -> None:
        """The finding nearest to the person; while something is typed no letter is a key, so it offers none."""
        found, others = self.in_view(), max(0, len(self.found) - 1)
        first = found[0] if found else None
        typing = self.live is not None
        self.finding_line.show(replace(first, fix=None) if first and typing else first, others, keys=not typing)

    @property
    def _considering(self) -> bool:
        """The list of methods or adapters is open."""
        return (self.pane.editing or "").endswith(".kind")

    @on(FormPane.Considered)
    def _considered(self, event: FormPane.Considered) -> None:
        """The kind under the cursor of the open list is explained before it is taken."""
        section, _, name = event.key.partition(".")
        if name == "kind" and self.pane.editing == event.key:
            self.consequences.display = False  # the words need the room, and nothing follows before one is taken
            explain_kind(self.explain, section, event.value)

    def in_view(self) -> list[Finding]:
        """The findings nearest to where the person is: of the row, of the step, of all."""
        findings = self.found
        row = self.pane.form.row
        mine = findings_at(row.key, findings) if row is not None and row.key else []
        here = [finding for finding in findings if step_of_path(finding.path) == self.step]
        return mine or sorted(here or findings, key=lambda finding: RANK[finding.severity])

    @on(FieldChosen)
    def _chosen(self) -> None:
        self._aside = None
        self._draw_focus(self.view())

    @on(FactsArrived)
    def _learned(self, event: FactsArrived) -> None:
        if event.what == "logout" and isinstance(event.facts, tuple):
            self._logout = event.facts[1]
        elif event.what == "left" and not isinstance(event.facts, Exception):
            self.left = event.facts
        elif event.what == "kept" and isinstance(event.facts, Exception):
            self.tell(f"What is not saved cannot be kept aside here ({event.facts}); w saves it to a file.", bad=True)
        elif event.what == "running":
            self._activity = event.facts
        self.look()

    # Moving between steps

    def go(self, index: int, key: str | None = None) -> None:
        """To a step; the row in focus there is the one of last time."""
        if not 0 <= index < len(STEPS):
            return
        self.pane.close()
        self.live = self._typing = self._aside = None
        self._visited |= {self._at, index}
        self._at = index
        self._drawn = ""
        self.pane.form.at = 0
        self.pane.form.top = 0
        self.draw(key)
        self.pane.form.focus()
        if key or self._focus.get(self.step):
            self.pane.form.go_to(key or self._focus[self.step])
        self.look()

    def forward(self) -> None:
        """On to the next step."""
        self.go(self._at + 1)

    def look(self) -> None:
        """Look again at what the draft names, and draw."""
        self.background.look()
        self.draw()

    def keep(self) -> None:
        """Keep what no file holds, soon."""
        self.background.keep()

    def action_next_step(self) -> None:
        """Next step."""
        self.go(self._at + 1)

    def action_previous_step(self) -> None:
        """Previous step."""
        self.go(self._at - 1)

    def action_step(self, step: str) -> None:
        """To a step by its id."""
        self.go(next(index for index, each in enumerate(STEPS) if each.id == step))

    @on(Rail.Chosen)
    def _rail_chosen(self, event: Rail.Chosen) -> None:
        self.go(event.index)
        self.rail.focus()

    @on(Rail.Entered)
    def _rail_entered(self) -> None:
        self.pane.form.focus()

    @on(Form.Left)
    def _form_left(self) -> None:
        self.rail.focus()

    def action_to_form(self) -> None:
        """From the rail or the explanation back to the form."""
        self.pane.form.focus()

    # Looking

    def action_levels(self) -> None:
        """Basic, advanced, expert, basic."""
        self._level = LEVELS[(LEVELS.index(self._level) + 1) % len(LEVELS)]
        self.draw()

    def action_fold(self) -> None:
        """Fold the right column."""
        self.toggle_class("folded")

    def jump(self, path: str) -> None:
        """To the row of a setting, raising the level if it is hidden."""
        step = step_of_path(path)
        for level in LEVELS[LEVELS.index(self._level) :]:
            self._level = level
            self.go(next(index for index, each in enumerate(STEPS) if each.id == step), path)
            form = self.pane.form
            for key in (path, ".".join(path.split(".")[:2])):
                if form.go_to(key):
                    self.draw(key)
                    return

    def action_find(self) -> None:
        """Find a setting or a term."""
        from workbench.screens.dialog import Pick
        from workbench.screens.find import find_items

        def found(path: str | None) -> None:
            if path is not None and path.startswith("term:"):
                self._aside = path
                self.draw()
            elif path is not None and fields[path].applies(self.draft.config):
                self.jump(path)
            elif path is not None:
                self._aside = path
                self.draw()

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
                self.jump(finding.path)

        self.app.push_screen(FindingsScreen(self.draft.findings), chosen)

    def action_preview(self) -> None:
        """The tokens."""
        from workbench.screens.preview import PreviewScreen

        self.app.push_screen(PreviewScreen(self.draft, self.app.inspector))

    def on_key(self) -> None:
        """What was said in passing has been read."""
        self.finding_line.hush()

    # The run

    def action_launch(self, queue: bool = False) -> None:
        """Start the run, or queue it; what is wrong is shown instead when something is."""
        self.go(len(STEPS) - 1)
        if self.session.errors:
            self.action_findings()
        elif not self._starting:
            self._starting, self._problem = True, ""
            self.draw()
            self.background.launch(self._started, queue=queue)

    def _started(self, run: Any, problem: str) -> None:
        self._starting = False
        self._problem = visible(redact(problem))
        if problem:
            self.draw()
            return
        from workbench.screens.monitor import MonitorScreen

        self.app.push_screen(MonitorScreen(run))
