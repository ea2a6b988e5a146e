"""What a notebook asks of a run: to stop or save, and once it has ended to go on, to be mended, measured, taken along, pruned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.errors import WorkbenchError
from engine.run import control, proposals, stopping
from engine.run.pruning_choice import choose
from engine.run.view import RunView
from widgets import telling
from widgets.protocol import Part, shown, verb
from widgets.reader import Runs
from widgets.run_jobs import RunJobs

Run = Annotated[str, Field(max_length=400)]
Forms = Annotated[Sequence[Annotated[str, Field(max_length=40)]], Field(max_length=8)]
TaskFile = Annotated[str, Field(max_length=4000)]
Quant = Annotated[str, Field(max_length=40)]


class ActionsPart(Part):
    """Answers what is asked of the runs that a view may look at, by what each is called."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._jobs = RunJobs()
        self._said: dict[str, str] = {}

    @verb
    def control(self, *, run: Run, verb: Literal["stop", "save_stop", "checkpoint", "end_of_epoch"]) -> dict[str, Any]:
        """Ask the run for something; its answer comes with the next news."""
        folder = self._runs.folder(run)
        self._said[run] = control.request(folder, verb, "notebook")
        return {}

    @verb
    def resume(self, *, run: Run, accept_data: bool = False) -> dict[str, Any]:
        """Go on from the newest whole checkpoint; comparing the rows and starting take a moment and are done beside."""
        self._said.pop(run, None)
        self._jobs.go_on(run, self._runs.folder(run), None, accept_data)
        return {}

    @verb
    def longer(self, *, run: Run) -> dict[str, Any]:
        """Train a finished run for as long again."""
        folder = self._runs.folder(run)
        self._jobs.go_on(run, folder, proposals.longer(folder).settings, accept_data=False)
        return {}

    @verb
    def mend(self, *, run: Run) -> dict[str, Any]:
        """Make the change that a failed run proposes, and launch."""
        reader = self._runs.reader(run)
        with reader.lock:
            view = reader.poll().copy()
        self._jobs.mend(run, reader.folder, view, reader.end(view))
        return {}

    @verb
    def evaluate(self, *, run: Run) -> dict[str, Any]:
        """Measure the newest checkpoint on the held-out rows, beside the base."""
        self._jobs.measure(run, self._runs.folder(run))
        return {}

    @verb
    def score(self, *, run: Run, task: TaskFile) -> dict[str, Any]:
        """Measure the newest checkpoint by a task of lm-evaluation-harness, beside the base."""
        if not task.strip():
            raise WorkbenchError("No task is named.", "Name its YAML file, from the notebook's folder on.")
        self._jobs.measure(run, self._runs.folder(run), [task.strip()])
        return {}

    @verb
    def export(self, *, run: Run, forms: Forms = ("safetensors",), quant: Quant = "F16") -> dict[str, Any]:
        """Take the model along in these forms, into a folder beside the notebook; `quant` is a GGUF's number format."""
        folder = self._runs.folder(run)
        self._jobs.take_along(run, folder, forms, quant, Path.cwd() / f"{folder.id}-export")
        return {}

    @verb
    def pruning(self, *, run: Run, keep: Annotated[int, Field(ge=1, le=1_000_000)] = 1) -> dict[str, Any]:
        """Which checkpoints would stay and go with so many of the newest kept, and why."""
        return telling.pruning(choose(self._runs.folder(run), keep, hashes=False))

    @verb
    def prune(
        self,
        *,
        run: Run,
        keep: Annotated[int, Field(ge=1, le=1_000_000)],
        steps: Annotated[Sequence[int], Field(max_length=10_000)],
    ) -> dict[str, Any]:
        """Remove those of these steps that may go: never the newest whole checkpoint, never the best."""
        self._jobs.prune(run, self._runs.folder(run), keep, steps)
        return {}

    # For who shows the run

    def rows_changed(self, run: str) -> bool:
        """Whether going on waits for other rows to be accepted."""
        return self._jobs.rows_changed(run)

    def new(self, run: str) -> str:
        """What the run is called that was started here in the place of this one; it can be watched from now on."""
        new = self._jobs.new(run)
        if new is None:
            return ""
        self._runs.give(new)
        return new.id

    def answer(self, run: str, view: RunView) -> str:
        """What became of the last request made here."""
        if words := self._jobs.status(run):
            return words
        name = self._said.get(run)
        if name is None:
            return ""
        answer = control.answer(view, name)
        if answer is None:
            return "" if view.over else "asked; the run answers after its step"
        return shown(stopping.answered(answer), 300)

    def close(self) -> None:
        self._jobs.close()
