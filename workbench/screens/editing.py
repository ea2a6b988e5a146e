"""Editing on the build screen: a row's editor, lists, fixes, undo, the YAML in an editor of one's own, saving.

Owns what changes the draft and nothing of how it looks: the build screen draws anew after each change. What is typed is
read at each key press as if it were kept, so that the finding stands under the row before Enter is pressed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.content import Content
from textual.screen import Screen

from engine.config.findings import Finding
from engine.config.text_values import as_typed
from engine.config.tree import FieldSpec, fields
from engine.errors import WorkbenchError, redact, visible
from engine.session.build import BuildSession
from engine.session.draft import Draft
from workbench.messages import EditWanted
from workbench.panels.bars import FindingLine, KeyLine
from workbench.panels.fields import options_of, plain
from workbench.panels.form import FormPane, Row
from workbench.panels.paint import clean
from workbench.screens.dialog import Item, Pick
from workbench.screens.pages import LAUNCH, QUEUE

if TYPE_CHECKING:
    from workbench.app import WorkbenchApp
    from workbench.screens.browse import Browse
    from workbench.unsaved import Kept

EDIT_KEYS = {
    "text": [("enter", "keep"), ("esc", "leave as it was"), ("^u", "clear")],
    "choice": [("↑↓", "move"), ("enter", "choose"), ("esc", "leave as it was")],
}


class EditingScreen(Screen[None]):
    """A screen with a form over the app's draft; subclasses draw."""

    app: WorkbenchApp
    pane: FormPane
    finding_line: FindingLine
    keys: KeyLine
    live: tuple[Finding, ...] | None = None
    """All findings, as they would be if what is being typed were kept; nothing while nothing is."""
    _typing: tuple[str, str] | None = None
    """The setting in the editor, and the text that stands there."""
    left: list[Kept]
    """Configs that earlier windows left unsaved."""
    _not_taken: tuple[str, str] | None = None
    """A config, and the YAML that was written in its place and could not be read."""

    @property
    def draft(self) -> Draft:
        """The config being built."""
        return self.app.draft

    session: BuildSession
    """The draft, what is known about it, what follows from it."""

    @property
    def step(self) -> str:
        """The id of the step on screen."""
        raise NotImplementedError

    def draw(self, key: str | None = None) -> None:
        """Make everything from the draft."""
        raise NotImplementedError

    def draw_typed(self) -> None:
        """Make the findings anew from what is being typed."""
        raise NotImplementedError

    def look(self) -> None:
        """What depends on the draft is to be found out again."""
        raise NotImplementedError

    def forward(self) -> None:
        """On to the next step."""
        raise NotImplementedError

    def in_view(self) -> list[Finding]:
        """The findings nearest to where the person is."""
        raise NotImplementedError

    def action_launch(self, queue: bool = False) -> None:
        """Start the run, or let it wait for a free device."""
        raise NotImplementedError

    def changed(self) -> None:
        """The person changed the draft: look again, and draw it."""
        self.look()
        self.keep()

    def keep(self) -> None:
        """Keep what no file holds, soon: many edits in a row are one write."""
        raise NotImplementedError

    # One row

    @on(EditWanted)
    def _edit(self, event: EditWanted) -> None:
        row: Row = event.row
        if row.key in (LAUNCH, QUEUE):
            self.action_launch(queue=row.key == QUEUE)
        elif row.key.startswith("unsaved:"):
            self._ask_unsaved(int(row.key.removeprefix("unsaved:")))
        elif row.key.startswith("recipe:"):
            self._take_recipe(row.key.removeprefix("recipe:"))
        else:
            spec = fields.of(self.draft.config, row.key)
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
        elif spec.control == "path" and not entry:
            self._browse(spec, row.key, value)
        else:
            self.keys.use(EDIT_KEYS["text"])
            self.pane.edit_text(row, as_typed(value))

    def _browse(self, spec: FieldSpec, path: str, value: Any) -> None:
        """A path or a model, with room for all of it and what there is to pick from."""
        from engine.session.browsing import wanted
        from workbench.screens.browse import Browse

        want, old = wanted(spec), as_typed(value)

        def judge(text: str) -> str:
            return next((each.text for each in self.session.typed(path, text) if each.path == path), "")

        def keep(text: str | None) -> None:
            if text is not None and text != old:
                self.change(path, text, unset=not text)

        recent = self.app.start_list.models if want.what == "model" else tuple
        self.app.push_screen(Browse(spec.title, old, want, base=self.draft.base, recent=recent, judge=judge), keep)

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
        suggester = PathSuggester(self.draft.base) if sources else None
        browse = self._browse_rows(spec) if sources else None
        self.app.push_screen(ListScreen(spec.title, texts, what=what, suggester=suggester, browse=browse), keep)

    def _browse_rows(self, spec: FieldSpec) -> Callable[[str], Browse]:
        """What asks for one source of rows."""
        from engine.session.browsing import wanted
        from workbench.screens.browse import Browse

        return lambda text: Browse(
            spec.title, text, wanted(spec), base=self.draft.base, recent=self.app.start_list.rows
        )

    @on(FormPane.Typed)
    def _typed(self, event: FormPane.Typed) -> None:
        """Every key press is read as if it were kept; the whole screen says at once what would be found then."""
        if fields.of(self.draft.config, event.key) is not None:
            self._typing = (event.key, event.text)
            self.draw_typed()

    def read_typed(self) -> None:
        """Find what would be found if what stands in the editor were kept."""
        if self._typing is None:
            return
        self.live = self.session.typed(*self._typing)

    def note_typed(self) -> None:
        """What is found of the setting in the editor stands under it."""
        if self._typing is not None and self.live is not None:
            styles = {"error": "bad", "warning": "warn"}
            mine = [finding for finding in self.live if finding.path == self._typing[0]]
            self.pane.note(tuple((visible(each.text), styles.get(each.severity, "hint")) for each in mine))

    @on(FormPane.Ended)
    def _ended(self, event: FormPane.Ended) -> None:
        self.pane.close()
        self.keys.use(self.keys.usual)
        self.live = self._typing = None
        if event.answer is None:
            self.draw()
            return
        key, value = event.answer
        unset = isinstance(value, str) and not value.strip()
        spec = fields.of(self.draft.config, key)
        if spec is not None and value == as_typed(self.draft.value(key)) and not unset:
            self.draw()
        else:
            self.change(key, value, unset=unset)

    def change(self, path: str, value: Any, *, unset: bool = False) -> None:
        """Write one setting, or take it out."""
        draft = self.draft
        self.session.edit(lambda: draft.unset(path) if unset else draft.set(path, value))
        self.changed()

    def _take_recipe(self, name: str) -> None:
        """Begin from a ready config. A config of the person's own is never replaced without asking."""
        if not self.session.is_own:
            self._begin_from(name)
            return
        items = [
            Item("keep", Content("Keep my model and data, take the rest from it")),
            Item("replace", Content("Replace all of it, model and data too")),
            Item("stay", Content("Leave it as it is")),
        ]

        def answered(answer: str | None) -> None:
            if answer in ("keep", "replace"):
                self._begin_from(name, keep_own=answer == "keep")
                self.tell("u takes it back; nothing is written to the file before w.")

        self.app.push_screen(Pick(f"{self._called()}: take the ready config {name}?", items), answered)

    def _begin_from(self, name: str, *, keep_own: bool = False) -> None:
        self.session.begin_from(name, keep_own=keep_own)
        self.changed()
        self.forward()

    def _called(self) -> str:
        return clean(self.draft.path.name) if self.draft.path else "This config has its own model or data"

    def _ask_unsaved(self, number: int) -> None:
        """Go on with a config that an earlier window left unsaved; asks where that would replace another of one's own."""
        if not self.session.is_own:
            self._take_unsaved(number)
            return
        items = [
            Item("take", Content("Put what was not saved in its place")),
            Item("stay", Content("Leave it as it is")),
        ]

        def answered(answer: str | None) -> None:
            if answer == "take":
                self._take_unsaved(number)

        self.app.push_screen(Pick(f"{self._called()}: go on with another config?", items), answered)

    def _take_unsaved(self, number: int) -> None:
        """Take that config; undo takes it back."""
        kept = self.left.pop(number)
        draft = self.draft
        try:
            self.session.begin(kept.text, kept.recipe)
        except WorkbenchError as problem:
            self.tell(f"It cannot be read: {problem.message} It lies in {kept.place}.", bad=True)
            return
        if kept.path is not None and kept.path.exists():
            draft.path = kept.path
        self.changed()
        self.tell("The unsaved config is back; w saves it.")

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
        fix = finding.fix
        assert fix is not None
        self.session.edit(lambda: self.draft.apply(fix))
        self.changed()

    def action_undo(self) -> None:
        """Take back."""
        self._step_back(self.draft.undo, "Nothing to take back.")

    def action_redo(self) -> None:
        """Do again."""
        self._step_back(self.draft.redo, "Nothing to do again.")

    def _step_back(self, step: Callable[[], bool], nothing: str) -> None:
        edits = self.draft.edits
        self.session.edit(step)
        if self.draft.edits != edits:
            self.changed()
        else:
            self.tell(nothing)

    # The file

    def action_yaml(self) -> None:
        """The YAML in the person's editor; the same findings afterwards."""
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        handle, name = tempfile.mkstemp(suffix=".yaml", prefix="workbench-")
        place = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self._to_edit())
            with self.app.suspend():
                code = subprocess.run([*editor, name]).returncode
            if code:
                self.tell(f"{editor[0]} ended with {code}; the config is as it was.", bad=True)
                return
            text = place.read_text(encoding="utf-8")
            self._not_taken = (self.draft.text(), text)
            self.session.edit(lambda: self.draft.replace_text(text))
            self._not_taken = None
        except WorkbenchError as problem:
            self.tell(f"Not taken; y opens it again as you left it. {problem.told}", bad=True)
        except (OSError, UnicodeDecodeError) as problem:
            self.tell(f"The config is as it was: {problem}", bad=True)
        finally:
            place.unlink(missing_ok=True)
        self.app.refresh()
        self.changed()

    def _to_edit(self) -> str:
        """The config; or what was written over it last and could not be read, so that no work is lost."""
        text = self.draft.text()
        return self._not_taken[1] if self._not_taken and self._not_taken[0] == text else text

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
            self.app.recent.note(place)
            self.draw()
            self.keep()
            self.tell(f"Saved in {place}.")

        self.app.push_screen(Ask("Save the config as", suggested_name(self.draft)), save)

    def tell(self, words: str, *, bad: bool = False) -> None:
        """A sentence in the place of the finding, until the next key."""
        self.finding_line.tell(visible(redact(words)), bad=bad)
