"""Why a training failed, in the worker's own words: the cause, a sentence, and the changes after which it would not come again.

Of a worker that could not say so itself the supervisor tells (`engine.run.cause`). No torch until something has failed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from engine.errors import Diverged, WorkbenchError, first_line, redact, visible
from engine.run import checkpoint, proposals
from engine.run.store import RunFolder

_GONE = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
_NO_DETERMINISM = "does not have a deterministic implementation"


def mends(problem: Exception) -> list[Mapping[str, Any]]:
    """Changes of the config after which this would not come again."""
    if isinstance(problem, WorkbenchError):
        return list(problem.mends)
    return [{"run.full_determinism": False}] if _NO_DETERMINISM in str(problem) else []


def lost_rank(problem: Exception) -> bool:
    """Whether a message to another rank failed because that one is gone, in gloo's words."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and isinstance(problem, RuntimeError) and any(words in str(problem) for words in _GONE)


def cause_of(problem: Exception, run: RunFolder | None = None) -> tuple[str, str]:
    """A word for machines and a sentence for people, redacted and safe for a terminal, with the way on by the run's config."""
    import torch

    settings = proposals.settings_of(run) if run is not None else {}
    if isinstance(problem, Diverged):
        newest = checkpoint.newest_valid(run, hashes=False)[0] if run is not None else None
        way = proposals.after_divergence(settings, newest.name if newest else None)
        return "diverged", visible(redact(f"{problem.full_message} {way}"))
    if isinstance(problem, WorkbenchError):
        return problem.cause, visible(redact(problem.full_message))
    if isinstance(problem, torch.cuda.OutOfMemoryError):
        return "cuda_oom", f"The GPU ran out of memory. {proposals.after_out_of_memory(settings)}"
    # torch has no type of its own for the host's memory.
    if isinstance(problem, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(problem):
        return (
            "host_oom",
            f"This machine ran out of memory. {proposals.after_out_of_memory(settings)}",
        )
    first = first_line(problem)
    if _NO_DETERMINISM in first:
        operation = visible(first.split(" does not have")[0])[:200]
        return "error", f"run.full_determinism: {operation} has no deterministic form on this device. Set it to false."
    return "exception", visible(redact(f"{type(problem).__name__}: {first}"))[:2000]
