"""run.json as the supervisor of a run writes it: who looks after the run, how it stands, how it ended. Standard library only.

A disk that takes nothing for a while costs no word: what could not be written is kept, and goes with the next one.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from engine.errors import WorkbenchError
from engine.run.process import identity
from engine.run.store import RunFolder


class StateFile:
    """The word of this process, as the run's supervisor, in run.json."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._unwritten: dict[str, Any] = {}
        self._complaint = ""

    def write(self, **changes: Any) -> None:
        """Change these values; nothing is written where all of them stand there. Raises OSError or WorkbenchError."""
        me = identity()
        assert me is not None
        fixed = {"supervisor_pid": me.pid, "supervisor_start": me.start, "boot_id": me.boot, "host": me.host}
        now = self.run.read_json()
        if any(now.get(key) != value for key, value in {**fixed, **changes}.items()):
            self.run.update_json(**fixed, **changes)

    def update(self, **changes: Any) -> None:
        """As `write`; what cannot be written now is kept for the next time, because a worker is watched all the same."""
        self._unwritten |= changes
        if not self._unwritten:
            return
        try:
            self.write(**self._unwritten)
            self._unwritten = {}
        except (OSError, WorkbenchError) as problem:
            if str(problem) != self._complaint:
                self._complaint = str(problem)
                print(f"run.json: {problem}", file=sys.stderr, flush=True)

    def settle(self, seconds: float) -> None:
        """Try for so long to write what could not be written, as long as there is a folder."""
        give_up = time.monotonic() + seconds
        while self._unwritten and self.run.path.is_dir() and time.monotonic() < give_up:
            time.sleep(1.0)
            self.update()
