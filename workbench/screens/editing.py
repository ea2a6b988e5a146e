"""Editing on the build screen: a row's editor, lists, fixes, undo, the YAML in an editor of one's own, saving.

Owns what changes the draft and nothing of how it looks: the build screen draws anew after each change. What is typed is
read at each key press as if it were kept, so that the finding stands under the row before Enter is pressed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.screen import Screen

from engine.config.findings import Finding
from engine.config.text_values import as_typed
from engine.config.tree import fields
from engine.errors import WorkbenchError, redact, visible
from engine.session.build import BuildSession
from engine.session.draft import Draft
from workbench.messages import EditWanted, FieldChosen
from workbench.panels.bars import FindingLine, KeyLine
from workbench.panels.fields import options_of
from workbench.panels.form import FormPane

if TYPE_CHECKING:
    from workbench.app import WorkbenchApp
    from workbench.screens.background import Background
    from workbench.screens.steps import Steps

EDIT_KEYS = {
    "text": [("enter", "keep"), ("esc", "leave as it was"), ("^u", "clear")],
    "choice": [("↑↓", "move"), ("enter", "choose"), ("esc", "leave as it was")],
}


class EditingScreen(Screen[None]):
    """A screen with a form over the app's draft; a subclass draws."""

    app: WorkbenchApp
    session: BuildSession
    """The draft, what is known about it, what follows from it."""
    background: Background
    steps: Steps
    pane: FormPane
    finding_line: FindingLine
    keys: KeyLine
    _not_taken: tuple[str, str] | None = None
    """A config, and the YAML that was written in its place and could not be read."""

    @property
    def draft(self) -> Draft:
        """The config being built."""
        return self.app.draft

    def draw(self, key: str | None = None) -> None:
        """Make everything from the draft; the cursor goes to the row of `key`."""
        raise NotImplementedError

    @on(FieldChosen)
    def draw_foot(self) -> None:
        """The finding nearest to the person; while something is typed no letter is a key, so it offers none."""
        found, typing = self.steps.found, self.pane.typed is not None
        first = next(iter(self.steps.nearest(found)), None)
        shown = replace(first, fix=None) if first is not None and typing else first
        self.finding_line.show(shown, max(0, len(found) - 1), keys=not typing)

    def changed(self) -> None:
        """The person changed the draft: look again, draw it, and keep what no file holds."""
        self.background.look(self.steps.step)
        self.draw()
        self.background.keep()

    def tell(self, words: str, *, bad: bool = False) -> None:
        """A sentence in the place of the finding, until the next key."""
        self.finding_line.tell(visible(redact(words)), bad=bad)

    # One row

    @on(EditWanted)
    def _edit(self, event: EditWanted) -> None:
        """Open the editor of a setting; rows that are none are the subclass's."""
        from workbench.screens.browse import edit_path
        from workbench.screens.listing import edit_list

        draft, row = self.draft, event.row
        spec = fields.of(draft.config, row.key)
        if spec is None:
            return

        def keep(value: str | list[Any]) -> None:
            self.change(row.key, value, unset=not value)

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
            edit_list(self.app, draft, spec, row.key, self.app.start_list, keep)
        elif spec.control == "path" and not entry:
            edit_path(self.app, self.session, spec, value, self.app.start_list, keep)
        else:
            self.keys.use(EDIT_KEYS["text"])
            self.pane.edit_text(row, as_typed(value))

    def action_edit(self) -> None:
        """Edit the setting in focus."""
        self.pane.form.action_enter()

    @on(FormPane.Typed)
    def _typed(self) -> None:
        """Every key press is read as if it were kept; the whole screen says at once what would be found then."""
        self.steps.draw_typed()
        self.draw_foot()

    @on(FormPane.Ended)
    def _ended(self, event: FormPane.Ended) -> None:
        self.pane.close()
        self.keys.use(self.keys.usual)
        if event.answer is None:
            self.draw()
            return
        key, value = event.answer
        unset = isinstance(value, str) and not value.strip()
        if value == as_typed(self.draft.value(key)) and not unset:
            self.draw()
        else:
            self.change(key, value, unset=unset)

    def change(self, path: str, value: Any, *, unset: bool = False) -> None:
        """Write one setting, or take it out."""
        draft = self.draft
        self.session.edit(lambda: draft.unset(path) if unset else draft.set(path, value))
        self.changed()

    def action_default(self) -> None:
        """Back to the default."""
        row = self.pane.form.row
        if row is not None and row.key in self.draft.given | self.draft.reading.invalid:
            self.change(row.key, None, unset=True)

    def action_fix(self) -> None:
        """Apply the fix in view."""
        near = self.steps.nearest(self.steps.found)
        found = next((finding for finding in near if finding.fix is not None), None)
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
        self.changed() if self.session.undo() else self.tell("Nothing to take back.")

    def action_redo(self) -> None:
        """Do again."""
        self.changed() if self.session.redo() else self.tell("Nothing to do again.")

    # The file

    def action_yaml(self) -> None:
        """The YAML in the person's editor; the same findings afterwards."""
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        handle, name = tempfile.mkstemp(suffix=".yaml", prefix="workbench-")
        place, text = Path(name), self.draft.text()
        before, work = self._not_taken or ("", "")  # what could not be read last is not lost
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(work if before == text else text)
            with self.app.suspend():
                code = subprocess.run([*editor, name]).returncode
            if code:
                self.tell(f"{editor[0]} ended with {code}; the config is as it was.", bad=True)
                return
            written = place.read_text(encoding="utf-8")
            self._not_taken = (text, written)
            self.session.edit(lambda: self.draft.replace_text(written))
            self._not_taken = None
        except WorkbenchError as problem:
            self.tell(f"Not taken; y opens it again as you left it. {problem.full_message}", bad=True)
        except (OSError, UnicodeDecodeError) as problem:
            self.tell(f"The config is as it was: {problem}", bad=True)
        finally:
            place.unlink(missing_ok=True)
        self.app.refresh()
        self.changed()

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
            self.background.keep()
            self.tell(f"Saved in {place}.")

        self.app.push_screen(Ask("Save the config as", suggested_name(self.draft)), save)
