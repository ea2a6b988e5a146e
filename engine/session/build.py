"""A build session without a screen: one draft, what is found out about it, and what follows from it.

App and notebook hold one and show what it says. It belongs to one thread; what runs beside it stands in the collector, and
what `launch` returns, which may be called from any thread.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.coercion import Uncoerced, coerce
from engine.config.files import absolute, placed, put
from engine.config.findings import RANK, Finding
from engine.config.steps import STEPS, step_of_path
from engine.config.tree import RunConfig, fields
from engine.errors import WorkbenchError
from engine.facts.counts import not_counted
from engine.planning.auto import Effective, effective
from engine.planning.estimate import Estimate, estimate
from engine.rules import read
from engine.run.store import RunFolder, runs_dir
from engine.run.warm import WarmWorker
from engine.session.collector import Ask, FactsCollector
from engine.session.consequences import Consequence, consequences
from engine.session.draft import Draft
from engine.session.paragraph import paragraph

READ_BEFORE = ("review", "launch")
"""The steps on which a person reads what the run will be."""
_NOT_STARTED = "The config has an error, so no run was started."


@dataclass(frozen=True, slots=True)
class StepStatus:
    """How a step stands: the gravest of its findings (nothing without one), its errors and its other findings."""

    step: str
    worst: str = ""
    errors: int = 0
    others: int = 0


class BuildSession:
    """The draft, its facts, its consequences, its start."""

    def __init__(
        self,
        draft: Draft,
        ask: Ask,
        *,
        runs: str | os.PathLike[str] | None = None,
        wake: Callable[[], object] = lambda: None,
        warm: WarmWorker | None = None,
    ) -> None:
        self.draft = draft
        self.facts = FactsCollector(draft, ask, wake, runs)
        self.warm = warm or WarmWorker()
        self._wake = wake
        self._warmed_for = -1
        self._explicit_runs = runs
        self._before: RunConfig | None = None
        self._kept: tuple[int, tuple[Estimate, Estimate | None]] | None = None
        self._typing: tuple[str, int] | None = None
        self._tried: tuple[tuple[str, str, int], tuple[Finding, ...]] | None = None

    # Changing the draft

    def edit(self, change: Callable[[], object], *, typing: str = "") -> bool:
        """Make one change of the draft; while a person types in one place, all of it is one step of undo. False where
        nothing is changed by it."""
        draft = self.draft
        before, edits = draft.config, draft.edits
        if typing and self._typing == (typing, edits):
            before = self._before or before
            draft.undo()
        change()
        changed = draft.edits != edits
        if changed:
            self._before, self._kept = before, None
        self._typing = (typing, draft.edits) if typing and changed else None
        return changed

    def undo(self) -> bool:
        """Take back the last change; False where there is none."""
        return self.edit(self.draft.undo)

    def redo(self) -> bool:
        """Do again what was taken back last; False where nothing was."""
        return self.edit(self.draft.redo)

    @property
    def is_own(self) -> bool:
        """Whether a file's config, or a model or rows of the person's own, would be replaced by another config."""
        draft, begun = self.draft, Draft.new(self.draft.recipe)
        own = (fields.model.name.path, fields.data.train.path)
        return draft.path is not None or any(draft.value(path) != begun.value(path) for path in own)

    def begin(self, text: str, recipe: str | None) -> None:
        """Take another config in place of this one, as one step of undo. Raises ConfigUnreadable."""
        self.edit(lambda: self.draft.replace_text(text))
        self.draft.recipe = recipe

    def begin_from(self, recipe: str, *, keep_own: bool = False) -> None:
        """Take a ready config, all of it or all but this one's model and data. Raises UsageError for an unknown one."""
        recipe_draft = Draft.new(recipe)
        for section in (fields.model.name.section, fields.data.train.section) if keep_own else ():
            mine = self.draft.value(section)
            if mine is None:
                recipe_draft.unset(section)
            else:
                recipe_draft.set(section, mine)
        self.begin(recipe_draft.text(), recipe)

    def typed(self, path: str, text: str) -> tuple[Finding, ...]:
        """What would be found if this text were kept as the value of a setting; the draft stays as it is."""
        draft, spec = self.draft, fields.of(self.draft.config, path)
        asked = (path, text, draft.version)
        if self._tried is not None and self._tried[0] == asked:
            return self._tried[1]
        if not text.strip():
            without = Draft(draft.text())
            without.unset(path)
            mapping = without.mapping
        else:
            mapping = copy.deepcopy(draft.mapping)
            meant = coerce(spec, text) if spec is not None else text
            put(mapping, path, text if isinstance(meant, Uncoerced) else meant)
        self._tried = (asked, read(mapping, draft.facts).findings)
        return self._tried[1]

    # What follows from it

    @property
    def becomes(self) -> dict[str, Effective]:
        """What each setting becomes, by its path."""
        return {setting.path: setting for setting in effective(self.draft.config, self.draft.facts)}

    @property
    def estimate(self) -> Estimate:
        """The consequences of the config by what is known now."""
        return self._estimates()[0]

    @property
    def consequences(self) -> list[Consequence]:
        """Those numbers in words, with the change that the last edit made."""
        return consequences(*self._estimates())

    def _estimates(self) -> tuple[Estimate, Estimate | None]:
        """Of the config now, and of that before the last edit; both by what is known now."""
        draft, before = self.draft, self._before
        if self._kept is None or self._kept[0] != draft.version:
            then = estimate(before, draft.facts) if before is not None else None
            self._kept = (draft.version, (estimate(draft.config, draft.facts), then))
        return self._kept[1]

    @property
    def rehearsed(self) -> str:
        """What the newest rehearsal of this very config measured, in words; empty without one."""
        from engine.run.rehearsed import last

        rehearsal = last(self.draft.config, self.draft.facts, self.draft.base)
        return rehearsal.summary() if rehearsal else ""

    @property
    def paragraph(self) -> str:
        """What the config will do, in sentences for people."""
        return paragraph(self.draft.config, self.draft.facts, self.estimate, self.runs_dir)

    @property
    def uncounted(self) -> str:
        """That the rows are not counted yet; empty once they are."""
        return not_counted(self.draft.config, self.draft.facts)

    @property
    def runs_dir(self) -> Path:
        """Where its run would go: what was said at the start, else what the config says, else the usual place."""
        draft, spec = self.draft, fields.run.output_dir
        written = draft.base / draft.config.run.output_dir if spec.path in draft.reading.given else None
        return runs_dir(self._explicit_runs, written)

    @property
    def errors(self) -> int:
        """How much is to mend before the run can start."""
        return len(self.draft.reading.errors)

    # The run

    def launch(self, *, queue: bool = False) -> Callable[[], RunFolder]:
        """The start of the draft as it stands now, for any thread; read once more with all that is known.

        With `queue` the run waits until a device is free.

        Both raise WorkbenchError where the config has an error, what it returns also where the run cannot be started.
        """
        self.draft.reading.accepted(_NOT_STARTED)
        draft, explicit = self.draft, self._explicit_runs
        mapping, config, known = absolute(draft.mapping, draft.base), draft.config, draft.facts
        base, source, warm = draft.base, draft.path, self.warm

        def start() -> RunFolder:
            from engine.data.gather_facts import completed
            from engine.run.from_config import launch_config, runs_dir_of

            try:
                facts = placed(completed(known, config, base), base)
                reading = read(mapping, facts)
                return launch_config(
                    reading.accepted(_NOT_STARTED),
                    facts,
                    runs_dir=runs_dir_of(reading.config, reading.given, explicit),
                    name=source.stem if source is not None else None,
                    forecast_bytes=estimate(reading.config, facts).checkpoints_bytes,
                    source=source,
                    queue=queue,
                    warm=warm,
                )
            except OSError as problem:
                raise WorkbenchError(f"The run could not be started: {problem}.") from problem

        return start

    def warm_up(self, step: str) -> None:
        """Have a worker wait while a person reads what the run will be. It is begun beside this thread, once for each state
        of the draft that has no error."""
        draft = self.draft
        if step not in READ_BEFORE:
            self._warmed_for = -1
        if step not in READ_BEFORE or self._warmed_for == draft.version or self.errors or not self.warm.wanted():
            return
        self._warmed_for = draft.version
        mapping, facts, place = absolute(draft.mapping, draft.base), placed(draft.facts, draft.base), self.runs_dir

        def work() -> None:
            from engine.run.from_config import warm_up

            with contextlib.suppress(WorkbenchError, OSError):  # the launch says what is wrong
                warm_up(self.warm, read(mapping, facts).config, facts, place)
            self._wake()

        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Nothing goes on for a session that is left."""
        self.facts.close()
        self.warm.close()


def step_statuses(findings: Iterable[Finding]) -> list[StepStatus]:
    """How each step stands by these findings."""
    mine: dict[str, list[Any]] = {step.id: [] for step in STEPS}
    for finding in findings:
        mine.setdefault(step_of_path(finding.path), []).append(finding.severity)
    return [
        StepStatus(
            step.id,
            min(mine[step.id], key=lambda severity: RANK[severity], default=""),
            mine[step.id].count("error"),
            len(mine[step.id]) - mine[step.id].count("error"),
        )
        for step in STEPS
    ]
