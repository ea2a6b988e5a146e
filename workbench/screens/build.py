"""Build: one screen, seven steps. The rail at the left, the form in the middle, explanation and consequences at right.

Owns the current step, the level and what the panels show. The draft is the app's; a page's rows are made by `pages`;
what is found out on the side comes from `Background`. One decision worth knowing: after every change everything is
made anew from the draft (about two milliseconds), so no two parts of the screen can disagree.
"""

from __future__ import annotations

import copy
import os
import shlex
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from engine.config.files import put
from engine.config.findings import RANK, Finding
from engine.config.meaning import Unmeant, meaning
from engine.config.recipes import recipe_text
from engine.config.schema import FieldSpec, effective, fields, read
from engine.config.steps import GOALS, STEPS, step_of_path
from engine.errors import WorkbenchError, redact, visible
from engine.memory.estimate import estimate
from workbench.actions import bindings
from workbench.messages import EditWanted, FactsArrived, FieldChosen
from workbench.panels.bars import FindingLine, KeyLine, TitleBar
from workbench.panels.consequences import Consequences
from workbench.panels.explain import Explain
from workbench.panels.fields import as_typed, findings_at, options_of, plain
from workbench.panels.form import Form, FormPane, Row
from workbench.panels.rail import Rail, Stop
from workbench.screens.background import Background
from workbench.screens.pages import LAUNCH, LEVELS, View, machine_words, page

if TYPE_CHECKING:
    from engine.config.draft import Draft
    from workbench.app import WorkbenchApp

WIDE = 110
EDIT_KEYS = {
    "text": [("enter", "keep"), ("esc", "leave as it was"), ("^u", "clear")],
    "choice": [("↑↓", "move"), ("enter", "choose"), ("esc", "leave as it was")],
}


class BuildScreen(Screen[None]):
    """The seven steps."""

    NAME = "build"
    BINDINGS: ClassVar[list[BindingType]] = bindings("build")
    AUTO_FOCUS = "#form"
    app: WorkbenchApp

    def __init__(self, step: str = "goal") -> None:
        super().__init__()
        self._at = next(index for index, each in enumerate(STEPS) if each.id == step)
        self._visited = {self._at}
        self._level = "basic"
        self._focus: dict[str, str] = {}
        self._estimate: Any = None
        self._before: Any = None
        self._seen: tuple[int, Any] = (-1, None)
        self._live: tuple[Finding, ...] | None = None
        self._activity = "idle"
        self._starting = False
        self._problem = ""

    # Frame

    @property
    def draft(self) -> Draft:
        """The config being built."""
        return self.app.draft

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
        self.background.stop()

    def on_resize(self, event: events.Resize) -> None:
        """More room for names and words where there is more room."""
        self.set_class(event.size.width >= WIDE, "wide")

    # Drawing

    def view(self) -> View:
        """All that a page may show, as it is now."""
        draft = self.draft
        return View(
            draft=draft,
            level=self._level,
            effective={each.path: each for each in effective(draft.config, draft.facts)},
            estimate=self._estimate,
            looks=self.background.looks,
            tokenizer=self.background.tokenizer,
            asking=self.background.asking,
            trouble=self.background.trouble,
            runs_dir=self.app.runs_dir,
            logout=self.background.logout,
            machine=draft.facts.machine,
            problem=self._problem,
            starting=self._starting,
        )

    def draw(self, key: str | None = None, *, edited: bool = False) -> None:
        """Make everything from the draft; `edited` says that the person changed it just now."""
        draft = self.draft
        now = (draft.version, draft.facts)
        if now != self._seen:
            self._before = self._estimate if edited else None
            self._estimate = estimate(draft.config, draft.facts)
            self._seen = now
        view = self.view()
        self.pane.form.show(page(self.step, view), key or self._focus.get(self.step))
        self.set_class(self.step == "review", "alone")
        self._draw_rail()
        self.consequences.show(self._estimate, self._before)
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

    def _draw_rail(self) -> None:
        worst: dict[str, str] = {}
        totals: dict[str, int] = {}
        for finding in self.draft.findings:
            step = step_of_path(finding.path)
            totals[finding.severity] = totals.get(finding.severity, 0) + 1
            if RANK[finding.severity] < RANK.get(worst.get(step, ""), 9):
                worst[step] = finding.severity
        stops = tuple(
            Stop(each.id, each.title, worst.get(each.id) or ("done" if self._is_done(index) else "open"))
            for index, each in enumerate(STEPS)
        )
        self.rail.show(stops, self._at, totals)

    def _is_done(self, index: int) -> bool:
        return index in self._visited and index != self._at and STEPS[index].id != "launch"

    def _draw_focus(self, view: View) -> None:
        row = self.pane.form.row
        spec = fields.get(row.key) if row is not None else None
        if row is not None and row.key:
            self._focus[self.step] = row.key
        if spec is not None:
            self.explain.show(spec, view.effective.get(spec.path))
        elif row is not None and row.key.startswith("recipe:"):
            goal = next((goal for goal in GOALS if goal.recipe == row.key.removeprefix("recipe:")), None)
            self.explain.say(row.label, [goal.note if goal else "", "", "Enter takes this recipe; u takes it back."])
        else:
            self.explain.say(STEPS[self._at].title, [STEPS[self._at].question])
        found = self.in_view()
        self.finding_line.show(found[0] if found else None, max(0, len(self.draft.findings) - 1))

    def in_view(self) -> list[Finding]:
        """The findings nearest to where the person is: of the row, of the step, of all."""
        findings = self._live if self._live is not None else self.draft.findings
        row = self.pane.form.row
        mine = findings_at(row.key, findings) if row is not None and row.key else []
        here = [finding for finding in findings if step_of_path(finding.path) == self.step]
        return mine or sorted(here or findings, key=lambda finding: RANK[finding.severity])

    @on(FieldChosen)
    def _chosen(self) -> None:
        self._draw_focus(self.view())

    @on(FactsArrived)
    def _learned(self, event: FactsArrived) -> None:
        self.background.take(event)
        if event.what == "running":
            self._activity = event.facts
        self.draw()
        self.background.look()

    # Moving between steps

    def go(self, index: int, key: str | None = None) -> None:
        """To a step; the row in focus there is the one of last time."""
        if not 0 <= index < len(STEPS):
            return
        self.pane.close()
        self._live = None
        self._visited |= {self._at, index}
        self._at = index
        self.pane.form.at = 0
        self.pane.form.top = 0
        self.draw(key)
        self.pane.form.focus()
        if key or self._focus.get(self.step):
            self.pane.form.go_to(key or self._focus[self.step])
        self.background.look()

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

    # Editing

    @on(EditWanted)
    def _edit(self, event: EditWanted) -> None:
        row: Row = event.row
        if row.key == LAUNCH:
            self.action_launch()
        elif row.key.startswith("recipe:"):
            self._take_recipe(row.key.removeprefix("recipe:"))
        else:
            spec = fields.get(row.key)
            if spec is not None:
                self._edit_setting(spec, row)

    def action_edit(self) -> None:
        """Edit the setting in focus."""
        self.pane.form.action_enter()

    def _edit_setting(self, spec: FieldSpec, row: Row) -> None:
        draft = self.draft
        entry = row.key.count(".") == 3
        written = draft.value(row.key)
        value = (written if written is not None else spec.default) if entry else spec.value(draft.config)
        if row.key in draft.reading.invalid:
            value = written
        if spec.control == "bool":
            self.change(row.key, not value)
        elif spec.control == "choice":
            self.keys.use(EDIT_KEYS["choice"])
            self.pane.edit_choice(row, options_of(spec), value)
        elif spec.control in ("sources", "prompts"):
            self._edit_list(spec, row.key)
        else:
            suggester = None
            if spec.control == "path" or spec is fields.model.name:
                from workbench.screens.listing import PathSuggester

                suggester = PathSuggester(self.base)
            self.keys.use(EDIT_KEYS["text"])
            self.pane.edit_text(row, as_typed(spec, value), suggester)

    def _edit_list(self, spec: FieldSpec, path: str) -> None:
        from workbench.screens.listing import ListScreen, PathSuggester

        written = self.draft.value(path)
        old = list(written) if isinstance(written, list) else [plain(each) for each in spec.value(self.draft.config)]
        texts = [str(each.get("path", "")) if isinstance(each, dict) else str(each) for each in old]
        sources = spec.control == "sources"

        def keep(entries: list[tuple[int | None, str]] | None) -> None:
            if entries is None:
                return
            made: list[Any] = []
            for place, words in entries:
                if not sources:
                    made.append(words)
                else:
                    before = old[place] if place is not None and isinstance(old[place], dict) else {}
                    made.append({**before, "path": words})
            self.change(path, made) if made else self.change(path, None, unset=True)

        what = "path of a file, or builtin/dates" if sources else "a prompt"
        suggester = PathSuggester(self.base) if sources else None
        self.app.push_screen(ListScreen(spec.title, texts, what=what, suggester=suggester), keep)

    @property
    def base(self) -> Path:
        """The folder that relative paths of this config start from."""
        return self.draft.path.parent if self.draft.path else Path.cwd()

    @on(FormPane.Typed)
    def _typed(self, event: FormPane.Typed) -> None:
        """Every key press is read as if it were kept; the finding stands under the row at once."""
        spec = fields.get(event.key)
        if spec is None:
            return
        draft = self.draft
        mapping = copy.deepcopy(draft.mapping)
        if event.text.strip():
            meant = meaning(spec, event.text)
            put(mapping, event.key, event.text if isinstance(meant, Unmeant) else meant)
            reading = read(mapping, draft.facts)
            self._live = tuple(finding for finding in reading.findings if finding.path == event.key)
        else:
            self._live = ()
        self.pane.note(
            tuple(
                (visible(finding.text), {"error": "bad", "warning": "warn"}.get(finding.severity, "hint"))
                for finding in self._live
            )
        )
        self.finding_line.show(replace(self._live[0], fix=None) if self._live else None)

    @on(FormPane.Ended)
    def _ended(self, event: FormPane.Ended) -> None:
        self.pane.close()
        self.keys.use(self.keys.usual)
        self._live = None
        if event.answer is None:
            self.draw()
            return
        key, value = event.answer
        unset = isinstance(value, str) and not value.strip()
        spec = fields.get(key)
        if spec is not None and value == as_typed(spec, self.draft.value(key)) and not unset:
            self.draw()
        else:
            self.change(key, value, unset=unset)

    def change(self, path: str, value: Any, *, unset: bool = False) -> None:
        """Write one setting, or take it out."""
        if unset:
            self.draft.unset(path)
        else:
            self.draft.set(path, value)
        self.draw(edited=True)
        self.background.look()

    def _take_recipe(self, name: str) -> None:
        draft = self.draft
        draft.replace_text(recipe_text(name))
        draft.recipe = name
        self.draw(edited=True)
        self.background.look()
        self.go(self._at + 1)

    def action_default(self) -> None:
        """Back to the default."""
        row = self.pane.form.row
        if row is not None and row.key in self.draft.given | self.draft.reading.invalid:
            self.change(row.key, None, unset=True)

    def action_fix(self) -> None:
        """Apply the fix in view."""
        found = next((finding for finding in self.in_view() if finding.fix is not None), None)
        if found is None:
            self.tell("Nothing here has a fix of its own.")
        else:
            self.apply(found)

    def apply(self, finding: Finding) -> None:
        """Apply a finding's fix."""
        assert finding.fix is not None
        self.draft.apply(finding.fix)
        self.draw(edited=True)
        self.background.look()

    def action_undo(self) -> None:
        """Take back."""
        if self.draft.undo():
            self.draw(edited=True)
            self.background.look()
        else:
            self.tell("Nothing to take back.")

    def action_redo(self) -> None:
        """Do again."""
        if self.draft.redo():
            self.draw(edited=True)
            self.background.look()
        else:
            self.tell("Nothing to do again.")

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
            if path is not None and fields[path].applies(self.draft.config):
                self.jump(path)
            elif path is not None:
                self.explain.show(fields[path], None)

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

    def tell(self, words: str, *, bad: bool = False) -> None:
        """A sentence in the place of the finding, until the next key."""
        self.finding_line.tell(visible(redact(words)), bad=bad)

    def on_key(self) -> None:
        """What was said in passing has been read."""
        self.finding_line.hush()

    # The file

    def action_yaml(self) -> None:
        """The YAML in the person's editor; the same findings afterwards."""
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        handle, name = tempfile.mkstemp(suffix=".yaml", prefix="workbench-")
        place = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.draft.text())
            with self.app.suspend():
                code = subprocess.run([*editor, name]).returncode
            if code:
                self.tell(f"{editor[0]} ended with {code}; the config is as it was.", bad=True)
                return
            self.draft.replace_text(place.read_text(encoding="utf-8"))
        except (WorkbenchError, OSError, UnicodeDecodeError) as problem:
            self.tell(f"The config is as it was: {problem}", bad=True)
        finally:
            place.unlink(missing_ok=True)
        self.app.refresh()
        self.draw(edited=True)
        self.background.look()

    def action_write(self) -> None:
        """Save to a file, asking for its name."""
        from workbench.screens.dialog import Ask
        from workbench.screens.leave import suggested_name

        def save(name: str | None) -> None:
            if not name or not name.strip():
                return
            try:
                place = self.draft.save(Path(name.strip()).expanduser())
            except (WorkbenchError, OSError) as problem:
                self.tell(str(problem), bad=True)
                return
            self.draw()
            self.tell(f"Saved in {place}.")

        self.app.push_screen(Ask("Save the config as", suggested_name(self.draft)), save)

    # The run

    def action_launch(self) -> None:
        """Start the run; what is wrong is shown instead when something is."""
        self.go(len(STEPS) - 1)
        errors = [finding for finding in self.draft.findings if finding.severity == "error"]
        if errors:
            self.action_findings()
        elif not self._starting:
            self._starting, self._problem = True, ""
            self.draw()
            self.background.launch(self._started)

    def _started(self, run: Any, problem: str) -> None:
        self._starting = False
        self._problem = visible(redact(problem))
        if problem:
            self.draw()
            return
        from workbench.screens.monitor import MonitorScreen

        self.app.push_screen(MonitorScreen(run))
