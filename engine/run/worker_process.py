"""The worker of a run as its supervisor has it: a child of this process, or one that an earlier supervisor started.

Whether it lives and how it exited, whether it may be signalled, and why it ended by what this machine knows. Standard
library only.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from engine.run import cause
from engine.run.process import Identity, boot_id, busy_seconds, host, identity, send
from engine.run.process_group import ProcessTree
from engine.run.store import RunFolder


class WorkerProcess:
    """A worker (torchrun, where it has ranks) and its family. `log_from`: the byte of its log at which its own words begin."""

    def __init__(
        self,
        run: RunFolder,
        who: Identity,
        family: ProcessTree,
        *,
        log_from: int = 0,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.run, self.who, self.family, self.log_from = run, who, family, log_from
        self._child = child
        self._oom_before = cause.oom_kills()

    @classmethod
    def started(
        cls, run: RunFolder, child: subprocess.Popen[bytes], token: str, processes: int, log_from: int
    ) -> WorkerProcess:
        """A child of this process, whose descendants carry the token."""
        who = identity(child.pid) or Identity(child.pid, 0, boot_id(), host())
        return cls(run, who, ProcessTree(token, who, processes), log_from=log_from, child=child)

    @classmethod
    def adopted(cls, run: RunFolder) -> WorkerProcess | None:
        """The worker that run.json names; None where that is gone, or not proven to be this run's."""
        values, who = run.read_json(), run.worker()
        if who is None:
            return None
        family = ProcessTree(str(values.get("token") or ""), who, int(values.get("processes") or 1))
        if not family.owns(who):
            return None
        log_from = values.get("log_from")
        return cls(run, who, family, log_from=log_from if isinstance(log_from, int) else 0)

    def exit_code(self) -> int | None:
        """How it exited; None while it lives, and for one that is no child."""
        return self._child.poll() if self._child is not None else None

    @property
    def lives(self) -> bool:
        """Whether it is there; of a child `exit_code` says so."""
        return self._child is not None or self.who.alive

    def may_be_signalled(self, *, leaving: bool) -> bool:
        """A child of this process is the worker for certain; of any other that has to be proven at this very moment."""
        return self._child is not None or self.family.may_be_signalled(self.run, leaving=leaving)

    def busy_seconds(self) -> dict[tuple[int, int, int], float]:
        """How long each thread of the worker, its ranks and whatever they started has computed, or waited for a core to."""
        busy: dict[tuple[int, int, int], float] = {}
        for pid in (self.who.pid, *self.family.members()):
            busy |= busy_seconds(pid)
        return busy

    def send(self, number: int) -> None:
        """Signal the worker itself, if it is still the same process."""
        send(self.who, number)

    def kill(self) -> None:
        """SIGKILL for all of the family, the worker last."""
        self.family.kill()
        self.send(signal.SIGKILL)

    def explain(self, code: int | None, *, node: int | None = None) -> cause.Cause:
        """Why it ended, by its exit code, its log and the kernel; `node`: this machine's rank among several."""
        if self.family.lost_rank is not None:
            place = None if node is None else f"node {node}, {host()}"
            return explain_lost_rank(self.run, self.family, self.run.log, self.log_from, place)
        # An adopted worker leaves no exit code, but the kernel's log may still name it.
        memory = code in (None, -signal.SIGKILL) and cause.kernel_ended(self.who)
        memory = memory or (code == -signal.SIGKILL and -1 < self._oom_before < cause.oom_kills())
        return cause.explain(code, self.run.log, log_from=self.log_from, out_of_memory=memory)


def explain_lost_rank(
    run: RunFolder, family: ProcessTree, log: Path, log_from: int, place: str | None = None, code: int | None = None
) -> cause.Cause:
    """Why the family's lost rank ended; `place` names its node and host where there are several, `code` is its exit code where
    torchrun's report in the log lacks it. One that has only lost another, both being gone at once, is told in the words of that."""
    assert family.lost_rank is not None
    codes = cause.failed_ranks(log, log_from)

    def told(rank: int, process: Identity, ended: int | None, own: Path, begin: int) -> cause.Cause:
        where = f"process {process.pid} on {host()}" if place is None else f"{place}, process {process.pid}"
        killed = cause.kernel_ended(process)
        return cause.explain(ended, own, log_from=begin, out_of_memory=killed, who=f"Rank {rank} ({where})")

    rank, process = family.lost_rank
    found = told(
        rank, process, codes.get(process.pid, code), *cause.log_of_rank(log, log_from, run.log_of(rank), process.pid)
    )
    if not found.follows:
        return found
    for number, other in sorted(family.ranks.items()):
        own, begin = cause.log_of_rank(log, log_from, run.log_of(number), other.pid)
        if number != rank and own != log and not (said := told(number, other, 1, own, begin)).follows:
            return said
    return found
