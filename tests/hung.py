"""A run whose worker lives, took a step each second and then hangs in one call of C; the clock of its events is put back."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.run import inside
from engine.run.process import identity
from engine.run.spawn import TOKEN
from engine.run.store import RunFolder

_WORKER = """
import sys
from engine.run import stack
from engine.run.lock import RunLock
from engine.run.store import RunFolder
run = RunFolder(sys.argv[1])
lock = RunLock(run).acquire()
stack.listen(run)
def deep_inside():
    print("ready", flush=True)
    sum(range(10 ** 13))  # one call of C that never comes back
deep_inside()
"""


def steps_taken(run: RunFolder) -> None:
    """Step 7 of 100; this very process stands in for worker and supervisor."""
    lines = [{"kind": "started", "method": "sft", "model": "m", "max_steps": 100, "pauses": [10, 20], "keep_every": 1}]
    lines += [{"kind": "metrics", "step": step, "loss": 1.0} for step in range(1, 8)]
    run.events.write_text(
        "".join(
            json.dumps({"v": 1, "seq": seq, "t": 1e9 + seq, "rank": 0, "segment": 0, **line}) + "\n"
            for seq, line in enumerate(lines)
        )
    )
    me = identity()
    assert me is not None
    who = {"worker_pid": me.pid, "worker_start": me.start, "supervisor_pid": me.pid, "supervisor_start": me.start}
    run.update_json(state="running", segment=0, created=time.time(), boot_id=me.boot, host=me.host, **who)


def put_back(run: RunFolder, seconds: float) -> None:
    """The run's last event and record become so many seconds old."""
    for path in (run.events, run.json):
        os.utime(path, (time.time() - seconds,) * 2)


@contextlib.contextmanager
def in_c(run: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """The worker of a run whose `steps_taken` are written, hanging in `deep_inside`."""
    child = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(run.path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), TOKEN: "a" * 32},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        who = identity(child.pid)
        assert who is not None
        proof = {"token": "a" * 32, "folder": inside.identity(run)}
        run.update_json(worker_pid=who.pid, worker_start=who.start, **proof)
        yield child
    finally:
        child.kill()
        child.communicate()
