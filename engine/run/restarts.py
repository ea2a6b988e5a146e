"""`run.max_restarts`: whether a run whose worker died goes on by itself, from where, and after how long.

A new checkpoint is progress and lets the count begin anew. The count stands in run.json, so it outlives a supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import WorkbenchError
from engine.run import cause, checkpoint
from engine.run.store import RunFolder

PAUSE_SECONDS = (1.0, 5.0, 20.0, 60.0)
"""Before a worker is started anew, by how often that was in vain."""


class Restarts:
    """How often the worker of a run was started anew without a new checkpoint."""

    def __init__(self, run: RunFolder, between: Callable[[], None] | None = None) -> None:
        """`between` is called again and again while checkpoints are read, which may take minutes."""
        self.run, self.between = run, between

    def restart_summary(self, final: Mapping[str, Any]) -> str:
        """That the run goes on after this end, and from where, as a sentence, and the count with it; empty where the end
        would only come again, and after `run.max_restarts` starts in vain."""
        if final["kind"] != "failed" or not cause.passes(final):
            return ""
        most = self._most()
        try:
            newest, _ = checkpoint.to_go_on_from(self.run, self.between)
        except (OSError, WorkbenchError):
            return ""  # no worker could begin either
        step = (checkpoint.step_of(newest) if newest is not None else None) or 0
        before = self.run.read_json().get("restarted_from")
        vain = self._in_vain() + 1 if isinstance(before, int) and step <= before else 1
        if vain > most:
            return ""
        try:
            self.run.update_json(restarted_from=step, restarts_in_vain=vain)
        except (OSError, WorkbenchError):
            return ""  # where that cannot be written down, nothing else can
        where = f"checkpoint-{step}" if newest is not None else "the beginning, as there is no checkpoint yet"
        often = f" ({vain} of {most} times without a new checkpoint)" if vain > 1 else ""
        return f"It is started again from {where}{often}."

    def pause(self) -> float:
        """Seconds to wait before the start."""
        return PAUSE_SECONDS[min(max(self._in_vain(), 1), len(PAUSE_SECONDS)) - 1]

    def _in_vain(self) -> int:
        vain = self.run.read_json().get("restarts_in_vain")
        return vain if isinstance(vain, int) else 0

    def _most(self) -> int:
        """`run.max_restarts` as the run's config says it now."""
        from engine.config.files import parse

        try:
            most = (parse(self.run.read_config()).mapping.get("run") or {}).get("max_restarts")
        except (WorkbenchError, OSError, AttributeError):
            return 0
        return most if isinstance(most, int) else 0
