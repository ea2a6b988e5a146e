"""`ConfigForm(draft)`: the seven steps as a form over one draft, with findings, fixes, undo and consequences.

The draft is the truth and lives in the kernel; every verb that edits answers with the whole small state of the step in
view. Field specs travel once per view. Nothing here names a setting: the form is a loop over `step_fields`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue

from engine.config.draft import Draft
from engine.config.findings import Finding
from engine.config.recipes import recipe_mapping
from engine.config.schema import Effective, FieldSpec, RunConfig, effective, fields, read
from engine.config.steps import STEPS, step_fields, step_of_path
from engine.config.typed import as_typed
from engine.errors import UsageError, visible
from engine.memory.estimate import estimate
from engine.run.from_config import runs_dir_of
from widgets import pages
from widgets.asking import Asker
from widgets.finding import found
from widgets.learning import Learner
from widgets.protocol import Face, Part, bundle, shown, style, verb
from widgets.wire import in_words, meant, shown_value, spec_data

Name = Annotated[str, Field(max_length=400)]
Known = Annotated[int, Field(ge=0, le=10_000)]


class FormPart(Part):
    """Answers what a form asks of one draft."""

    def __init__(self, draft: Draft, asker: Asker, runs: str | Path | None = None) -> None:
        self.draft = draft
        self.explicit_runs = runs
        self.learner = Learner(draft, asker)
        self.current = STEPS[0].id
        self._specs: list[FieldSpec] = []
        self._numbers: dict[FieldSpec, int] = {}
        self._before: RunConfig | None = None
        self._origins: dict[str | None, RunConfig] = {}
        self._typing: tuple[str, int] | None = None

    # What a view may ask

    @verb
    def state(self, *, specs: Known = 0, version: Name = "") -> dict[str, Any]:
        """Everything in view; `same` when nothing changed since `version`."""
        self.learner.refresh()
        now = self._version()
        return {"same": True, "version": now} if version == now else self._state(specs)

    @verb
    def step(self, *, step: Name, specs: Known = 0) -> dict[str, Any]:
        if step not in [known.id for known in STEPS]:
            raise UsageError(f"there is no step {visible(step)!r}.")
        self.current = step
        return self.state(specs=specs)

    @verb
    def set(self, *, path: Name, value: JsonValue, typing: bool = False, specs: Known = 0) -> dict[str, Any]:
        """One edit as the control gave it. An empty text takes out what may be `auto` or empty.

        While a person is `typing` in one control, all of it is one step of undo.
        """
        spec, draft = self._spec(path), self.draft
        plain = meant(spec, value, draft.value(spec.path))

        going_on = self._typing == (spec.path, draft.version)

        def change() -> None:
            if going_on:
                draft.undo()
            if plain == "" and (spec.auto or spec.nullable):
                draft.unset(spec.path)
            else:
                draft.set(spec.path, plain)

        version = draft.version
        answer = self._edit(change, specs, self._before if going_on else None)
        self._typing = (spec.path, draft.version) if typing and draft.version != version else None
        return answer

    @verb
    def unset(self, *, path: Name, specs: Known = 0) -> dict[str, Any]:
        spec = self._spec(path)
        return self._edit(lambda: self._back_to_recipe(spec), specs)

    @verb
    def fix(self, *, finding: Name, specs: Known = 0) -> dict[str, Any]:
        """Apply the fix of a finding that still stands."""
        fixes = [each.fix for each in self.draft.findings if _key(each) == finding and each.fix is not None]
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
        text = Draft.new(name).text()

        def begin() -> None:
            self.draft.replace_text(text)
            self.draft.recipe = name

        return self._edit(begin, specs)

    @verb
    def yaml(self) -> dict[str, Any]:
        """The file as it would be saved, for experts."""
        return {"text": self.draft.text(), "path": str(self.draft.path or "")}

    @verb
    def replace(self, *, text: Annotated[str, Field(max_length=1_048_576)], specs: Known = 0) -> dict[str, Any]:
        return self._edit(lambda: self.draft.replace_text(text), specs)

    @verb
    def save(self, *, path: Annotated[str, Field(max_length=4096)] = "", specs: Known = 0) -> dict[str, Any]:
        self.draft.save(Path(path).expanduser() if path.strip() else None)
        return self._state(specs)

    @verb
    def find(self, *, text: Name) -> dict[str, Any]:
        """Settings and terms whose name or help holds all words."""
        return {"found": found(self.draft.config, text)}

    # Inside

    @property
    def runs_dir(self) -> Path:
        return runs_dir_of(self.draft.config, self.draft.given, self.explicit_runs)

    def _spec(self, path: str) -> FieldSpec:
        spec = fields.of(self.draft.config, path)
        if spec is None:
            raise UsageError(f"{visible(path)[:80]}: is no setting.")
        return spec

    def _back_to_recipe(self, spec: FieldSpec) -> None:
        """The recipe's value where it gives one, else the default."""
        if self.draft.recipe:
            original = Draft.new(self.draft.recipe).value(spec.path)
            if original is not None and original != self.draft.value(spec.path):
                self.draft.set(spec.path, original)
                return
        self.draft.unset(spec.path)

    def _way_back(self, spec: FieldSpec, value: Any) -> str:
        """Where the button beside a setting leads; nothing where the setting is as it was."""
        recipe = self.draft.recipe
        if recipe not in self._origins:
            self._origins[recipe] = read(recipe_mapping(recipe) if recipe else {}).config
        was = spec.value(self._origins[recipe])
        if was == value and isinstance(was, bool) == isinstance(value, bool):
            return ""
        return f"back to the {'recipe' if recipe else 'default'}: {in_words(spec, was)}"

    def _edit(self, change: Callable[[], Any], known: int, before: RunConfig | None = None) -> dict[str, Any]:
        before, version, self._typing = before or self.draft.config, self.draft.version, None
        change()
        if self.draft.version != version:
            self._before = before
        self.learner.refresh()
        return self._state(known)

    def _version(self) -> str:
        learner = self.learner
        words = f"{learner.words}|{'|'.join(learner.trouble)}|{learner.working}"
        return f"{self.draft.version}.{self.current}.{self.draft.dirty}.{abs(hash(words)) % 10**8}"

    def _rehearsed(self) -> str:
        """What the newest rehearsal of this very config measured, in words; read on the review page alone."""
        if self.current != "review":
            return ""
        from engine.run.rehearsal import last

        found = last(self.draft.config, self.draft.facts, self.learner.base)
        return found.words() if found else ""

    def _state(self, known: int) -> dict[str, Any]:
        draft, learner = self.draft, self.learner
        config, findings = draft.config, draft.findings
        becomes = effective(config, draft.facts)
        now = estimate(config, draft.facts)
        before = estimate(self._before, draft.facts) if self._before is not None else None
        shown_fields = self._fields(step_fields(self.current, config), {each.path: each for each in becomes})
        view = pages.View(draft, now, becomes, learner.words, learner.trouble, self.runs_dir, self._rehearsed())
        return {
            "version": self._version(),
            "name": draft.path.name if draft.path else draft.recipe or "new config",
            "path": str(draft.path or ""),
            "dirty": draft.dirty,
            "step": self.current,
            "steps": self._steps(findings),
            "fields": shown_fields,
            "specs": [[number, spec_data(self._specs[number])] for number in range(known, len(self._specs))],
            "findings": [self._finding(finding) for finding in findings[:60]],
            "consequences": pages.consequences(now, before),
            "blocks": pages.blocks(self.current, view),
            "kinds": pages.kinds(self.current, draft),
            "goals": pages.goals(draft) if self.current == STEPS[0].id else [],
            "undo": draft.can_undo,
            "redo": draft.can_redo,
            "working": learner.working,
            "words": learner.words,
        }

    def _steps(self, findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
        found = []
        for step in STEPS:
            mine = [each.severity for each in findings if step_of_path(each.path) == step.id]
            bad, soft = mine.count("error"), len(mine) - mine.count("error")
            mark, kind = ("✗", "error") if bad else ("?", "hint") if soft else ("✓", "ok")
            words = f"{bad} to mend" if bad else f"{soft} to look at" if soft else "nothing to mend"
            found.append(
                {
                    "id": step.id,
                    "title": step.title,
                    "question": step.question,
                    "mark": mark,
                    "kind": kind,
                    "words": words,
                }
            )
        return found

    def _fields(self, specs: tuple[FieldSpec, ...], becomes: dict[str, Effective]) -> list[dict[str, Any]]:
        reading = self.draft.reading
        troubled = {finding.path for finding in reading.findings}
        found = []
        for spec in specs:
            if spec not in self._numbers:
                self._numbers[spec] = len(self._specs)
                self._specs.append(spec)
            broken = [path for path in reading.invalid if path == spec.path or path.startswith(spec.path + ".")]
            value = self.draft.value(spec.path) if broken else spec.value(reading.config)
            each = becomes.get(spec.path)
            auto = as_typed(each.effective) if each is not None and value == "auto" else ""
            found.append(
                {
                    "spec": self._numbers[spec],
                    "value": shown_value(spec, value),
                    "given": spec.path in reading.given,
                    "back": self._way_back(spec, value),
                    "auto": visible(auto),
                    "why": visible(each.reason) if each is not None and value == "auto" else "",
                    "finding": any(path == spec.path or path.startswith(spec.path + ".") for path in troubled),
                }
            )
        return found

    @staticmethod
    def _finding(finding: Finding) -> dict[str, Any]:
        owner = fields.get(".".join(finding.path.split(".")[:2]))
        part = fields.get(finding.path)
        inside = f", {part.title.lower()}" if part is not None and owner is not None and part is not owner else ""
        return {
            "key": _key(finding),
            "path": owner.path if owner is not None else finding.path,
            "step": step_of_path(finding.path),
            "title": owner.title + inside if owner is not None else visible(finding.path or "the file"),
            "severity": finding.severity,
            "message": shown(finding.text),
            "fix": visible(finding.fix.label) if finding.fix else "",
        }

    def summary(self) -> str:
        """The config in a few lines, for where widgets cannot be shown."""
        draft = self.draft
        lines = [f"Config: {draft.path or draft.recipe or 'new'}{' (changed)' if draft.dirty else ''}"]
        lines += [f"  {finding.severity}: {visible(finding.message)}" for finding in draft.findings[:10]]
        numbers = pages.consequences(estimate(draft.config, draft.facts), None)
        lines += [f"  {each['label']}: {each['text']}" for each in numbers]
        return "\n".join(lines)

    def close(self) -> None:
        self.learner.close()


def _key(finding: Finding) -> str:
    return f"{finding.path}|{finding.rule}|{finding.severity}"[:400]


class ConfigForm(Face):
    """The form alone. `ConfigForm(draft)` edits a draft that you go on using; `ConfigForm("file.yaml")` opens one."""

    _esm = bundle("form", entry="configForm")
    _css = style()

    def __init__(self, draft: Draft | str | Path, *, height: int = 480) -> None:
        self.draft = draft if isinstance(draft, Draft) else Draft.open(draft)
        asker = Asker()
        super().__init__(FormPart(self.draft, asker), height=height, ends=(asker.close,))
