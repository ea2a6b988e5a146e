"""A node of a run that is not its first: `python -P -m engine.run.member RANK -- FOLDER`, detached. Imports no torch.

It answers each round that the first node opens, starts torchrun when that says go, and ends it when the first ends the round
or falls silent. It writes its own file (`engine.run.nodes`) and its own log, `worker-RANK.log`; run.json and the events are
the first node's.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.errors import RunBusy, WorkbenchError, visible
from engine.run import cause, inside, launch, nodes, spawn
from engine.run.devices import Choice
from engine.run.network import refuse_absent
from engine.run.nodes import Node
from engine.run.process import Identity, boot_id, host, identity, send
from engine.run.process_group import ProcessTree
from engine.run.store import ENDED, RunFolder, runs_in
from engine.run.worker_process import explain_lost_rank

LOOK_SECONDS = 0.1
_TERM_SECONDS = 5.0
REPORT_SECONDS = 10.0
"""How long torchrun has to tell of a rank of its own that is gone, once the round is over: that may be why it is. The first node
waits longer for these words than that."""
BETWEEN_SECONDS = nodes.MEET_SECONDS
"""How long the first node may say nothing between two rounds, at least: it reads its newest checkpoint before it starts again."""


class Member:
    """One node's part in a run, from its first round to the run's end."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        self.run = run
        self.meets = nodes.rendezvous_of(run)
        if not 0 < rank < self.meets.nodes:
            raise WorkbenchError(
                f"--node-rank: must be from 0 to {self.meets.nodes - 1} in a run on {self.meets.nodes} "
                f"node{'' if self.meets.nodes == 1 else 's'}; got {rank}."
            )
        self.node = Node(run, rank, self.meets.nodes)
        self.log = run.path / f"worker-{rank}.log"
        self.answered = ""
        self.done = ""

    def stay(self) -> None:
        """Take part until the run is over. Raises WorkbenchError where the first node does not come, or goes."""
        give_up, begun = time.monotonic() + self.meets.seconds, False
        while True:
            begun = begun or self.run.state not in ENDED
            if begun and self.run.state in ENDED:
                return
            first = self.node.read_rank(0)
            round_, state = str(first.get("round") or ""), first.get("state")
            if state == "gathering" and round_ != self.answered and self.node.lives(0):
                self._answer(round_)
            elif state == "go" and round_ == self.answered != self.done:
                self._work(round_, str(first.get("endpoint") or ""))
            elif self.answered and self.node.is_silent(0, self._patience(str(state))):
                raise WorkbenchError(f"{self.node.name(0).capitalize()} of run {self.run.id} has fallen silent.")
            elif not self.answered and time.monotonic() > give_up:
                raise WorkbenchError(
                    f"The rendezvous at {visible(self.meets.endpoint or 'node 0')} did not complete within "
                    f"{self.meets.seconds:g} s: node 0 did not come."
                )
            if self.answered:
                if (rival := self.node.rival) is not None:
                    raise RunBusy(
                        f"--node-rank {self.node.rank} is taken by process {rival.pid} on {visible(rival.host)}."
                    )
                self.node.beat()
            time.sleep(LOOK_SECONDS)

    def _patience(self, state: str) -> float | None:
        """How long the first node may be silent; None: as long as usual."""
        return max(BETWEEN_SECONDS, self.meets.seconds) if state == "ended" else None

    def _answer(self, round_: str) -> None:
        """Come to a round, with what this node has for the run, or why it has not."""
        self.answered = round_
        about = {
            "round": round_,
            "state": "here",
            "versions": launch.versions(),
            "cause": "",
            "message": "",
            "lines": [],
            "follows": False,
        }
        try:
            refuse_absent(os.environ)
            chosen = launch.choose_free(self.run.read_json().get("devices_wanted", "auto"), self.run.path.parent)
        except WorkbenchError as problem:
            self.node.report(**about, refused=problem.full_message)
            return
        self.node.report(**about, refused="", processes=chosen.processes, devices=list(chosen.visible))

    def _work(self, round_: str, endpoint: str) -> None:
        """Run torchrun for this round, and tell how it ended."""
        self.done = round_
        choice = Choice(tuple(self.node.said["devices"]), int(self.node.said["processes"]))
        log = inside.open_file(self.run, self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        log_from = os.fstat(log).st_size
        token = secrets.token_hex(16)
        secret = self.run.read_json().get("secrets", spawn.HUB_TOKENS)
        try:
            way = nodes.interface(endpoint)
            group = spawn.Group(self.node.rank, self.node.nodes, endpoint, way, nodes.REACH_SECONDS)
            child = subprocess.Popen(
                spawn.worker_argv(self.run, choice, group=group),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.run.path,
                env=spawn.environment(os.environ, choice, token, secret, group),
                start_new_session=True,
            )
        except (WorkbenchError, OSError) as problem:
            self.node.report(state="ended", cause="start", message=f"{self.node.name(self.node.rank)}: {problem}")
            return
        finally:
            os.close(log)
        worker = identity(child.pid) or Identity(child.pid, 0, boot_id(), host())
        family = ProcessTree(token, worker, choice.processes)
        self.node.report(state="at work", worker=worker.as_json())
        reported = self._watch(child, family, log_from, round_)
        if child.returncode:
            family.poll(lambda: True)
            family.choose_lost_rank(cause.failed_ranks(self.log, log_from))
        family.end()
        self._report_exit(child.returncode, family, log_from, reported)

    def _watch(self, child: subprocess.Popen[bytes], family: ProcessTree, log_from: int, round_: str) -> bool:
        """Stay until torchrun is gone; whether it was ended because the first node ended the round, or is gone."""
        over_at: float | None = None
        told_at: float | None = None
        while child.poll() is None:
            self.node.beat()
            if family.poll(lambda: cause.agent_saw_failure(self.log, log_from)):
                family.kill()
            first = self.node.read_rank(0)
            over = first.get("round") != round_ or first.get("state") == "ended" or self.node.is_silent(0)
            over_at = time.monotonic() if over and over_at is None else over_at
            patience = REPORT_SECONDS if family.misses_a_rank else 0.0
            if over_at is not None and told_at is None and time.monotonic() - over_at >= patience:
                told_at = time.monotonic()
                send(family.worker, signal.SIGTERM)
            elif told_at is not None and time.monotonic() - told_at > _TERM_SECONDS:
                family.kill()
                send(family.worker, signal.SIGKILL)
            time.sleep(LOOK_SECONDS)
        return told_at is not None

    def _report_exit(self, code: int, family: ProcessTree, log_from: int, reported: bool) -> None:
        if not code or reported:
            self.node.report(state="ended", cause="")
            return
        place = f"node {self.node.rank}, {host()}"
        if family.lost_rank is not None and code > 0:
            explained = explain_lost_rank(self.run, family, self.log, log_from, place, code)
        else:
            ranks = nodes.ranks_of(self.node.rank, family.processes)
            who = f"The agent (torchrun) of {ranks} ({place}, process {family.worker.pid})"
            explained = cause.explain(code, self.log, log_from=log_from, who=who)
        told = {"message": explained.message, "lines": list(explained.lines), "follows": explained.follows}
        self.node.report(state="ended", cause=explained.cause, **told)


def join(run: RunFolder, rank: int, *, wait: bool = False) -> None:
    """Start this machine's part in the run, detached; with `wait` return once the first node goes on with a run that had ended.

    Raises WorkbenchError where it cannot be.
    """
    Member(run, rank)
    log = inside.open_file(run, run.path / f"worker-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        child = subprocess.Popen(
            [*spawn.python(), "-m", "engine.run.member", str(rank), "--", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, **spawn.safe_python(os.environ)},
            start_new_session=True,
        )
    finally:
        os.close(log)
    while wait and run.state in ENDED:
        if child.poll() is not None:
            lines = cause.log_tail(run.path / f"worker-{rank}.log").strip().splitlines()
            raise WorkbenchError(lines[-1] if lines else f"node {rank} ended with exit code {child.returncode}.")
        time.sleep(LOOK_SECONDS)


def refuse(run: RunFolder, rank: int, words: str) -> None:
    """Tell the first node that this one cannot take part in its round."""
    node = Node(run, rank, nodes.rendezvous_of(run).nodes)
    node.report(round=nodes.read_node(run, 0).get("round"), refused=words)


def find(root: Path, wanted: nodes.Rendezvous, wait: Callable[[], None]) -> RunFolder:
    """The run in `root` whose first node waits at this rendezvous. `wait` is called between looks.

    Raises WorkbenchError where none does in time.
    """
    give_up = time.monotonic() + wanted.seconds
    while time.monotonic() < give_up:
        for run in runs_in(root):
            rendezvous, values = nodes.rendezvous_of(run), run.read_json()
            if (
                rendezvous.nodes == 1
                or values.get("state") in ENDED
                or (rendezvous.endpoint, rendezvous.id) != (wanted.endpoint, wanted.id)
            ):
                continue
            if nodes.read_node(run, 0).get("state") == "gathering":
                return run
        wait()
        time.sleep(LOOK_SECONDS)
    raise WorkbenchError(
        f"The rendezvous at {visible(wanted.endpoint or wanted.id)} did not complete within {wanted.seconds:g} s: no run in "
        f"{visible(str(root))} waits there.",
        "Start the one with --node-rank 0 too, with the same address and --runs.",
    )


def main(rank: str, path: str) -> int:
    os.umask(0o077)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        Member(RunFolder(path), int(rank)).stay()
    except (WorkbenchError, OSError) as problem:
        print(problem, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] != "--" or not sys.argv[1].isdigit():
        sys.exit("usage: python -P -m engine.run.member RANK -- FOLDER")
    sys.exit(main(sys.argv[1], sys.argv[3]))
