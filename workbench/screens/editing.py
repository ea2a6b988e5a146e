"""Editing on the build screen: a row's editor, lists, undo, the YAML in an editor of one's own, saving.

Owns what changes the draft and nothing of how it looks: it says that the draft has changed, and who draws it draws it anew.
What is typed is read at each key press as if it were kept, so that the finding stands under the row before Enter is pressed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.message import Message

from engine.config.findings import Finding
from engine.config.text_values import as_typed
from engine.config.tree import fields
from engine.errors import WorkbenchError
from engine.session.build import BuildSession
from engine.session.draft import Draft
from workbench.messages import EditWanted
from workbench.panels.fields import options_of
from workbench.panels.form import FormPane

if TYPE_CHECKING:
    from workbench.app import WorkbenchApp


class EditPane(FormPane):
    """The form over a session's draft."""

    app: WorkbenchApp

    class Changed(Message):
        """The draft is no longer what was drawn; `edited` where a person has changed it."""

        def __init__(self, edited: bool) -> None:
            super().__init__()
            self.edited = edited

    class Report(Message):
        """A sentence for the person, until the next key."""

        def __init__(self, text: str, bad: bool) -> None:
            super().__init__()
            self.text, self.bad = text, bad

    def __init__(self, session: BuildSession) -> None:
        super().__init__()
        self.session = session
        """The draft, what is known about it, what follows from it."""
        self._unreadable: tuple[str, str] | None = None
        """A config, and the YAML that was written in its place and could not be read."""

    @property
    def draft(self) -> Draft:
        """The config being built."""
        return self.session.draft

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings: as they would be if what is being typed were kept, else of the draft."""
        return self.draft.findings if self.typed is None else self.session.typed(*self.typed)

    def changed(self) -> None:
        """The person changed the draft."""
        self.post_message(self.Changed(edited=True))

    def report(self, text: str, *, bad: bool = False) -> None:
        """Say something in passing."""
        self.post_message(self.Report(text, bad))

    def act(self, what: str) -> None:
        """One of the actions of the table, by its word."""
        {
            "edit": self.form.action_enter,
            "default": self._default,
            "undo": lambda: self.changed() if self.session.undo() else self.report("Nothing to take back."),
            "redo": lambda: self.changed() if self.session.redo() else self.report("Nothing to do again."),
            "yaml": self._yaml,
            "write": self._write,
        }[what]()

    # One row

    @on(EditWanted)
    def _edit(self, event: EditWanted) -> None:
        """Open the editor of a setting; rows that are none are the screen's."""
        from workbench.screens.browse import edit_path
        from workbench.screens.listing import edit_list

        draft, row = self.draft, event.row
        spec = fields.of(draft.config, row.key)
        if spec is None:
            return
        event.stop()

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
            self.edit_choice(row, options_of(spec), value)
        elif spec.control in ("sources", "prompts"):
            edit_list(self.app, draft, spec, row.key, self.app.history.start_list, keep)
        elif spec.control == "path" and not entry:
            edit_path(self.app, self.session, spec, value, self.app.history.start_list, keep)
        else:
            self.edit_text(row, as_typed(value))

    @on(FormPane.Ended)
    def _ended(self, event: FormPane.Ended) -> None:
        event.stop()
        self.close()
        key, value = event.answer or ("", None)
        unset = isinstance(value, str) and not value.strip()
        if event.answer is None or (value == as_typed(self.draft.value(key)) and not unset):
            self.post_message(self.Changed(edited=False))
        else:
            self.change(key, value, unset=unset)

    def change(self, path: str, value: Any, *, unset: bool = False) -> None:
        """Write one setting, or take it out."""
        draft = self.draft
        self.session.edit(lambda: draft.unset(path) if unset else draft.set(path, value))
        self.changed()

    def _default(self) -> None:
        row = self.form.row
        if row is not None and row.key in self.draft.reading.given | self.draft.reading.invalid:
            self.change(row.key, None, unset=True)

    def fix(self, findings: Iterable[Finding]) -> None:
        """Apply the first fix that one of them has."""
        finding = next((finding for finding in findings if finding.fix is not None), None)
        if finding is None:
            self.report("Nothing here has a fix of its own.")
        else:
            self.apply(finding)

    def apply(self, finding: Finding) -> None:
        """Apply a finding's fix."""
        fix = finding.fix
        assert fix is not None
        self.session.edit(lambda: self.draft.apply(fix))
        self.changed()

    # The file

    def _yaml(self) -> None:
        """The YAML in the person's editor; the same findings afterwards."""
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        handle, name = tempfile.mkstemp(suffix=".yaml", prefix="workbench-")
        place, text = Path(name), self.draft.text()
        before, work = self._unreadable or ("", "")  # what could not be read last is not lost
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(work if before == text else text)
            with self.app.suspend():
                code = subprocess.run([*editor, name]).returncode
            if code:
                self.report(f"{editor[0]} ended with {code}; the config is as it was.", bad=True)
                return
            written = place.read_text(encoding="utf-8")
            self._unreadable = (text, written)
            self.session.edit(lambda: self.draft.replace_text(written))
            self._unreadable = None
        except WorkbenchError as problem:
            self.report(f"Not taken; y opens it again as you left it. {problem.full_message}", bad=True)
        except (OSError, UnicodeDecodeError) as problem:
            self.report(f"The config is as it was: {problem}", bad=True)
        finally:
            place.unlink(missing_ok=True)
        self.app.refresh()
        self.changed()

    def _write(self) -> None:
        """Save to a file, asking for its name."""
        from workbench.screens.saving import ask_name

        if self.editor:
            self.report("Enter keeps what is being typed, esc leaves it as it was; then it can be saved.")
            return

        def saved(place: Path) -> None:
            self.app.history.recent.note(place)
            self.changed()
            self.report(f"Saved in {place}.")

        ask_name(self.app, self.draft, saved, lambda words: self.report(words, bad=True))
