"""The process that stays with a run: `python -P -m engine.run.supervise start|attend -- FOLDER`.

`wait -- WANTED` begins before there is a run, with a worker that waits for it (`engine.run.warm`).

It detaches from whoever started it, starts the worker (or adopts a living one), writes `run.json`, ends a worker that
does not answer a request to stop, and states why a worker ended. It never writes events while a worker lives. Small on
purpose: standard library only, no thread, one loop.
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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from engine import figures
from engine.errors import Cancelled, RunBusy, WorkbenchError
from engine.run import cause, control, inside, spawn, store
from engine.run.devices import Choice
from engine.run.disk import storage_error
from engine.run.events import EventWriter, last_numbers
from engine.run.hang import Hang
from engine.run.lock import RunLock, is_held, try_flock
from engine.run.network import refuse_absent
from engine.run.nodes import REACH_SECONDS, FirstNode, interface, rendezvous_of
from engine.run.notify import Notifier
from engine.run.process import Identity, boot_id, host, identity, send
from engine.run.process_group import Family
from engine.run.restarts import Restarts
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from engine.run.warm import Waiting, wanted_from

LOOK_SECONDS = 0.1
DEFAULT_GRACE = 60.0
# Between SIGTERM and SIGKILL where the person wants it now, and after a worker's own final event.
NOW_SECONDS = 5.0
LEAVE_SECONDS = 30.0
# How long a last record waits for room on a disk that has none, not even the reserved.
PATIENCE_SECONDS = 600.0


class Supervisor:
    """One run's supervisor. `start` or `attend`, then `stay` until the worker is gone."""

    def __init__(self, run: RunFolder, waiting: Waiting | None = None) -> None:
        self.run = run
        self.waiting = waiting
        self.child: subprocess.Popen[bytes] | None = None
        self.worker: Identity | None = None
        self.segment = 0
        self.log_from = 0
        self.family: Family | None = None
        self.tail = Tail(run.events)
        self.final: dict[str, Any] | None = None
        self.answered: dict[str, str] = {}
        self.first_seen: dict[str, float] = {}
        self.asked_to_end: control.Request | None = None
        self.term_at: float | None = None
        self.killed = False
        self.forwarded = False
        self.unwritten: dict[str, Any] = {}
        self.complaint = ""
        self.oom_before = cause.oom_kills()
        self.ended_at: float | None = None
        self.notifier = Notifier(run)
        self.restarts = Restarts(run)
        self.node: FirstNode | None = None
        self.hang: Hang | None = None
        self.hung: cause.Cause | None = None

    def wait(self) -> bool:
        """Stay until it is this run's turn, and note its devices; False where it was taken out of the queue."""
        from engine.run.queue import LOOK_SECONDS as PAUSE
        from engine.run.queue import Turn

        # The machine shuts down: it stays queued.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        turn = Turn(self.run)
        while self.run.path.is_dir():
            if who := turn.cancelled():
                self._drop_old_requests()
                self._write(
                    state="stopped", message=f"Taken out of the queue by {who} before it began.", ended=time.time()
                )
                return False
            began = time.monotonic()
            words, choice = turn.waits_for()
            if choice is not None:
                self._write(state="starting", message="", devices=list(choice.visible), processes=choice.processes)
                return True
            self._say(state="queued", message=words)
            time.sleep(max(PAUSE, 20 * (time.monotonic() - began)))  # among a thousand runs a look costs more
        return False

    def fail_to_begin(self, problem: Exception) -> None:
        """Of a run whose turn came and which cannot start: nobody waits for the reason, so it is written down."""
        self.run.free_ballast()
        if isinstance(problem, Cancelled):
            self._drop_old_requests()
            self._say(state="stopped", cause="", message=str(problem), ended=time.time())
            return
        message = problem.full_message if isinstance(problem, WorkbenchError) else str(problem)
        self._say(state="failed", cause="start", message=message, ended=time.time())
        self.notifier.ended({"kind": "failed", "cause": "start"})

    def start(self, *, waited: bool = False) -> None:
        """Start the worker in a session of its own, with its output in `worker.log`.

        After waiting in the queue a request that came just now is the worker's to answer.
        """
        self.run.refuse_flaws()
        values = self.run.read_json()
        if is_held(self.run):
            raise RunBusy(f"run {self.run.id} already has a worker.")
        self._reserve()
        if not waited:
            self._drop_old_requests()
        handle = inside.open_file(self.run, self.run.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.close(handle)
        self.segment = last_numbers(self.run.events)[1] + 1
        self.tail.offset = inside.look(self.run, self.run.events).st_size
        choice = Choice(tuple(map(str, values.get("devices") or [])), int(values.get("processes") or 1))
        group = self._gather(choice, values.get("versions") or {})
        log = inside.open_file(self.run, self.run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.log_from = os.fstat(log).st_size
        try:
            if self.waiting is not None and not self._adopt(self.waiting, choice, log):
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
                self._begun(child, token, choice)
        finally:
            os.close(log)

    def _gather(self, choice: Choice, versions: Mapping[str, str]) -> spawn.Group | None:
        """Have the other nodes come; this one's place among them, None in a run on one machine. Raises WorkbenchError where they
        do not come or fit, and Cancelled where the run was stopped meanwhile."""
        rendezvous = rendezvous_of(self.run)
        if rendezvous.nodes == 1:
            return None
        refuse_absent(os.environ)
        node = self.node = self.node or FirstNode(self.run, rendezvous)

        def wait(came: int) -> None:
            if self._is_to_end():
                raise Cancelled(f"Stopped while {came} of {node.nodes} nodes had come.")
            self._say(state="starting", message=f"waits at {node.endpoint}: {came} of {node.nodes} nodes came")
            time.sleep(LOOK_SECONDS)

        node.gather(choice.processes, versions, wait)
        return spawn.Group(0, node.nodes, node.endpoint, interface(node.endpoint, os.environ), REACH_SECONDS)

    def _adopt(self, waiting: Waiting, choice: Choice, log: int) -> bool:
        """Give the run to the worker that waits for one; False where that is gone."""
        if waiting.child.poll() is not None:
            return False
        self._begun(waiting.child, waiting.token, choice)
        try:
            waiting.hand_over(self.run, log)
        except OSError:
            waiting.end()
            return False
        return True

    def _begun(self, child: subprocess.Popen[bytes], token: str, choice: Choice) -> None:
        self.child = child
        self.worker = identity(child.pid) or Identity(child.pid, 0, boot_id(), host())
        self.family = Family(token, self.worker, choice.processes)
        self._watch_heartbeats()
        self._write(
            state="starting",
            message="",
            segment=self.segment,
            log_from=self.log_from,
            token=token,
            folder=inside.identity(self.run),
            worker_pid=self.worker.pid,
            worker_start=self.worker.start,
        )

    def _reserve(self) -> None:
        """Hold the room for the last record, anew at each start."""
        try:
            self.run.reserve_ballast()
        except OSError as problem:
            needed = f"{figures.size(store.BALLAST_BYTES)} needed to begin"
            raise storage_error(self.run.ballast, needed, problem) from problem

    def attend(self) -> bool:
        """Adopt the worker that run.json names, or write down that it is lost. True if there is one to stay with."""
        self.run.refuse_flaws()
        values = self.run.read_json()
        self.worker = self.run.worker()
        self.segment = segment if isinstance(segment := values.get("segment"), int) else 0
        self.log_from = log_from if isinstance(log_from := values.get("log_from"), int) else 0
        # Nothing is written before it is known that the worker lives: whose name stands in run.json has adopted it.
        if self.worker is not None:
            self.family = Family(str(values.get("token") or ""), self.worker, int(values.get("processes") or 1))
        if self.worker is None or self.family is None or not self.family.owns(self.worker):
            self._read_events()
            self._write_end_unseen()
            return False
        rendezvous = rendezvous_of(self.run)
        if rendezvous.nodes > 1:
            self.node = FirstNode(self.run, rendezvous)
            self.node.go_on()
        self._watch_heartbeats()
        self._write(adopted=True)
        return True

    def stay(self) -> None:
        """Watch until the worker is gone, then start it anew where that helps, or say how it ended."""
        signal.signal(signal.SIGTERM, self._forward)
        while self._conclude(self._watch()):
            if not self._start_again():
                break
        give_up = time.monotonic() + PATIENCE_SECONDS
        while self.unwritten and self.run.path.is_dir() and time.monotonic() < give_up:
            time.sleep(1.0)
            self._say()

    def _watch(self) -> int | None:
        """Stay with the worker until it is gone; its exit code, where that can be known."""
        while True:
            code = self._exit_code()
            gone = code is not None or not self._worker_lives()
            self._read_events()
            if gone:
                return code
            self._watch_requests()
            self._watch_ranks()
            self._watch_hang()
            self._watch_nodes()
            self.notifier.tick()
            self._say()
            time.sleep(LOOK_SECONDS)

    def _start_again(self) -> bool:
        """Start the worker anew after a pause; False where a person or the machine ends it meanwhile, or it cannot."""
        end = time.monotonic() + self.restarts.pause()
        while time.monotonic() < end and not self._is_to_end():
            self._say()
            time.sleep(LOOK_SECONDS)
        if self._is_to_end():
            self.final = {"kind": "stopped", "by": "", "message": "Stopped before its worker was started again."}
            self._append(self.final)
            self._close(None)
            return False
        self.final = self.ended_at = self.asked_to_end = self.term_at = None
        self.killed = False
        self.answered, self.first_seen, self.oom_before = {}, {}, cause.oom_kills()
        try:
            RunLock(self.run).acquire_soon().release()
            self.start()
        except (WorkbenchError, OSError) as problem:
            self.fail_to_begin(problem)
            return False
        return True

    def _is_to_end(self) -> bool:
        """Whether the machine shuts down or a person has asked for the run's end."""
        return self.forwarded or self.asked_to_end is not None or control.asks_to_end(self.run)

    def _append(self, event: Mapping[str, Any]) -> None:
        """Write an event where no worker does any more."""
        lock = RunLock(self.run).acquire_soon()
        try:
            with EventWriter(self.run, segment=self.segment) as writer:
                writer.write(**event)
        finally:
            lock.release()

    # -- the worker's end ------------------------------------------------------------------------------------------

    def _exit_code(self) -> int | None:
        return self.child.poll() if self.child is not None else None

    def _worker_lives(self) -> bool:
        return self.child is not None or (self.worker is not None and self.worker.alive)

    def _conclude(self, code: int | None) -> bool:
        """Say how the worker ended; whether it is to be started anew."""
        assert self.worker is not None
        if self.family is not None:
            if self.node is not None and code:
                self.family.look(lambda: True)  # torchrun names no rank to close where it has but one
            if self.node is not None or self.family.processes > 1:
                self._read_events()
                self.family.blame(cause.failed_ranks(self.run.log, self.log_from), said=self.final is not None)
            self.family.end()
        self._read_events()
        if self.waiting is not None and not self.waiting.taken() and not self._is_to_end():
            return True  # it died while the run was handed to it: another one starts, as if none had waited
        self.waiting = None
        if self.node is not None:
            self._tell_nodes()
        lost = self.family.lost_rank if self.family is not None else None
        # The first rank may leave before the others once it has said how the run ended.
        left = lost is not None and lost[0] == 0 and self.final is not None and self.final["kind"] != "failed"
        # What the first rank says of itself (numbers that broke, rows that are refused, memory) stands: the others end
        # for the same reason, and which of them is seen to go first is chance. An exception may be another rank's death.
        left = left or (self.final is not None and self.final.get("cause") not in (None, "exception"))
        if self.final is None or ((lost is not None or self.hung is not None) and not left):
            try:
                self._write_final_event(code)
            except (OSError, WorkbenchError) as problem:
                # The cause is known all the same, and run.json says it.
                print(f"events.jsonl: {problem}", file=sys.stderr, flush=True)
        assert self.final is not None
        words = "" if self._is_to_end() else self.restarts.again(self.final)
        if words:
            why = f"{self.final.get('message') or 'The worker ended.'} {words}"
            try:
                self._append({"kind": "restart", "cause": str(self.final.get("cause") or ""), "message": why})
            except (OSError, WorkbenchError) as problem:
                print(f"events.jsonl: {problem}", file=sys.stderr, flush=True)
            else:
                self._say(state="starting", cause="", message=why)
                return True
        self._close(code)
        return False

    def _close(self, code: int | None) -> None:
        """Write the last word into run.json, and let others know."""
        assert self.final is not None
        # The words stand; what is left of the reserved room goes before the folder is left alone.
        self.run.free_ballast()
        self._say(
            state=self.final["kind"],
            cause=str(self.final.get("cause") or ""),
            message=str(self.final.get("message") or ""),
            exit_code=code,
            ended=time.time(),
        )
        self.notifier.ended(self.final)

    def _write_final_event(self, code: int | None) -> None:
        """Take the lock, cut a torn line, and append what the worker could not say any more."""
        assert self.worker is not None
        ending = self._explain(code)  # first: it also looks at the disk as the worker left it
        asked = self.asked_to_end if self.term_at is not None else None
        if asked is not None:
            message = "The worker was ended by " + ("SIGKILL" if self.killed else "SIGTERM") + self._why_ended()
            self.final = {"kind": "stopped", "step": None, "by": asked.by, "message": message}
        else:
            lines = list(ending.lines)
            self.final = {"kind": "failed", "cause": ending.cause, "message": ending.message, "lines": lines}
        lock = RunLock(self.run).acquire_soon()
        try:
            with EventWriter(self.run, segment=self.segment) as writer:
                if asked is not None and self.answered.get(asked.id, "accepted") == "accepted":
                    message = self.final["message"]
                    writer.write("control", id=asked.id, do=asked.do, status="done", by=asked.by, message=message)
                writer.write(**self.final)
        finally:
            lock.release()

    def _why_ended(self) -> str:
        assert self.asked_to_end is not None
        if self.asked_to_end.now:
            return " at once, as asked; checkpoints made before are kept."
        return f" because it did not answer within {self._grace():.0f} s; checkpoints made before are kept."

    def _explain(self, code: int | None) -> cause.Cause:
        """Why the worker ended; what another node began is told in that one's words."""
        if self.hung is not None:
            return self.hung
        explained = self._explain_here(code)
        if self.node is None or not (cause.follows(explained, self.run.log, self.log_from) or self.node.others_end()):
            return explained
        met = self.family is not None and bool(self.family.ranks)
        return self.node.blame() or (explained if met else self.node.not_met())

    def _explain_here(self, code: int | None) -> cause.Cause:
        assert self.worker is not None
        lost = self.family.lost_rank if self.family is not None else None
        if lost is not None:
            rank, process = lost
            alone = f"process {process.pid} on {host()}"
            return cause.explain(
                cause.failed_ranks(self.run.log, self.log_from).get(process.pid),
                self.run.log,
                log_from=self.log_from,
                out_of_memory=cause.kernel_ended(process),
                who=f"Rank {rank} ({alone if self.node is None else f'node 0, {host()}, process {process.pid}'})",
            )
        # An adopted worker leaves no exit code, but the kernel's log may still name it.
        memory = code in (None, -signal.SIGKILL) and cause.kernel_ended(self.worker)
        memory = memory or (code == -signal.SIGKILL and -1 < self.oom_before < cause.oom_kills())
        return cause.explain(code, self.run.log, log_from=self.log_from, out_of_memory=memory)

    def _write_end_unseen(self) -> None:
        self.run.free_ballast()
        if self.final is not None:
            self._write(state=self.final["kind"], cause=str(self.final.get("cause") or ""), ended=self.final.get("t"))
            return
        message = "The worker ended while nothing watched it, without a final word."
        if self.run.is_original is False:
            message = "This folder is a copy: the worker that its run.json names works in another, or is gone."
        self._write(state="lost", cause="lost", message=message, ended=time.time())

    # -- while it lives --------------------------------------------------------------------------------------------

    def _read_events(self) -> None:
        """Follow state and answers; the numbers are of no interest here."""
        state = ""
        while events := self.tail.read(500):
            self.notifier.see(events)
            for event in events:
                if event.get("segment") != self.segment:
                    continue
                kind = event["kind"]
                if kind == "started":
                    state = "running"
                elif kind == "control":
                    self.answered[str(event.get("id"))] = str(event.get("status"))
                    if event.get("status") == "accepted" and event.get("do") != "checkpoint":
                        state = "stopping"
                elif kind in ("finished", "stopped", "failed"):
                    self.final, self.ended_at = event, time.monotonic()
        if state and self.final is None:
            self._say(state=state)

    def _grace(self) -> float:
        value = self.run.read_json().get("grace_seconds")
        return float(value) if isinstance(value, (int, float)) and value > 0 else DEFAULT_GRACE

    def _watch_requests(self) -> None:
        """End a worker that was asked to stop and does not answer, and one that said its last word but stays."""
        now = time.monotonic()
        if self.final is not None:
            self._end_by(now, self.ended_at or now, LEAVE_SECONDS, NOW_SECONDS)
            return
        for name in inside.names(self.run, self.run.control):
            path = self.run.control / name
            if name.startswith(".") or not name.endswith(".json"):
                continue
            try:
                request = control.parse(path)
            except FileNotFoundError:
                continue
            if not isinstance(request, control.Request) or request.do not in ("stop", "save_stop"):
                continue
            since = self.first_seen.setdefault(name, now)
            if request.now:
                self.asked_to_end = request
                self._end_by(now, since, 0.0, NOW_SECONDS)
            elif request.do == "stop" or request.id not in self.answered:
                # A save under way is never cut short; an answer that never comes is.
                grace = self._grace()
                if now - since >= grace:
                    self.asked_to_end = request
                    self._end_by(now, since, grace, grace)

    def _end_by(self, now: float, since: float, term_after: float, kill_after: float) -> None:
        assert self.worker is not None
        if self.term_at is None:
            if now - since >= term_after and self._may_signal():
                self.term_at = now
                self._say(state="stopping", message="The worker does not answer; it was sent SIGTERM.")
                send(self.worker, signal.SIGTERM)
        elif now - self.term_at >= kill_after and not self.killed and self._may_signal():
            self.killed = True
            self._say(state="stopping", message="The worker does not answer; it was sent SIGKILL.")
            if self.family is not None:
                self.family.kill()
            send(self.worker, signal.SIGKILL)

    def _may_signal(self) -> bool:
        """A child of this process is the worker for certain; of any other that has to be proven at this very moment."""
        if self.child is not None:
            return True
        return self.family is not None and self.family.may_be_signalled(self.run, leaving=self.final is not None)

    def _watch_ranks(self) -> None:
        """With several ranks: one that dies takes the others with it, and it is the one that is named."""
        if self.family is not None and (self.family.processes > 1 or self.node is not None):
            lost = self.family.look(lambda: cause.agent_saw_failure(self.run.log, self.log_from))
            if lost and self.asked_to_end is None:
                self.family.kill()

    def _watch_heartbeats(self) -> None:
        """Watch the heartbeats of all ranks, where there are several."""
        assert self.family is not None
        ranks = self.family.processes * (1 if self.node is None else self.node.nodes)
        self.hang, self.hung = (Hang(self.run, ranks) if ranks > 1 else None), None

    def _watch_hang(self) -> None:
        """Ranks that wait for each other for too long are ended, and the one that is waited for is named."""
        if self.hang is None or self.hung is not None or self.final is not None:
            return
        found = self.hang.look()
        if found is not None and self.asked_to_end is None and self._may_signal():
            assert self.worker is not None
            self.hung = found
            if self.family is not None:
                self.family.kill()
            send(self.worker, signal.SIGKILL)

    def _watch_nodes(self) -> None:
        """A node that ended or vanished takes this one's ranks with it."""
        if self.node is None:
            return
        self.node.beat()
        if self.final is None and self.family is not None and self.node.others_end() and self._may_signal():
            assert self.worker is not None
            self.family.kill()
            send(self.worker, signal.SIGKILL)

    def _tell_nodes(self) -> None:
        """The round is over for all nodes."""
        assert self.node is not None
        with contextlib.suppress(OSError):  # silence says the same, later
            self.node.say(state="ended")

    def _forward(self, number: int, _: object) -> None:
        """The machine shuts down: the worker hears it too, and may save."""
        if self.worker is not None and not self.forwarded and self._may_signal():
            self.forwarded = True
            send(self.worker, number)

    def _drop_old_requests(self) -> None:
        # Copies leave empty folders behind.
        for part in (self.run.control, self.run.checkpoints, self.run.samples, self.run.index):
            inside.make_folder(self.run, part, exist_ok=True)
        for name in inside.names(self.run, self.run.control):
            control.remove(self.run, self.run.control / name)

    def _say(self, **changes: Any) -> None:
        """As `_write`; what cannot be written now is kept for the next time, because a worker is watched all the same."""
        self.unwritten |= changes
        if not self.unwritten:
            return
        try:
            self._write(**self.unwritten)
            self.unwritten = {}
        except (OSError, WorkbenchError) as problem:
            if str(problem) != self.complaint:
                self.complaint = str(problem)
                print(f"run.json: {problem}", file=sys.stderr, flush=True)

    def _write(self, **changes: Any) -> None:
        me = identity()
        assert me is not None
        fixed = {"supervisor_pid": me.pid, "supervisor_start": me.start, "boot_id": me.boot, "host": me.host}
        now = self.run.read_json()
        if any(now.get(key) != value for key, value in {**fixed, **changes}.items()):
            self.run.update_json(**fixed, **changes)


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


def _detach(work: Callable[[Callable[[], None]], None]) -> NoReturn:
    """Run `work` in a process that nobody waits for; this one leaves when `work` calls what it is given, or fails."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        data = b""
        while block := os.read(reading, 4096):
            data += block
        code, _, text = data.partition(b" ")
        sys.stderr.write(text.decode())
        sys.stderr.flush()
        os._exit(int(code) if code.isdigit() else 1)
    os.close(reading)

    def send(data: bytes) -> None:
        os.write(writing, data)
        os.close(writing)

    _answering(work, send)


def _answering(work: Callable[[Callable[[], None]], None], send: Callable[[bytes], None]) -> NoReturn:
    """Run `work`, and send that it began once it calls what it is given, or an exit code and why it failed before."""
    told = False

    def report(code: int, text: str = "") -> None:
        nonlocal told
        told = True
        send(f"{code} {text}".encode())

    try:
        work(lambda: report(0))
    except (WorkbenchError, OSError) as problem:
        if told:
            raise  # nobody waits for it any more: the traceback goes to worker.log
        report(3 if isinstance(problem, RunBusy) else 1, str(problem))
    os._exit(0)


def wait(text: str) -> NoReturn:
    """Have a worker wait, in a process that nobody waits for, until the window at the standard input hands over a run."""
    hold_on()
    wanted = wanted_from(text)
    if os.fork():
        os._exit(0)
    window = socket.socket(fileno=os.dup(0))
    waiting = Waiting(wanted, secrets.token_hex(16))
    try:
        path = waiting.until_asked(window)
    except OSError:
        path = ""  # the window is gone
    if not path:
        waiting.end()
        os._exit(0)

    def send(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a window that left in this very moment: the run goes on
            window.send(data)
        window.close()

    _answering(_work("start", RunFolder(path), waiting), send)


def main(do: str, path: str) -> NoReturn:
    hold_on()
    _detach(_work(do, RunFolder(path)))


def hold_on() -> None:
    """What this process makes is its owner's alone, and it does not end with the terminal it was started from."""
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(do: str, run: RunFolder, waiting: Waiting | None = None) -> Callable[[Callable[[], None]], None]:
    """All that a supervisor does; it calls what it is given once the run has begun."""

    def work(ready: Callable[[], None]) -> None:
        handle = claim(run, patience=2.0 if do == "start" else 0.0)
        supervisor = Supervisor(run, waiting)
        waits = run.state == "queued"
        if waits or (do == "start" and rendezvous_of(run).nodes > 1):
            run.refuse_flaws()
            if not waits:
                supervisor._drop_old_requests()
            supervisor._write(state=run.state, folder=inside.identity(run))
            _quiet(run)
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
        _quiet(run)
        ready()
        supervisor.stay()
        os.close(handle)

    return work


def _quiet(run: RunFolder) -> None:
    """No pipe and no terminal stays open: they would end this process with their owner."""
    log = inside.open_file(run, run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("start", "attend", "wait") or sys.argv[2] != "--":
        sys.exit("usage: python -P -m engine.run.supervise start|attend -- FOLDER, or wait -- WANTED")
    if sys.argv[1] == "wait":
        wait(sys.argv[3])
    main(sys.argv[1], sys.argv[3])
