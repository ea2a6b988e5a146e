"""What was begun from a view for a run that has ended: going on, measuring, taking along. One thing at a time for each run.

It runs beside the kernel's own thread; what became of it is one line that the monitor shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError
from engine.export.places import FORMS, K_QUANTS, MXFP4, QUANTS, places, refuse_existing
from engine.export.process import Export, part_summary, request
from engine.figures import progress
from engine.run.data_record import DataChanged
from engine.run.ending import End
from engine.run.evaluations import Evaluation, step_of, summary, tasks_of
from engine.run.pruning_choice import remove
from engine.run.store import RunFolder
from engine.run.task import Task
from engine.run.view import RunView
from engine.session.apply_proposal import apply
from engine.session.resume import resume
from widgets.protocol import shown


@dataclass
class _Job:
    status: str
    """How far it is; what came of it once it is done."""
    settings: Mapping[str, Any] | None = None
    future: Future[None] | None = None
    task: Task | None = None
    new: RunFolder | None = None
    parts: list[str] = field(default_factory=list)


class RunJobs:
    """The newest job of each run, by what the run is called."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._pool: ThreadPoolExecutor | None = None

    def go_on(self, name: str, run: RunFolder, settings: Mapping[str, Any] | None, accept_data: bool) -> None:
        """Resume, with other values for some settings. Accepting rows keeps the settings that were asked for before."""
        before = self._jobs.get(name)
        if accept_data and before is not None and settings is None:
            settings = before.settings
        job = _Job("resuming", settings)

        def work() -> None:
            resume(run, settings=settings, accept_data=accept_data)
            job.status = ""

        self._start(name, job, work)

    def mend(self, name: str, run: RunFolder, view: RunView, end: End) -> None:
        """Make the change that a failed run proposes: it goes on, or a new run starts."""
        if not end.anew:
            self.go_on(name, run, end.change.settings if end.change else None, accept_data=False)
            return
        job = _Job("starting a new run")

        def work() -> None:
            job.new = apply(run, view, end)
            job.status = f"{job.new.id} starts from the beginning"

        self._start(name, job, work)

    def new(self, name: str) -> RunFolder | None:
        """The run that was started in the place of this one, where there is one."""
        job = self._jobs.get(name)
        return job.new if job is not None else None

    def measure(self, name: str, run: RunFolder, tasks: Sequence[str] = ()) -> None:
        """The newest checkpoint on the held-out rows, or by these tasks, beside the base. Raises WorkbenchError where there
        is none."""
        task = Evaluation(run, step_of(run, None), base=True, tasks=tasks_of(tasks, "task"))
        job = _Job("measuring", task=task)

        def work() -> None:
            record, _ = task.measure(lambda message: _report(job, message))
            job.status = summary(record)

        self._start(name, job, work)

    def take_along(self, name: str, run: RunFolder, forms: Sequence[str], quant: str, folder: Path) -> None:
        """The model in these forms into a folder. Raises WorkbenchError where something is there."""
        if not forms:
            raise WorkbenchError("Nothing is ticked.", f"Tick one of {', '.join(FORMS)}.")
        for form in forms:
            if form not in FORMS:
                raise WorkbenchError(f"form: must be one of {', '.join(FORMS)}; got {shown(form, 40)}.")
        if "gguf" in forms and quant not in (known := (*QUANTS, MXFP4, *K_QUANTS)):
            raise WorkbenchError(f"quant: must be one of {', '.join(known)}; got {shown(quant, 40)}.")
        where = places(run, forms, folder, quant)
        for place in where.values():
            refuse_existing(place)
        task = Export(request("export", run.path, places=where, quant=quant))
        job = _Job("taking the model along", task=task)

        def work() -> None:
            task.run(lambda message: _report(job, message))
            job.status = f"{'; '.join(part.removesuffix('.') for part in job.parts)}; in {folder}"

        self._start(name, job, work)

    def prune(self, name: str, run: RunFolder, keep: int, steps: Collection[int]) -> None:
        """Remove the checkpoints of these steps that may go; reading whole what stays takes a moment and is done beside."""
        job = _Job("reading what stays whole, then removing")

        def work() -> None:
            job.status = remove(run, keep, steps).removed()

        self._start(name, job, work)

    def status(self, name: str) -> str:
        """How far the job of a run is, or what came of it; nothing where there is none."""
        job = self._jobs.get(name)
        if job is None or job.future is None:
            return ""
        if not job.future.done():
            return shown(job.status, 300)
        problem = job.future.exception()
        if isinstance(problem, DataChanged):
            return shown(problem.message)
        if isinstance(problem, WorkbenchError):
            return shown(problem.full_message)
        if problem is not None:
            return shown(f"{type(problem).__name__}: {problem}")
        return shown(job.status, 600)

    def rows_changed(self, name: str) -> bool:
        """Whether the last resume waits for a person's word on rows that are other than before."""
        job = self._jobs.get(name)
        done = job is not None and job.future is not None and job.future.done()
        return done and job is not None and job.future is not None and isinstance(job.future.exception(), DataChanged)

    def drop(self, name: str) -> None:
        """What was said of a run is no news any more."""
        self._jobs.pop(name, None)

    def close(self) -> None:
        """Measuring and taking along end here; a run that goes on is none of this kernel's."""
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _start(self, name: str, job: _Job, work: Callable[[], None]) -> None:
        before = self._jobs.get(name)
        if before is not None and before.future is not None and not before.future.done():
            raise WorkbenchError(f"Something goes on for this run already: {before.status}.", "Wait until it is done.")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="workbench-run")
        self._jobs[name] = job
        job.future = self._pool.submit(work)


def _report(job: _Job, message: dict[str, Any]) -> None:
    """What the process says: how far it is, or a form that is done."""
    if (state := message.get("progress")) is not None:
        of = f" {progress({**state, 'unit': state.get('unit') or 'rows'})}" if state["total"] > 1 else ""
        job.status = f"{state['what']}{of} …"
    if (part := message.get("part")) is not None:
        job.parts.append(part_summary(part))
