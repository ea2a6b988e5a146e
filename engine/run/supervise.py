"""The process that stays with a run: `python -P -m engine.run.supervise start|attend -- FOLDER`.

`wait -- WANTED` begins before there is a run, with a worker that waits for it (`engine.run.warm`).

It detaches from whoever started it, starts the worker (or adopts a living one), writes `run.json`, ends a worker that
does not answer a request to stop, and states why a worker ended. It never writes events while a worker lives. Small on
purpose: no torch, no thread, one loop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from engine.errors import Cancelled, RunBusy, WorkbenchError
from engine.run import cause, control, inside, spawn, store
from engine.run.detached import Work, answering, detach, hold_on, quiet
from engine.run.devices import Choice
from engine.run.events import append, last_numbers
from engine.run.lock import RunLock, is_held, try_flock
from engine.run.nodes import rendezvous_of
from engine.run.notify import Notifier
from engine.run.peers import Peers
from engine.run.restarts import Restarts
from engine.run.state_file import StateFile
from engine.run.stop_requests import StopRequests
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from engine.run.warm import Waiting, wanted_from
from engine.run.worker_process import WorkerProcess

LOOK_SECONDS = 0.1
# How long a last record waits for room on a disk that has none, not even the reserved.
PATIENCE_SECONDS = 600.0


class Supervisor:
    """One run's supervisor. `start` or `attend`, then `stay` until the worker is gone."""

    def __init__(self, run: RunFolder, waiting: Waiting | None = None) -> None:
        self.run = run
        self.waiting = waiting
        self.state = StateFile(run)
        self.worker: WorkerProcess | None = None
        self.requests = StopRequests(run, self.state)
        self.peers = Peers(run)
        self.segment = 0
        self.tail = Tail(run.events)
        self.final: dict[str, Any] | None = None
        self.ended_at: float | None = None
        self.forwarded = False
        self.notifier = Notifier(run)
        self.restarts = Restarts(run, self.peers.beat)

    def wait(self) -> bool:
        """Stay until it is this run's turn, and note its devices; False where it was taken out of the queue."""
        from engine.run.queue import LOOK_SECONDS as PAUSE
        from engine.run.queue import Turn

        # The machine shuts down: it stays queued.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        turn = Turn(self.run)
        while self.run.path.is_dir():
            if who := turn.cancelled():
                control.drop_old(self.run)
                self.state.write(
                    state="stopped", message=f"Taken out of the queue by {who} before it began.", ended=time.time()
                )
                return False
            began = time.monotonic()
            words, choice = turn.waits_for()
            if choice is not None:
                self.state.write(state="starting", message="", devices=list(choice.visible), processes=choice.processes)
                return True
            self.state.update(state="queued", message=words)
            time.sleep(max(PAUSE, 20 * (time.monotonic() - began)))  # among a thousand runs a look costs more
        return False

    def fail_to_begin(self, problem: Exception) -> None:
        """Of a run whose turn came and which cannot start: nobody waits for the reason, so it is written down."""
        self.run.free_ballast()
        if isinstance(problem, Cancelled):
            control.drop_old(self.run)
            self.state.update(state="stopped", cause="", message=str(problem), ended=time.time())
            return
        message = problem.full_message if isinstance(problem, WorkbenchError) else str(problem)
        self.state.update(state="failed", cause="start", message=message, ended=time.time())
        self.notifier.ended({"kind": "failed", "cause": "start"})
        self.state.settle(PATIENCE_SECONDS)

    def start(self, *, waited: bool = False) -> None:
        """Start the worker in a session of its own, with its output in `worker.log`.

        After waiting in the queue a request that came just now is the worker's to answer.
        """
        self.run.refuse_flaws()
        values = self.run.read_json()
        if is_held(self.run):
            raise RunBusy(f"run {self.run.id} already has a worker.")
        self.run.reserve_ballast()
        if not waited:
            control.drop_old(self.run)
        handle = inside.open_file(self.run, self.run.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.close(handle)
        self.segment = last_numbers(self.run.events)[1] + 1
        self.tail.offset = inside.lstat(self.run, self.run.events).st_size
        choice = Choice(tuple(map(str, values.get("devices") or [])), int(values.get("processes") or 1))
        group = self.peers.gather(choice, values.get("versions") or {}, self._wait, self._is_to_end)
        log = inside.open_file(self.run, self.run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        log_from = os.fstat(log).st_size
        try:
            if self.waiting is not None and not self._adopt(self.waiting, choice, log, log_from):
                self.waiting = None
            if self.waiting is None:
                token = secrets.token_hex(16)
                child = subprocess.Popen(
                    spawn.worker_argv(self.run, choice, group=group),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.run.path,
                    env=spawn.environment(os.environ, choice, token, values.get("secrets", spawn.HUB_TOKENS), group),
                    start_new_session=True,
                )
                self._begun(child, token, choice, log_from)
        finally:
            os.close(log)

    def _wait(self, words: str) -> None:
        """Say what a run that has begun to start waits for."""
        self.state.update(state="starting", message=words)
        time.sleep(LOOK_SECONDS)

    def _adopt(self, waiting: Waiting, choice: Choice, log: int, log_from: int) -> bool:
        """Give the run to the worker that waits for one; False where that is gone."""
        if waiting.child.poll() is not None:
            return False
        self._begun(waiting.child, waiting.token, choice, log_from)
        try:
            waiting.hand_over(self.run, log)
        except OSError:
            waiting.end()
            return False
        return True

    def _begun(self, child: subprocess.Popen[bytes], token: str, choice: Choice, log_from: int) -> None:
        self.worker = WorkerProcess.started(self.run, child, token, choice.processes, log_from)
        # At once: a worker that run.json does not name could not be adopted.
        self.state.write(
            state="starting",
            message="",
            segment=self.segment,
            log_from=log_from,
            token=token,
            folder=inside.identity(self.run),
            worker_pid=self.worker.who.pid,
            worker_start=self.worker.who.start,
        )
        self.peers.begin(self.worker)

    def attend(self) -> bool:
        """Adopt the worker that run.json names, or write down that it is lost. True if there is one to stay with."""
        self.run.refuse_flaws()
        values = self.run.read_json()
        self.segment = segment if isinstance(segment := values.get("segment"), int) else 0
        # Nothing is written before it is known that the worker lives: whose name stands in run.json has adopted it.
        self.worker = WorkerProcess.adopted(self.run)
        if self.worker is None:
            self._read_events()
            self._write_end_unseen()
            return False
        self.peers.go_on()
        self.peers.begin(self.worker)
        self.state.write(adopted=True)
        return True

    def stay(self) -> None:
        """Watch until the worker is gone, then start it anew where that helps, or say how it ended."""
        signal.signal(signal.SIGTERM, self._forward)
        while self._conclude(self._watch()):
            if not self._start_again():
                break
        self.state.settle(PATIENCE_SECONDS)

    def _watch(self) -> int | None:
        """Stay with the worker until it is gone; its exit code, where that can be known."""
        assert self.worker is not None
        while True:
            code = self.worker.exit_code()
            gone = code is not None or not self.worker.lives
            self._read_events()
            if gone:
                return code
            self._watch_requests()
            self.peers.watch(self.worker, ended=self.final is not None, asked=self.requests.overdue is not None)
            self.notifier.tick()
            self.state.update()
            time.sleep(LOOK_SECONDS)

    def _watch_requests(self) -> None:
        assert self.worker is not None
        self.requests.watch(self.worker, self.ended_at)

    def _start_again(self) -> bool:
        """Start the worker anew after a pause; False where a person or the machine ends it meanwhile, or it cannot."""
        end = time.monotonic() + self.restarts.pause()
        while time.monotonic() < end and not self._is_to_end():
            self.state.update()
            self.peers.beat()
            time.sleep(LOOK_SECONDS)
        if self._is_to_end():
            by = next((each.by for each in control.lying(self.run) if each.do in control.STOPS), "")
            by = by or ("SIGTERM" if self.forwarded else "")
            self.final = {"kind": "stopped", "by": by, "message": "Stopped before its worker was started again."}
            try:
                append(self.run, self.segment, self.final)
            except (OSError, WorkbenchError) as problem:
                print(f"events.jsonl: {problem}", file=sys.stderr, flush=True)
            self._close(None)
            return False
        self.final = self.ended_at = None
        self.requests = StopRequests(self.run, self.state)
        try:
            RunLock(self.run).acquire_soon().release()
            self.start()
        except (WorkbenchError, OSError) as problem:
            self.fail_to_begin(problem)
            return False
        return True

    def _is_to_end(self) -> bool:
        """Whether the machine shuts down or a person has asked for the run's end."""
        return self.forwarded or self.requests.overdue is not None or control.asks_to_end(self.run)

    # -- the worker's end ------------------------------------------------------------------------------------------

    def _conclude(self, code: int | None) -> bool:
        """Say how the worker ended; whether it is to be started anew."""
        assert self.worker is not None
        self.peers.leave(self.worker, code, self._has_ended)
        self._read_events()
        if self.waiting is not None and not self.waiting.taken() and not self._is_to_end():
            return True  # it died while the run was handed to it: another one starts, as if none had waited
        self.waiting = None
        self.peers.close_round()
        lost = self.worker.family.lost_rank
        # The first rank may leave before the others once it has said how the run ended.
        left = lost is not None and lost[0] == 0 and self.final is not None and self.final["kind"] != "failed"
        # What the first rank says of itself (numbers that broke, rows that are refused, memory) stands: the others end
        # for the same reason, and which of them is seen to go first is chance. An exception may be another rank's death.
        left = left or (self.final is not None and self.final.get("cause") not in (None, "exception"))
        # One that it raised itself stands where it is the one that fell: the log ends with what the others say of that.
        left = left or (lost is not None and lost[0] == 0 and self.final is not None and not cause.of_peer(self.final))
        if self.final is None or ((lost is not None or self.peers.hung is not None) and not left):
            try:
                self._write_final_event(code)
            except (OSError, WorkbenchError) as problem:
                # The cause is known all the same, and run.json says it.
                print(f"events.jsonl: {problem}", file=sys.stderr, flush=True)
        assert self.final is not None
        words = "" if self._is_to_end() else self.restarts.restart_summary(self.final)
        if words:
            why = f"{self.final.get('message') or 'The worker ended.'} {words}"
            try:
                append(
                    self.run,
                    self.segment,
                    {"kind": "restart", "cause": str(self.final.get("cause") or ""), "message": why},
                )
            except (OSError, WorkbenchError) as problem:
                print(f"events.jsonl: {problem}", file=sys.stderr, flush=True)
            else:
                self.state.update(state="starting", cause="", message=why)
                return True
        self._close(code)
        return False

    def _close(self, code: int | None) -> None:
        """Write the last word into run.json, and let others know."""
        assert self.final is not None
        # The words stand; what is left of the reserved room goes before the folder is left alone.
        self.run.free_ballast()
        self.state.update(
            state=self.final["kind"],
            cause=str(self.final.get("cause") or ""),
            message=str(self.final.get("message") or ""),
            exit_code=code,
            ended=time.time(),
        )
        self.notifier.ended(self.final)

    def _write_final_event(self, code: int | None) -> None:
        """Append what the worker could not say any more."""
        assert self.worker is not None
        ending = self.peers.explain(self.worker, code)  # first: it also looks at the disk as the worker left it
        explained = {"kind": "failed", "cause": ending.cause, "message": ending.message, "lines": list(ending.lines)}
        events = self.requests.last_events() or [explained]
        self.final = events[-1]
        append(self.run, self.segment, *events)

    def _write_end_unseen(self) -> None:
        self.run.free_ballast()
        if self.final is not None:
            self.state.write(
                state=self.final["kind"], cause=str(self.final.get("cause") or ""), ended=self.final.get("t")
            )
            return
        message = "The worker ended while nothing watched it, without a final word."
        if self.run.is_original is False:
            message = "This folder is a copy: the worker that its run.json names works in another, or is gone."
        self.state.write(state="lost", cause="lost", message=message, ended=time.time())

    # -- while it lives --------------------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        """Whether the first rank has said how the run ended."""
        self._read_events()
        return self.final is not None

    def _read_events(self) -> None:
        """Follow state and answers; the numbers are of no interest here."""
        state = ""
        while events := self.tail.read(500):
            self.notifier.see(events)
            for event in events:
                if event.get("segment") != self.segment:
                    continue
                kind = event["kind"]
                if kind == "started" and self.requests.overdue is None:
                    state = "running"
                elif kind == "checkpoint":
                    self.requests.note_save(event)
                elif kind == "control":
                    self.requests.note(event)
                    if event.get("status") == "accepted" and event.get("do") != "checkpoint":
                        state = "stopping"
                elif kind in ("finished", "stopped", "failed"):
                    self.final, self.ended_at = event, time.monotonic()
        if state and self.final is None:
            self.state.update(state=state)

    def _forward(self, number: int, _: object) -> None:
        """The machine shuts down: the worker hears it too, and may save."""
        if self.worker is None or self.forwarded:
            return
        if self.worker.may_be_signalled(leaving=self.final is not None):
            self.forwarded = True
            self.worker.send(number)


def claim(run: RunFolder, patience: float) -> int:
    """Be the only supervisor of this run: a lock on the folder itself, and the word of run.json where locks fail.

    One that wrote its last word may need a moment to leave.
    """
    handle = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    give_up = time.monotonic() + patience
    while True:
        now = run.supervisor()
        if try_flock(handle) != "busy" and (now is None or now.pid == os.getpid() or not now.alive):
            return handle
        if time.monotonic() >= give_up:
            raise RunBusy(
                f"run {run.id} is being started or looked after already; `workbench watch {store.called(run)}` shows it."
            )
        time.sleep(0.05)


def wait(text: str) -> NoReturn:
    """Have a worker wait, in a process that nobody waits for, until the window at the standard input hands over a run."""
    hold_on()
    wanted = wanted_from(text)
    if os.fork():
        os._exit(0)
    window = socket.socket(fileno=os.dup(0))
    waiting = Waiting(wanted, secrets.token_hex(16))
    try:
        path = waiting.wait_for_run(window)
    except OSError:
        path = ""  # the window is gone
    if not path:
        waiting.end()
        os._exit(0)

    def send(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a window that left in this very moment: the run goes on
            window.send(data)
        window.close()

    answering(_work("start", RunFolder(path), waiting), send)


def main(do: str, path: str) -> NoReturn:
    hold_on()
    detach(_work(do, RunFolder(path)))


def _work(do: str, run: RunFolder, waiting: Waiting | None = None) -> Work:
    """All that a supervisor does; it calls what it is given once the run has begun."""

    def work(ready: Callable[[], None]) -> None:
        handle = claim(run, patience=2.0 if do == "start" else 0.0)
        supervisor = Supervisor(run, waiting)
        waits = run.state == "queued"
        if waits or (do == "start" and rendezvous_of(run).nodes > 1):
            run.refuse_flaws()
            if not waits:
                control.drop_old(run)
            supervisor.state.write(state=run.state, folder=inside.identity(run))
            quiet(run)
            ready()
            try:
                if waits and not supervisor.wait():
                    return
                supervisor.start(waited=True)
            except (WorkbenchError, OSError) as problem:
                supervisor.fail_to_begin(problem)
                return
            supervisor.stay()
            os.close(handle)
            return
        if do == "start":
            supervisor.start()
        elif run.state in ENDED or not supervisor.attend():
            ready()
            return
        quiet(run)
        ready()
        supervisor.stay()
        os.close(handle)

    return work


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("start", "attend", "wait") or sys.argv[2] != "--":
        sys.exit("usage: python -P -m engine.run.supervise start|attend -- FOLDER, or wait -- WANTED")
    if sys.argv[1] == "wait":
        wait(sys.argv[3])
    main(sys.argv[1], sys.argv[3])
