"""`Workbench()`: the seven steps, the preview, the launch and the monitor in one cell, over one draft.

Executed again, the cell takes over the draft and what was in view; the older view says so and its threads end. Launching
starts a process of its own: nothing that happens to the notebook touches a run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from engine.config.draft import Draft
from engine.config.files import absolute, placed
from engine.config.schema import read
from engine.data.look import completed
from engine.errors import WorkbenchError, visible
from engine.memory.estimate import estimate
from engine.run.from_config import launch_config, runs_dir_of
from engine.run.index import peek
from engine.run.store import ENDED, RunFolder, runs_in
from widgets.asking import Asker
from widgets.compare import ComparePart
from widgets.form import FormPart
from widgets.monitor import MonitorPart
from widgets.preview import PreviewPart
from widgets.protocol import Face, Part, bundle, shown, style, verb

MOST_RUNS = 40
MOVED = "This workbench goes on in the cell that was run last."


class LaunchPart(Part):
    """Starts the run of a draft beside the kernel's own thread, so that the view stays alive meanwhile."""

    def __init__(self, form: FormPart) -> None:
        self._form = form
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[RunFolder] | None = None

    @verb
    def launch(self) -> dict[str, Any]:
        """Start, unless a start is under way; then ask for `launched`."""
        if self._job is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workbench-launch")
            self._job = self._pool.submit(prepared(self._form))
        return {"done": False}

    @verb
    def launched(self) -> dict[str, Any]:
        job = self._job
        if job is None:
            return {"done": True, "run": ""}
        if not job.done():
            return {"done": False}
        self._job = None
        problem = job.exception()
        if problem is None:
            return {"done": True, "run": job.result().id}
        if isinstance(problem, WorkbenchError):
            return {"done": True, "run": "", "error": shown(problem.told)}
        return {"done": True, "run": "", "error": shown(f"The run could not be started: {problem}")}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def prepared(form: FormPart) -> Callable[[], RunFolder]:
    """The start of the draft as it stands now; read once more with all that is known."""
    draft, base, explicit = form.draft, form.learner.base, form.explicit_runs
    facts, source = placed(completed(draft.facts, draft.config, base), base), draft.path
    reading = read(absolute(draft.mapping, base), facts)
    if not reading.ok:
        first = next(finding for finding in reading.findings if finding.severity == "error")
        raise WorkbenchError(f"The config has an error, so no run was started. {first.message}")
    return lambda: launch_config(
        reading.config,
        facts,
        runs_dir=runs_dir_of(reading.config, reading.given, explicit),
        name=source.stem if source is not None else None,
        forecast_bytes=estimate(reading.config, facts).checkpoints_bytes,
        source=source,
    )


class RunsPart(Part):
    """Lists the runs of the folder, newest first; a run that has not changed is not read again."""

    def __init__(self, runs_dir: Callable[[], Path]) -> None:
        self._runs_dir = runs_dir
        self._known: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}

    @verb
    def runs(self, *, mark: int = 0) -> dict[str, Any]:
        root = self._runs_dir()
        newest = sorted(runs_in(root), key=_touched, reverse=True)[:MOST_RUNS]
        listed = [self._summary(run) for run in newest]
        now = zlib.crc32(repr((str(root), listed)).encode())
        return {"mark": now} if now == mark else {"mark": now, "runs": listed, "folder": visible(str(root))}

    def _summary(self, run: RunFolder) -> dict[str, Any]:
        stamp = _stamp(run)
        known = self._known.get(run.path)
        if known is None or known[0] != stamp:
            known = self._known[run.path] = (stamp, _summary(run))
        return known[1]


def _stamp(run: RunFolder) -> tuple[int, ...]:
    stamp = []
    for path in (run.events, run.json):
        try:
            found = path.stat()
            stamp += [found.st_mtime_ns, found.st_size]
        except OSError:
            stamp += [0, 0]
    return tuple(stamp)


def _touched(run: RunFolder) -> int:
    return max(_stamp(run)[0], _stamp(run)[2])


def _summary(run: RunFolder) -> dict[str, Any]:
    view = peek(run).view
    return {
        "id": run.id,
        "state": view.state,
        "method": visible(view.method),
        "model": shown(view.model, 60),
        "step": view.step,
        "max_steps": view.max_steps,
        "loss": view.latest.get("loss"),
        "started": view.started,
    }


class Workbench(Face):
    """Everything in one cell. `Workbench()` begins anew, `Workbench("file.yaml")` opens a file, `Workbench(draft)` a draft.

    `runs` names the folder for runs; else the config's, $WORKBENCH_RUNS or ./runs. With `fresh` the cell does not take
    over what an earlier one was building.
    """

    _esm = bundle("workbench", entry="workbenchFace")
    _css = style()
    _latest: ClassVar[dict[str, Workbench]] = {}

    def __init__(
        self,
        config: Draft | str | Path | None = None,
        *,
        runs: str | Path | None = None,
        height: int = 480,
        fresh: bool = False,
    ) -> None:
        key = f"{id(config) if isinstance(config, Draft) else Path(config).absolute() if config else ''}|{runs}"
        self.draft: Draft
        before = self._latest.get(key)
        taken = before is not None and not fresh and not before.dispatcher.retired
        if before is not None and taken:
            self.draft = before.draft
        elif isinstance(config, Draft):
            self.draft = config
        else:
            self.draft = Draft.open(config) if config else Draft.new("demo")
        asker = Asker()
        self.form = FormPart(self.draft, asker, runs)
        monitor = MonitorPart(lambda: self.form.runs_dir)
        super().__init__(
            self.form,
            PreviewPart(self.draft, asker),
            LaunchPart(self.form),
            RunsPart(lambda: self.form.runs_dir),
            monitor,
            ComparePart(monitor),
            height=height,
            ends=(asker.close,),
        )
        if before is not None and taken:
            self.form.current = before.form.current
            before.retire(MOVED)
        self._latest[key] = self

    def start(self) -> RunFolder:
        """What the button does: starts a run of the draft as it stands, in a process of its own, and returns its folder.

        Raises WorkbenchError where the config has an error or the run cannot be started.
        """
        return prepared(self.form)()

    def __repr__(self) -> str:
        runs = [run for run in runs_in(self.form.runs_dir) if run.state not in ENDED]
        going = [f"Going on: {visible(run.id)} ({run.state})" for run in runs]
        return "\n".join(["Workbench for fine-tuning", self.form.summary(), *going, "In a terminal: workbench"])

    def close(self) -> None:
        super().close()
        for key, face in list(self._latest.items()):
            if face is self:
                del self._latest[key]
