"""The ranks of a run that wait for each other, on this machine and on others: they meet, and one's end is the end of all.

A rank that died takes the others with it, and so does one that hangs, and a node that ended or fell silent; whichever it was
is the one that is named. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

from engine.errors import Cancelled
from engine.run import cause, spawn
from engine.run.devices import Choice
from engine.run.hang import Hang
from engine.run.inside import UnsafeRunFile
from engine.run.network import refuse_absent
from engine.run.nodes import REACH_SECONDS, FirstNode, interface, rendezvous_of
from engine.run.store import RunFolder
from engine.run.worker_process import WorkerProcess


class Peers:
    """All ranks of a run; of one that has a single process nothing is watched."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.node: FirstNode | None = None
        self.hung: cause.Cause | None = None
        self._hang: Hang | None = None

    def gather(
        self, choice: Choice, versions: Mapping[str, str], wait: Callable[[str], None], is_to_end: Callable[[], bool]
    ) -> spawn.Group | None:
        """Have the other nodes come; this one's place among them, None in a run on one machine. `wait` is called again and
        again until then, with how many have come.

        Raises WorkbenchError where they do not come or fit, and Cancelled where the run `is_to_end` meanwhile.
        """
        rendezvous = rendezvous_of(self.run)
        if rendezvous.nodes == 1:
            return None
        refuse_absent(os.environ)
        node = self.node = self.node or FirstNode(self.run, rendezvous)

        def between_looks(came: int) -> None:
            if is_to_end():
                raise Cancelled(f"Stopped while {came} of {node.nodes} nodes had come.")
            wait(f"waits at {node.endpoint}: {came} of {node.nodes} nodes came")

        node.gather(choice.processes, versions, between_looks)
        way = interface(node.endpoint, elsewhere=node.has_others_elsewhere)
        return spawn.Group(0, node.nodes, node.endpoint, way, REACH_SECONDS)

    def go_on(self) -> None:
        """Speak for this node again, after a supervisor that is gone."""
        rendezvous = rendezvous_of(self.run)
        if rendezvous.nodes > 1:
            self.node = FirstNode(self.run, rendezvous)
            self.node.go_on()

    def begin(self, worker: WorkerProcess) -> None:
        """Watch the heartbeats of all ranks, where there are several."""
        ranks = worker.family.processes * (1 if self.node is None else self.node.nodes)
        self._hang, self.hung = (Hang(self.run, ranks) if ranks > 1 else None), None

    def watch(self, worker: WorkerProcess, *, ended: bool, asked: bool) -> None:
        """Ranks that cannot go on without another are ended. `ended`: the first rank has said how the run ended; `asked`: the
        worker is being ended as a person asked, which needs no other reason."""
        self._watch_ranks(worker, asked)
        if not ended:
            self._watch_heartbeats(worker, asked)
        if self.node is not None:
            self.node.beat()
            if not ended and self.node.others_end() and worker.may_be_signalled(leaving=False):
                worker.kill()

    def _watch_ranks(self, worker: WorkerProcess, asked: bool) -> None:
        """With several ranks: one that dies takes the others with it, and it is the one that is named."""
        if worker.family.processes > 1 or self.node is not None:
            lost = worker.family.poll(lambda: cause.agent_saw_failure(self.run.log, worker.log_from))
            if lost and not asked:
                worker.family.kill()

    def _watch_heartbeats(self, worker: WorkerProcess, asked: bool) -> None:
        """Ranks that wait for each other for too long are ended, and the one that is waited for is named."""
        if self._hang is None or self.hung is not None:
            return
        found = self._hang.poll()
        if found is not None and not asked and worker.may_be_signalled(leaving=False):
            self.hung = found
            worker.kill()

    def leave(self, worker: WorkerProcess, code: int | None, ended: Callable[[], bool]) -> None:
        """After the worker is gone: its processes go too, and the rank by which the others ended is found. `ended` tells whether
        the first rank has said how the run ended."""
        if self.node is not None and code:
            worker.family.poll(lambda: True)  # torchrun names no rank to close where it has but one
        if self.node is not None or worker.family.processes > 1:
            worker.family.choose_lost_rank(cause.failed_ranks(self.run.log, worker.log_from), said=ended())
        worker.family.end()

    def beat(self) -> None:
        """Show the other nodes that this one lives, while no worker does: between two rounds they wait for the next."""
        if self.node is not None:
            self.node.beat()

    def close_round(self) -> None:
        """It is over for all nodes."""
        if self.node is not None:
            with contextlib.suppress(OSError, UnsafeRunFile):  # silence says the same, later
                self.node.report(state="ended")

    def explain(self, worker: WorkerProcess, code: int | None) -> cause.Cause:
        """Why the worker ended; what another node began is told in that one's words."""
        if self.hung is not None:
            return self.hung
        explained = worker.explain(code, node=None if self.node is None else 0)
        if self.node is None:
            return explained
        if not (explained.follows or self.node.others_end()):
            return explained
        return self.node.round_cause() or (explained if worker.family.ranks else self.node.not_met())
