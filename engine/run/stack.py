"""Where a worker is at this moment: its Python stack, on request, also while it hangs in a C call.

The worker registers faulthandler on a signal that is ignored by default, so asking can end nothing, whoever it reaches;
each rank appends to a file of its own in the run folder. Asking signals the worker, or each rank, and reads what came.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time

from engine.errors import WorkbenchError, redact, visible
from engine.run import inside
from engine.run.process import Identity, send
from engine.run.process_group import ProcessTree
from engine.run.store import ENDED, RunFolder

SIGNAL = signal.SIGURG
PATIENCE, SETTLED = 5.0, 0.3
MOST_BYTES = 256 << 10


_listening: list[int] = []


def listen(run: RunFolder) -> None:
    """From now on this process writes its stack when asked. Its file stays open as long as the process lives, or until it
    listens for another run."""
    handle = inside.open_file(run, _file(int(os.environ.get("RANK", "0"))), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(SIGNAL, file=handle, all_threads=True)
    while _listening:
        os.close(_listening.pop())
    _listening.append(handle)


def ask(run: RunFolder) -> str:
    """The stacks of the run's worker, of each rank where there are several, redacted and safe to show.

    Raises WorkbenchError where there is no worker to ask, or none that answers.
    """
    worker = run.worker()
    if run.state in ENDED or worker is None or not worker.alive:
        raise WorkbenchError(f"run {run.id} has no worker at work here; its state is {run.state}.")
    values = run.read_json()
    family = ProcessTree(str(values.get("token") or ""), worker, int(values.get("processes") or 1))
    if not family.may_be_signalled(run):
        raise WorkbenchError(f"run {run.id}: process {worker.pid} is not proven to be its worker, so it is not asked.")
    asked = {rank: (who, _size(run, _file(rank))) for rank, who in _ranks(run, worker).items()}
    for who, _ in asked.values():
        send(who, SIGNAL)
    texts = {rank: _new_text(run, _file(rank), before) for rank, (_, before) in asked.items()}
    silent = [rank for rank, text in texts.items() if not text]
    if len(silent) == len(texts):
        stopped = all(is_stopped(who) for who, _ in asked.values())
        why = (
            "it is stopped by a signal (SIGSTOP)" if stopped else "it is still starting, or its system does not run it"
        )
        hint = f"`kill -CONT {worker.pid}` lets it go on." if stopped else ""
        raise WorkbenchError(f"run {run.id}: process {worker.pid} does not answer: {why}.", hint)
    parts = []
    for rank, text in texts.items():
        head = f"process {asked[rank][0].pid}" + (f", rank {rank}" if len(texts) > 1 else "")
        parts.append(f"{head}:\n{text or 'no answer'}")
    return visible(redact("\n\n".join(parts)), lines=True)


def _ranks(run: RunFolder, worker: Identity) -> dict[int, Identity]:
    values = run.read_json()
    processes = values.get("processes")
    if not isinstance(processes, int) or processes <= 1:
        return {0: worker}
    family = ProcessTree(str(values.get("token") or ""), worker, processes)
    family.poll(lambda: False)
    return family.ranks or {0: worker}


def _file(rank: int) -> str:
    return "stack.txt" if rank == 0 else f"stack-{rank}.txt"


def _size(run: RunFolder, name: str) -> int:
    try:
        return inside.lstat(run, name).st_size
    except OSError:
        return 0


def _new_text(run: RunFolder, name: str, before: int) -> str:
    """What is written after `before`, once it stops growing."""
    give_up, size, since = time.monotonic() + PATIENCE, before, time.monotonic()
    while time.monotonic() < give_up:
        now = _size(run, name)
        if now != size:
            size, since = now, time.monotonic()
        elif size > before and time.monotonic() - since >= SETTLED:
            break
        time.sleep(0.02)
    if size <= before:
        return ""
    with open(inside.open_file(run, name), "rb") as file:
        file.seek(before)
        return file.read(MOST_BYTES).decode("utf-8", "replace").strip()


def is_stopped(who: Identity) -> bool:
    """Whether a signal has stopped the process (SIGSTOP), as far as that can be seen from here."""
    try:
        with open(f"/proc/{who.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False
