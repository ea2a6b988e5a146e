"""`Workbench()`: the guided first run, the seven steps, the preview, the launch and the monitor in one cell, over one draft.

Executed again, the cell takes over the draft and what was in view; the older view says so and its threads end. Launching
starts a process of its own: nothing that happens to the notebook touches a run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from engine.bridge.ledger import Ledger
from engine.errors import WorkbenchError, visible
from engine.run import silence
from engine.run.index import peek
from engine.run.store import ENDED, RunFolder, runs_in
from engine.run.view import RunView
from engine.session.build import BuildSession
from engine.session.draft import Draft
from engine.session.opening import open_config
from widgets.asking import Asker
from widgets.chat import ChatPart
from widgets.columns import ColumnsPart
from widgets.compare import ComparePart
from widgets.form import FormPart
from widgets.guide import GuidePart
from widgets.ledger import LedgerPart
from widgets.monitor import monitoring
from widgets.preview import PreviewPart
from widgets.protocol import NotebookWidget, Part, bundle, news, shown, style, verb
from widgets.reader import Runs
from widgets.template import TemplatePart

MOST_RUNS = 40
MOVED = "This workbench goes on in the cell that was run last."


class LaunchPart(Part):
    """Starts the run of a draft beside the kernel's own thread, so that the view stays alive meanwhile."""

    def __init__(self, session: BuildSession) -> None:
        self._session = session
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[RunFolder] | None = None

    @verb
    def launch(self) -> dict[str, Any]:
        """Start, unless a start is under way; then ask for `launched`."""
        if self._job is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workbench-launch")
            self._job = self._pool.submit(self._session.launch())
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
        error = problem.full_message if isinstance(problem, WorkbenchError) else f"{type(problem).__name__}: {problem}"
        return {"done": True, "run": "", "error": shown(error)}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


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
        return news({"runs": listed, "folder": visible(str(root))}, mark)

    def _summary(self, run: RunFolder) -> dict[str, Any]:
        stamp = _stamp(run)
        known = self._known.get(run.path)
        # A run that goes on may fall silent, which no file of it tells.
        if known is None or known[0] != stamp or known[1]["state"] not in ENDED:
            known = self._known[run.path] = (stamp, _summary(run))
        return known[1]


def _stamp(run: RunFolder) -> tuple[int, ...]:
    stamp = []
    for path in (run.events, run.json):
        try:
            info = path.stat()
            stamp += [info.st_mtime_ns, info.st_size]
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
        "silent": silence.describe(view.silent_seconds),
        "why": shown(_why(view), 300),
        "method": visible(view.method),
        "model": shown(view.model, 60),
        "step": view.step,
        "max_steps": view.max_steps,
        "loss": view.latest.get("loss"),
        "reward": view.latest.get("reward"),
        "started": view.started,
    }


def _opened(config: str | Path | None) -> tuple[Draft, Ledger | None]:
    """The draft of a file, or the demo's; for a config of another tool an empty one, and its ledger."""
    if not config:
        return Draft.new("demo"), None
    opened = open_config(Path(config))
    return (opened, None) if isinstance(opened, Draft) else (Draft(), opened)


def _why(view: RunView) -> str:
    """What a person should know about a run in the list: why it ended badly, or what its silence means."""
    if view.silent_seconds is not None:
        return silence.advice(view.id, view.silent_seconds)
    return "" if view.state in ("finished", "stopped") else view.cause


class Workbench(NotebookWidget):
    """Everything in one cell. `Workbench()` begins anew, `Workbench("file.yaml")` opens a file, `Workbench(draft)` a draft.

    A config of Axolotl, LLaMA-Factory or TRL opens with the ledger of its keys, and a button takes it over.

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
        self.ledger: Ledger | None = None
        """What becomes of the file's keys, where it is another tool's."""
        before = self._latest.get(key)
        taken = before is not None and not fresh and not before.dispatcher.retired
        if before is not None and taken:
            self.draft, self.ledger = before.draft, before.ledger
        elif isinstance(config, Draft):
            self.draft = config
        else:
            self.draft, self.ledger = _opened(config)
        asker = Asker()
        self.form = FormPart(self.draft, asker, runs)
        self.ledger_part: LedgerPart = (
            before.ledger_part if before is not None and taken else LedgerPart(self.draft, self.ledger)
        )
        known = Runs(lambda: self.form.session.runs_dir)
        walked = before.guide.so_far if before is not None and taken else None
        self.guide: GuidePart = GuidePart(self.form.session, asker.ask, known, self.form.to_step, walked)
        super().__init__(
            self.form,
            PreviewPart(self.draft, asker),
            ColumnsPart(self.draft, asker, self.form.session.edit),
            TemplatePart(self.draft, asker, self.form.session.edit),
            LaunchPart(self.form.session),
            RunsPart(lambda: self.form.session.runs_dir),
            *monitoring(known),
            ComparePart(known),
            ChatPart(known.folder),
            self.ledger_part,
            self.guide,
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
        return self.form.session.launch()()

    def __repr__(self) -> str:
        runs = [run for run in runs_in(self.form.session.runs_dir) if run.state not in ENDED]
        going = [f"Going on: {visible(run.id)} ({run.state})" for run in runs]
        ledger = [self.ledger_part.summary()] if self.ledger is not None else []
        return "\n".join(
            ["Workbench for fine-tuning", *ledger, self.form.summary(), *going, "In a terminal: workbench"]
        )

    def close(self) -> None:
        super().close()
        for key, widget in list(self._latest.items()):
            if widget is self:
                del self._latest[key]
