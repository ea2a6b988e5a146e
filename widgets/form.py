"""`ConfigForm(draft)`: the seven steps as a form over one draft, with findings, fixes, undo and consequences.

The draft is the truth and lives in the kernel; every verb that edits answers with the whole small state of the step in
view. Field specs travel once per view. Nothing here names a setting: the form is a loop over `step_fields`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue

from engine.config.steps import STEPS, step_fields, step_of_path
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.errors import UsageError, visible
from engine.session.build import BuildSession
from engine.session.draft import Draft, FileChanged, save_as
from engine.session.explain import Findable, findable
from widgets import pages
from widgets.asking import Asker
from widgets.protocol import NotebookWidget, Part, bundle, style, verb
from widgets.wire import Settings, finding_data, key_of, parse_control

Name = Annotated[str, Field(max_length=400)]
MOST_HITS = 12
Known = Annotated[int, Field(ge=0, le=10_000)]


class FormPart(Part):
    """Answers what a form asks of one draft."""

    def __init__(self, draft: Draft, asker: Asker, runs: str | Path | None = None) -> None:
        self.draft = draft
        self.session = BuildSession(draft, asker.ask, runs=runs)
        self.current = STEPS[0].id
        self._settings = Settings(draft)

    # What a view may ask

    @verb
    def state(self, *, specs: Known = 0, version: Name = "") -> dict[str, Any]:
        """Everything in view; `same` when nothing changed since `version`."""
        self.session.facts.refresh()
        self.session.warm_up(self.current)
        now = version_of(self.session, self.current)
        return {"same": True, "version": now} if version == now else self._state(specs)

    @verb
    def step(self, *, step: Name, specs: Known = 0) -> dict[str, Any]:
        self.to_step(step)
        return self.state(specs=specs)

    @verb
    def set(self, *, path: Name, value: JsonValue, typing: bool = False, specs: Known = 0) -> dict[str, Any]:
        """One edit as the control gave it. An empty text takes out what may be `auto` or empty.

        While a person is `typing` in one control, all of it is one step of undo.
        """
        spec, draft = self._spec(path), self.draft
        plain = parse_control(spec, value, draft.value(spec.path))

        def change() -> None:
            if plain == "" and (spec.auto or spec.nullable):
                draft.unset(spec.path)
            else:
                draft.set(spec.path, plain)

        return self._edit(change, specs, spec.path if typing else "")

    @verb
    def unset(self, *, path: Name, specs: Known = 0) -> dict[str, Any]:
        spec = self._spec(path)
        return self._edit(lambda: self._settings.back(spec), specs)

    @verb
    def fix(self, *, finding: Name, specs: Known = 0) -> dict[str, Any]:
        """Apply the fix of a finding that still stands."""
        fixes = [known.fix for known in self.draft.findings if key_of(known) == finding and known.fix is not None]
        if not fixes:
            return self._state(specs)
        return self._edit(lambda: self.draft.apply(fixes[0]), specs)

    @verb
    def undo(self, *, specs: Known = 0) -> dict[str, Any]:
        return self._edit(self.draft.undo, specs)

    @verb
    def redo(self, *, specs: Known = 0) -> dict[str, Any]:
        return self._edit(self.draft.redo, specs)

    @verb
    def recipe(self, *, name: Name, specs: Known = 0) -> dict[str, Any]:
        """Begin from a recipe; what was there stays one undo away."""
        self.session.begin_from(name)
        self.session.facts.refresh()
        return self._state(specs)

    @verb
    def count(self, *, specs: Known = 0) -> dict[str, Any]:
        """Stop counting the rows, or count them after all."""
        if not self.session.facts.stop_counting():
            self.session.facts.count_again()
        return self._state(specs)

    @verb
    def yaml(self) -> dict[str, Any]:
        """The file as it would be saved, for experts."""
        return {"text": self.draft.text(), "path": str(self.draft.path or "")}

    @verb
    def replace(self, *, text: Annotated[str, Field(max_length=1_048_576)], specs: Known = 0) -> dict[str, Any]:
        return self._edit(lambda: self.draft.replace_text(text), specs)

    @verb
    def save(
        self, *, path: Annotated[str, Field(max_length=4096)] = "", replace: bool = False, specs: Known = 0
    ) -> dict[str, Any]:
        """Save to this file, else to the config's own. Where that would lose what a file holds, nothing is written before it is
        asked to `replace` it, and `lost` says why."""
        try:
            if path.strip():
                save_as(self.draft, path.strip(), replace=replace)
            else:
                self.draft.save(replace=replace)
        except FileChanged as problem:
            return {**self._state(specs), "lost": problem.message}
        return self._state(specs)

    @verb
    def find(self, *, text: Name) -> dict[str, Any]:
        """Settings and terms whose name or help holds all words."""
        return {"found": _search(self.draft.config, text)}

    def to_step(self, step: str) -> None:
        """Open a step. Raises UsageError for one that there is not."""
        if step not in [known.id for known in STEPS]:
            raise UsageError(f"there is no step {visible(step)!r}.")
        self.current = step

    # Inside

    def _spec(self, path: str) -> FieldSpec:
        spec = fields.of(self.draft.config, path)
        if spec is None:
            raise UsageError(f"{visible(path)[:80]}: is no setting.")
        return spec

    def _edit(self, change: Callable[[], object], known: int, typing: str = "") -> dict[str, Any]:
        self.session.edit(change, typing=typing)
        self.session.facts.refresh()
        return self._state(known)

    def _state(self, known: int) -> dict[str, Any]:
        draft, session = self.draft, self.session
        findings = draft.findings
        return {
            "version": version_of(session, self.current),
            "name": draft.path.name if draft.path else draft.recipe or "new config",
            "path": str(draft.path or ""),
            "dirty": draft.dirty,
            "step": self.current,
            "steps": pages.steps(session, findings),
            "fields": self._settings.shown(step_fields(self.current, draft.config), session.becomes),
            "specs": self._settings.since(known),
            "findings": [finding_data(finding) for finding in findings[:60]],
            "consequences": pages.consequences(session),
            "blocks": pages.blocks(session, self.current),
            "kinds": pages.kinds(self.current, draft),
            "goals": pages.goals(draft) if self.current == STEPS[0].id else [],
            "undo": draft.history.can_undo,
            "redo": draft.history.can_redo,
            "working": session.facts.working,
            "words": session.facts.asking,
            "counting": session.facts.counting,
            "stopped": session.facts.stopped,
        }

    def summary(self) -> str:
        """The config in a few lines, for where widgets cannot be shown."""
        draft = self.draft
        lines = [f"Config: {draft.path or draft.recipe or 'new'}{' (changed)' if draft.dirty else ''}"]
        lines += [f"  {finding.severity}: {visible(finding.message)}" for finding in draft.findings[:10]]
        lines += [f"  {number.label}: {number.text}" for number in self.session.consequences]
        return "\n".join(lines)

    def close(self) -> None:
        self.session.close()


def version_of(session: BuildSession, step: str) -> str:
    """Changes with all that a view shows of a step."""
    draft, facts = session.draft, session.facts
    words = (
        f"{facts.asking}|{'|'.join(facts.problems)}|{facts.working}|{sorted(facts.looks)}|{bool(facts.tokenizer)}"
        f"|{session.warm.summary()}|{facts.stopped}"
    )
    return f"{draft.version}.{step}.{draft.dirty}.{abs(hash(words)) % 10**8}"


def _search(config: RunConfig, text: str) -> list[dict[str, Any]]:
    """Hits that hold all words, names before helps and the config's own settings first; `about` tells what has no row."""
    words = text.lower().split()
    hits = [item for item in findable(config) if words and item.holds(words)]
    hits.sort(key=lambda item: (not all(word in item.name for word in words), bool(item.path and item.whose)))
    return [_hit(item) for item in hits[:MOST_HITS]]


def _hit(item: Findable) -> dict[str, Any]:
    known: dict[str, Any] = {"title": item.title, "path": item.path, "whose": item.whose}
    if not item.path:
        return known | {"about": [item.help]}
    if item.whose:
        return known | {"about": [item.help, f"{item.path}, {item.whose}"]}
    return known | {"about": [], "step": step_of_path(item.path)}


class ConfigForm(NotebookWidget):
    """The form alone. `ConfigForm(draft)` edits a draft that you go on using; `ConfigForm("file.yaml")` opens one."""

    _esm = bundle("form", entry="configForm")
    _css = style()

    def __init__(self, draft: Draft | str | Path, *, height: int = 480) -> None:
        self.draft = draft if isinstance(draft, Draft) else Draft.open(draft)
        asker = Asker()
        super().__init__(FormPart(self.draft, asker), height=height, ends=(asker.close,))
