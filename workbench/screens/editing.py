"""Editing on the build screen: a row's editor, lists, fixes, undo, the YAML in an editor of one's own, saving.

Owns what changes the draft and nothing of how it looks: the build screen draws anew after each change. What is typed is
read at each key press as if it were kept, so that the finding stands under the row before Enter is pressed.
"""

from __future__ import annotations

import copy
import os
import shlex
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.screen import Screen

from engine.config.files import put
from engine.config.findings import Finding
from engine.config.meaning import Unmeant, meaning
from engine.config.recipes import recipe_text
from engine.config.schema import FieldSpec, fields, read
from engine.config.typed import as_typed
from engine.errors import WorkbenchError, redact, visible
from workbench.messages import EditWanted
from workbench.panels.bars import FindingLine, KeyLine
from workbench.panels.fields import options_of, plain
from workbench.panels.form import FormPane, Row
from workbench.screens.pages import LAUNCH

if TYPE_CHECKING:
    from engine.config.draft import Draft
    from workbench.app import WorkbenchApp
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
    """The findings of what is being typed."""
    left: list[Kept]
    """Configs that earlier windows left unsaved."""
    _not_taken: tuple[str, str] | None = None
    """A config, and the YAML that was written in its place and could not be read."""

    @property
    def draft(self) -> Draft:
        """The config being built."""
        return self.app.draft

    @property
    def base(self) -> Path:
        """The folder that relative paths of this config start from."""
        return self.draft.path.parent if self.draft.path else Path.cwd()

    def draw(self, key: str | None = None, *, edited: bool = False) -> None:
        """Make everything from the draft."""
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

    def action_launch(self) -> None:
        """Start the run."""
        raise NotImplementedError

    def changed(self) -> None:
        """The person changed the draft: draw it, and look again."""
        self.draw(edited=True)
        self.look()
        self.keep()

    def keep(self) -> None:
        """Keep what no file holds, soon: many edits in a row are one write."""
        raise NotImplementedError

    # One row

    @on(EditWanted)
    def _edit(self, event: EditWanted) -> None:
        row: Row = event.row
        if row.key == LAUNCH:
            self.action_launch()
        elif row.key.startswith("unsaved:"):
            self._take_unsaved(int(row.key.removeprefix("unsaved:")))
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
        else:
            suggester = None
            if spec.control == "path" or spec is fields.model.name:
                from workbench.screens.listing import PathSuggester

                suggester = PathSuggester(self.base)
            self.keys.use(EDIT_KEYS["text"])
            self.pane.edit_text(row, as_typed(value), suggester)

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

    @on(FormPane.Typed)
    def _typed(self, event: FormPane.Typed) -> None:
        """Every key press is read as if it were kept; the finding stands under the row at once."""
        spec = fields.of(self.draft.config, event.key)
        if spec is None:
            return
        draft = self.draft
        mapping = copy.deepcopy(draft.mapping)
        if event.text.strip():
            meant = meaning(spec, event.text)
            put(mapping, event.key, event.text if isinstance(meant, Unmeant) else meant)
            reading = read(mapping, draft.facts)
            self.live = tuple(finding for finding in reading.findings if finding.path == event.key)
        else:
            self.live = ()
        self.pane.note(
            tuple(
                (visible(finding.text), {"error": "bad", "warning": "warn"}.get(finding.severity, "hint"))
                for finding in self.live
            )
        )
        self.finding_line.show(replace(self.live[0], fix=None) if self.live else None)

    @on(FormPane.Ended)
    def _ended(self, event: FormPane.Ended) -> None:
        self.pane.close()
        self.keys.use(self.keys.usual)
        self.live = None
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
        if unset:
            self.draft.unset(path)
        else:
            self.draft.set(path, value)
        self.changed()

    def _take_recipe(self, name: str) -> None:
        draft = self.draft
        draft.replace_text(recipe_text(name))
        draft.recipe = name
        self.changed()
        self.forward()

    def _take_unsaved(self, number: int) -> None:
        """Go on with a config that an earlier window left unsaved; undo takes it back."""
        kept = self.left.pop(number)
        draft = self.draft
        try:
            draft.replace_text(kept.text)
        except WorkbenchError as problem:
            self.tell(f"It cannot be read: {problem.message} It lies in {kept.place}.", bad=True)
            return
        draft.recipe = kept.recipe
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
        assert finding.fix is not None
        self.draft.apply(finding.fix)
        self.changed()

    def action_undo(self) -> None:
        """Take back."""
        if self.draft.undo():
            self.changed()
        else:
            self.tell("Nothing to take back.")

    def action_redo(self) -> None:
        """Do again."""
        if self.draft.redo():
            self.changed()
        else:
            self.tell("Nothing to do again.")

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
            self.draft.replace_text(text)
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
            self.draw()
            self.keep()
            self.tell(f"Saved in {place}.")

        self.app.push_screen(Ask("Save the config as", suggested_name(self.draft)), save)

    def tell(self, words: str, *, bad: bool = False) -> None:
        """A sentence in the place of the finding, until the next key."""
        self.finding_line.tell(visible(redact(words)), bad=bad)
