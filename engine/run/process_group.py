"""The processes that belong to one worker: its ranks, its loaders, whatever they started.

They all carry the run's token in their environment, so they are found even after their parent died. Linux only; where
/proc is missing, nothing is found and the process group is all there is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

from engine.run.lock import holder
from engine.run.process import Identity, carries, identity, identity_from, send
from engine.run.spawn import TOKEN
from engine.run.store import RunFolder

_SETTLE_SECONDS = 1.0


class ProcessTree:
    """All processes that a worker's token marks. `worker` is the worker itself, or torchrun where there are ranks."""

    def __init__(self, token: str, worker: Identity, processes: int) -> None:
        self.token = token
        self.worker = worker
        self.processes = processes
        self.ranks: dict[int, Identity] = {}
        self.lost_rank: tuple[int, Identity] | None = None
        self._suspect: tuple[int, Identity] | None = None
        self._alone = False
        self._killed: set[int] = set()
        self._next_look = 0.0

    def owns(self, process: Identity) -> bool:
        """Whether the process was started with the run's token, which nobody else knows, and is still the same one."""
        return bool(self.token) and process.alive and carries(process.pid, f"{TOKEN}={self.token}")

    def may_be_signalled(self, run: RunFolder, *, leaving: bool = False) -> bool:
        """Whether the worker is proven to be this run's, for who did not start it: what run.json says is no proof.

        All at once: the process is the same one since its start and carries the token, the folder is the very one in
        which it was started, and the run's lock is held by one of its processes. Who is `leaving` may have freed it.
        """
        if not run.is_original or not self.owns(self.worker):
            return False
        record = holder(run)
        if record is None:
            return leaving
        owner = identity_from(record)
        return owner is not None and self.owns(owner)

    def members(self) -> dict[int, tuple[Identity, int | None]]:
        """pid -> (identity, rank) of every living process with the token, but the worker itself."""
        processes: dict[int, tuple[Identity, int | None]] = {}
        if not self.token or not os.path.isdir("/proc/self"):
            return processes
        mark = f"{TOKEN}={self.token}".encode()
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in (self.worker.pid, os.getpid()):
                continue
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    values = file.read().split(b"\0")
            except OSError:
                continue
            if mark in values:
                who = identity(int(name))
                if who is not None:
                    rank = next((value[5:] for value in values if value.startswith(b"RANK=")), b"")
                    processes[who.pid] = (who, int(rank) if rank.isdigit() else None)
        return processes

    @property
    def misses_a_rank(self) -> bool:
        """Whether a rank was gone at the last look, for whatever reason."""
        return self._suspect is not None

    def poll(self, failed: Callable[[], bool]) -> tuple[int, Identity] | None:
        """The rank that died before the others, once torchrun agrees that it failed (`failed`)."""
        if self.lost_rank is not None:
            return self.lost_rank
        if len(self.ranks) < self.processes:
            self._find_ranks()
        if self._suspect is None:
            gone = [(number, who) for number, who in sorted(self.ranks.items()) if not who.alive]
            self._suspect, self._alone = (gone[0] if gone else None), len(gone) == 1
        if self._suspect is not None and failed():
            self.lost_rank = self._suspect
        return self.lost_rank

    def choose_lost_rank(self, failed: Mapping[int, int], *, said: bool = False) -> None:
        """Takes for lost the rank by which the others ended, where several were gone at once: of those in torchrun's report one
        that was killed, though not by us; else, unless the first rank has `said` why, the one that torchrun saw first.

        Those that wait in a message are gone within a tenth of a second after another one's death, and torchrun, which then has
        no rank to close, says so in its report alone.
        """
        if self.lost_rank is not None and self._alone:
            return
        ranks = {who.pid: (number, who) for number, who in self.ranks.items()}
        own = {pid: code for pid, code in failed.items() if pid in ranks and pid not in self._killed}
        killed = [pid for pid, code in own.items() if code == -signal.SIGKILL]
        if (pid := next(iter([*killed, *([] if said else own)]), None)) is not None:
            self.lost_rank = ranks[pid]

    def _find_ranks(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 0.5
        # A rank's own children (loaders) carry its RANK too: the oldest process is the rank.
        for who, rank in sorted(self.members().values(), key=lambda entry: entry[0].start):
            if rank is not None:
                self.ranks.setdefault(rank, who)

    def kill(self) -> None:
        """SIGKILL for all of them but the worker."""
        for who, _ in self.members().values():
            self._killed.add(who.pid)
            send(who, signal.SIGKILL)

    def end(self) -> None:
        """After the worker is gone: a moment for its children to go by themselves, then SIGKILL."""
        give_up = time.monotonic() + (_SETTLE_SECONDS if self.processes == 1 else 0.0)
        while self.members():
            if time.monotonic() >= give_up:
                self.kill()
            if time.monotonic() > give_up + 5.0:
                return
            time.sleep(0.05)
