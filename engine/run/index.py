"""Watching a run: newest first, the whole curve soon after, and at once the next time.

`open_view` folds the newest stretch of the events so that state, values and the last ten thousand points are there; a
helper process (`python -P -m engine.run.index FOLDER OUT`) folds the whole file meanwhile and leaves a snapshot in
`index/`, which the watch then takes over and later openings start from. `Watch.poll` never works longer than its budget.
A watch also sees to it that the run has a supervisor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError, redact, visible
from engine.run import inside, launch, pruning, slurm, snapshot
from engine.run.cause import log_tail
from engine.run.lock import is_held
from engine.run.series import KEEP_POINTS
from engine.run.silence import silent_for
from engine.run.spawn import python, safe_python
from engine.run.store import ENDED, STATES, RunFolder
from engine.run.tail import Tail
from engine.run.view import RunView, fold

HEAD_BYTES = 1 << 16
# So far back a list looks for the newest best step, which held-out rows are measured for now and then.
BEST_BYTES = 1 << 20
_BLOCK = 1 << 20
POLL_SECONDS = 0.012
FOLDER_SECONDS = 0.5
LOADING_SECONDS = 0.02
# After a supervisor that could not begin its work, the next is tried later.
AGAIN_SECONDS = 10.0
# Below this a snapshot saves less than it costs.
WORTH_KEEPING = 1 << 20
_BATCH = 100


class Watch:
    """One reader of one run. Not thread-safe; `open_view` may take a quarter of a second, `poll` never stalls."""

    def __init__(self, folder: RunFolder, problem: str = "") -> None:
        self.folder = folder
        self._met = problem
        self.loading = 1.0
        self.details: dict[str, Any] = {}
        self.problem = ""
        self._view, self._tail = RunView(), Tail(folder.events)
        self._folded = ("starting", "")
        self._helper: subprocess.Popen[bytes] | None = None
        self._helper_out: Path | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._attending: subprocess.Popen[bytes] | None = None
        self._next_folder_look = self._next_attending = 0.0
        self._stamp: tuple[int, int] | None = None
        self._saved_at = 0
        self._restarts = 0
        self._news_at = _last_write(folder)
        self._open()

    @property
    def view(self) -> RunView:
        """The run as it is known now. Changes in place with `poll`; `view.copy()` keeps."""
        return self._view

    def poll(self, budget: float = POLL_SECONDS) -> bool:
        """Take in what is new, for at most `budget` seconds; tells whether anything changed."""
        deadline = time.monotonic() + budget
        changed = self._take_over()
        before = (self._view.seq, self._view.bad_lines)
        self._fold_until(deadline)
        if self._tail.restarts != self._restarts:
            self._restart()
        if before != (self._view.seq, self._view.bad_lines):
            self._news_at, changed = time.monotonic(), True
        changed |= self._listen_for_silence()
        changed |= self._read_folder()
        self._keep()
        return changed

    def read_completely(self) -> None:
        """Wait until the curve between a long run's beginning and its end is read too, which may take seconds."""
        while self.loading < 1:
            self.poll()
            time.sleep(LOADING_SECONDS)

    def log(self, lines: int = 200, rank: int = 0) -> list[str]:
        """The last lines of the worker's log, or of another rank's own, redacted and safe to show; a progress bar counts as
        its last state."""
        text = log_tail(self.folder.log_of(rank), max(4096, lines * 400))
        shown = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
        if shown and not shown[-1]:
            shown.pop()
        return [visible(redact(line)) for line in shown[-lines:]]

    def close(self) -> None:
        """Stop the helper and leave a snapshot for the next opening."""
        if self._helper is not None:
            self._helper.kill()
            self._helper.communicate()
            self._helper = None
        elif self.loading >= 1.0 and self._tail.offset - self._saved_at > WORTH_KEEPING:
            self._save()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        stored = snapshot.load(self.folder)
        if stored is not None:
            self._view, offset = stored
            self._tail = Tail(self.folder.events, offset)
            self._saved_at = offset
        newest = _newest_offset(self.folder)
        self._restarts = self._tail.restarts
        if newest > self._tail.offset + HEAD_BYTES:
            if stored is None:
                fold(self._view, _head(self.folder))
            self.loading = self._tail.offset / max(1, self._tail.size())
            self._tail = Tail(self.folder.events, newest)
        self._restarts = self._tail.restarts
        self._folded = (self._view.state, self._view.cause)
        self._fold_until(float("inf"))
        self._read_folder(at_once=True)
        self._listen_for_silence()
        if self.loading < 1.0:
            self._start_helper()

    def _restart(self) -> None:
        """The events file was cut or replaced under us: what was known of it no longer holds."""
        self.close()
        self._view, self._tail = RunView(), Tail(self.folder.events)
        self._restarts, self._saved_at, self.loading = 0, 0, 1.0
        self._folded = ("starting", "")
        self._stamp = None
        self._open()

    def _fold_ends(self, newest: int) -> None:
        """The first stretch of the events, that of the newest start, and the last `newest` bytes."""
        size = self._tail.size()
        if size > newest + HEAD_BYTES:
            start = _line_start(self.folder, size - newest)
            fold(self._view, _head(self.folder))
            fold(self._view, _between(self.folder, start, self._view.segment))
            self._tail = Tail(self.folder.events, start)
        self._folded = (self._view.state, self._view.cause)
        self._fold_until(float("inf"))

    def _fold_until(self, deadline: float) -> None:
        view = self._view
        view.state, view.cause = self._folded
        known_bad = self._tail.bad_lines
        while events := self._tail.read(_BATCH):
            fold(view, events)
            if time.monotonic() >= deadline:
                break
        view.bad_lines += self._tail.bad_lines - known_bad
        self._folded = (view.state, view.cause)
        self._note_state()

    # -- the whole curve -------------------------------------------------------------------------------------------

    def _start_helper(self, *, elsewhere: bool = False) -> None:
        out = self.folder.index
        if elsewhere or not os.access(out if out.exists() else out.parent, os.W_OK):
            self._temporary = tempfile.TemporaryDirectory(prefix="workbench-index-")
            out = Path(self._temporary.name)
        self._helper_out = out
        self._helper = subprocess.Popen(
            [*python(), "-m", "engine.run.index", str(self.folder.path), str(out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, **safe_python(os.environ)},
        )
        assert self._helper.stdout is not None
        os.set_blocking(self._helper.stdout.fileno(), False)

    def _take_over(self) -> bool:
        """Follow the helper's progress; when it is done, go on from its snapshot."""
        helper = self._helper
        if helper is None or helper.stdout is None:
            return False
        output = helper.stdout.read() or b""
        lines = output.split()
        if lines:
            self.loading = max(self.loading, min(0.999, float(lines[-1])))
        if helper.poll() is None:
            return bool(lines)
        helper.stdout.close()
        self._helper = None
        stored = snapshot.load(self.folder, self._helper_out) if helper.returncode == 0 else None
        if stored is None and self._temporary is None:
            # The folder may be full or not ours to write: once more, in a place of our own.
            self._start_helper(elsewhere=True)
            return True
        if stored is None:
            # Without its work the newest stretch is what there is; the curve before it stays away.
            self.loading = 1.0
            return True
        self._view, offset = stored
        restarts = self._tail.restarts
        self._tail = Tail(self.folder.events, offset)
        self._tail.restarts = restarts
        self._saved_at = offset
        self._folded = (self._view.state, self._view.cause)
        self.loading = 1.0
        return True

    def _keep(self) -> None:
        """A snapshot now and then, so that the next opening has little left to read."""
        grown = self._tail.offset - self._saved_at
        if self._helper is None and (
            grown > 16 * WORTH_KEEPING or (grown > WORTH_KEEPING and self._folded[0] in ENDED)
        ):
            self._save()

    def _save(self) -> None:
        view = self._view
        shown = (view.state, view.cause)
        view.state, view.cause = self._folded
        snapshot.save(self.folder, view, self._tail.offset)
        view.state, view.cause = shown
        self._saved_at = self._tail.offset

    # -- the folder ------------------------------------------------------------------------------------------------

    def _read_folder(self, *, at_once: bool = False) -> bool:
        """What run.json knows beyond the events: a start that has none yet, and an end that left none."""
        now = time.monotonic()
        if now < self._next_folder_look and not at_once:
            return False
        self._next_folder_look = now + FOLDER_SECONDS
        if self._attending is not None and self._attending.poll() is not None:
            self._met = ""
            if self._attending.returncode:
                self._met = "It has no supervisor, and none could begin its work."
                self._next_attending = now + AGAIN_SECONDS
            self._attending = None
        flaw, unattended = self.folder.flaw(), launch.unattended(self.folder)
        self.problem = flaw or (self._met if unattended else "")
        before = (self._view.state, self._view.cause, self._view.committed)
        try:
            info = os.stat(self.folder.json)
            stamp = (info.st_mtime_ns, info.st_ino)
        except OSError:
            stamp = None
        if stamp != self._stamp:
            self._stamp = stamp
            self.details = self.folder.read_json()
        job = self.details.get("cluster") == slurm.NAME and self.details.get("state") not in ENDED
        alone = (unattended or job) and self._attending is None and not flaw and now >= self._next_attending
        if alone and os.access(self.folder.path, os.W_OK):
            self._attending = launch.attend_soon(self.folder)
            if job:
                self._next_attending = now + AGAIN_SECONDS
        self._note_state()
        self._note_pruned()
        return before != (self._view.state, self._view.cause, self._view.committed)

    def _listen_for_silence(self) -> bool:
        """Note how long nothing came, where that is too long; tells whether that changed."""
        before = self._view.silent_seconds
        self._view.silent_seconds = silent_for(self._view, time.monotonic() - self._news_at)
        return before != self._view.silent_seconds

    def _note_state(self) -> None:
        view, details = self._view, self.details
        view.id = self.folder.id
        view.method = view.method or str(details.get("method") or "")
        view.model = view.model or str(details.get("model") or "")
        state, cause = self._folded
        written = details.get("state")
        segment = details.get("segment")
        # Before the worker's first word of a segment, only run.json knows of it.
        newer = isinstance(segment, int) and segment > view.segment
        job = bool(details.get("cluster"))
        if written in STATES and (state not in ENDED or newer):
            if (
                written in ENDED
                or written == "stopping"
                or newer
                or (written == "queued" and (job or view.segment < 0))
            ):
                state, cause = written, str(details.get("message") or "")
        elif state in ("starting", "running", "stopping") and not details:
            state = "lost"
        elif job and state == "stopped" and written in ENDED:
            cause = str(details.get("message") or "") or cause
        elif job and written in STATES and written not in ENDED:
            # The end of a segment: whether the job goes on its supervisor has yet to say.
            if written in ("queued", "starting"):
                state, cause = written, str(details.get("message") or "")
            elif state != "finished":
                state, cause = "stopping", ""
        if self.problem:
            # Nobody can write down here what became of it; its own last word stays.
            unseen = state not in ENDED and launch.unattended(self.folder) and not is_held(self.folder)
            state, cause = "lost" if unseen else state, cause if state in ENDED and cause else self.problem
        view.state, view.cause = state, cause

    def _note_pruned(self) -> None:
        """The log ends with the run; what a person removed afterwards is known to the folder alone."""
        gone = pruning.pruned_steps(self.folder)
        for entry in self._view.checkpoints if gone else ():
            if entry["step"] in gone and entry["state"] == "committed":
                entry["state"] = "deleted"


def open_view(folder: RunFolder, *, problem: str = "") -> Watch:
    """Start watching: state, newest values and the newest points are there when this returns. `problem` is why the run
    could not be given a supervisor, where the caller tried."""
    return Watch(folder, problem)


def peek(folder: RunFolder, newest: int = HEAD_BYTES, *, problem: str = "") -> Watch:
    """A look without staying: only the first and the last events are read, and where it was
    resumed the first since then. For lists of runs; `view.series` is short.

    It never fails: what is wrong with a run, or `problem` where the caller met one, becomes its cause.
    """
    watch = Watch.__new__(Watch)
    watch.folder, watch.loading, watch.details = folder, 1.0, folder.read_json()
    watch._view, watch._tail = RunView(), Tail(folder.events)
    watch._helper = watch._temporary = watch._attending = None
    watch.problem = problem or folder.flaw()
    watch._folded = (watch._view.state, watch._view.cause)
    try:
        watch._fold_ends(newest)
    except (OSError, WorkbenchError) as problem_met:
        watch.problem = watch.problem or f"Its events cannot be read: {getattr(problem_met, 'strerror', problem_met)}."
    watch._note_state()
    watch._note_pruned()
    watch._news_at = _last_write(folder)
    watch._listen_for_silence()
    return watch


def _last_write(folder: RunFolder) -> float:
    """When the events were written last, on this process's own clock."""
    try:
        age = time.time() - max(os.stat(path).st_mtime for path in (folder.events, folder.json) if path.exists())
    except (OSError, ValueError):
        age = 0.0
    return time.monotonic() - max(0.0, age)


def _head(folder: RunFolder) -> list[dict[str, Any]]:
    """The events of the first stretch: what the run is, its receipt, its first findings."""
    with open(inside.open_file(folder, folder.events), "rb") as file:
        count = file.read(HEAD_BYTES).count(b"\n")
    return Tail(folder.events).read(count) if count else []


def _between(folder: RunFolder, start: int, segment: int) -> list[dict[str, Any]]:
    """What stands before `start` and still holds there: the first events since a resume that came after `segment`, with the
    steps it goes to and its receipt, and the best step."""
    events: list[dict[str, Any]] = []
    began = 0
    newest = Tail(folder.events, start).read(1)
    if newest and newest[0].get("segment", 0) != segment:
        began = _last_line(folder, start, b'"kind":"started"', start - HEAD_BYTES)
        if began:
            with open(inside.open_file(folder, folder.events), "rb") as file:
                file.seek(began)
                count = file.read(min(HEAD_BYTES, start - began)).count(b"\n")
            events += Tail(folder.events, began).read(count)
    best = _last_line(folder, start, b'"kind":"best"', BEST_BYTES)
    if best > began:
        events += Tail(folder.events, best).read(1)
    return events


def _last_line(folder: RunFolder, end: int, mark: bytes, most: int) -> int:
    """Where the last line begins that has `mark`, in the `most` bytes before `end`; 0 where none does."""
    low, rest = max(0, end - most), b""
    with open(inside.open_file(folder, folder.events), "rb") as file:
        while end > low:
            at = max(low, end - _BLOCK)
            file.seek(at)
            block = file.read(end - at) + rest
            line = block.rfind(b"\n", 0, max(0, block.rfind(mark))) + 1
            if line:
                return at + line
            # The rest of a line that begins further back.
            rest, end = block[: block.find(b"\n") + 1] or block, at
    return 0


def _line_start(folder: RunFolder, offset: int) -> int:
    """The first start of a line at or after `offset`."""
    if offset <= 0:
        return 0
    with open(inside.open_file(folder, folder.events), "rb") as file:
        file.seek(offset - 1)
        while block := file.read(1 << 16):
            newline = block.find(b"\n")
            if newline >= 0:
                return file.tell() - len(block) + newline + 1
        return file.tell()


def _newest_offset(folder: RunFolder) -> int:
    """Where the last ten thousand lines begin, going by the length of the last few."""
    size = Tail(folder.events).size()
    if size <= 4 * HEAD_BYTES:
        return 0
    with open(inside.open_file(folder, folder.events), "rb") as file:
        file.seek(size - HEAD_BYTES)
        lines = file.read(HEAD_BYTES).count(b"\n")
    return _line_start(folder, size - (KEEP_POINTS + 200) * (HEAD_BYTES // max(1, lines)))


def build(folder: RunFolder, out: Path) -> bool:
    """Fold the whole file as it stands now and leave a snapshot in `out`; says its progress on stdout."""
    stored = snapshot.load(folder, out)
    view, offset = stored if stored is not None else (RunView(), 0)
    tail = Tail(folder.events, offset)
    end, reported = tail.size(), 0.0
    while tail.offset < end and (events := tail.read(5000)):
        fold(view, events)
        if time.monotonic() - reported > 0.2:
            reported = time.monotonic()
            print(f"{tail.offset / end:.4f}", flush=True)
    view.bad_lines += tail.bad_lines
    return snapshot.save(folder, view, tail.offset, out)


if __name__ == "__main__":
    # Nobody waits in front of a screen for this process: it must not slow those who do.
    os.nice(10)
    sys.exit(0 if build(RunFolder(sys.argv[1]), Path(sys.argv[2])) else 1)
