"""The worker's end of uploads while it trains: the process that sends, what it is asked, and what it tells.

No step waits for it: an order is one write into a pipe that never blocks, and what comes back is read by a thread and written
down by the events' own. A hub that fails is a sentence among the findings, never the end of a run; one that refuses is told
before the first step. At its end a run waits for the last checkpoint to arrive, for as long as `run.hub_wait_seconds` says, while
bytes move, and a request to stop ends that.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from engine.config.adapter import Lora
from engine.config.tree import RunConfig
from engine.errors import WorkbenchError, redact, visible
from engine.export.hub_folder import drop_old
from engine.export.hub_sender import arrived
from engine.export.places import steps
from engine.export.push import PATIENCE
from engine.run.async_writer import AsyncWriter
from engine.run.spawn import HUB_TOKENS, python, safe_python, without_tokens
from engine.run.store import RunFolder, called

MODULE = "engine.export.hub_sender"
CHECK_SECONDS = 15.0
"""How long the first step waits at most to hear whether the repository takes what will come."""
LOOK_SECONDS = 0.2
STILL, TROUBLED = 5 * PATIENCE, 2 * PATIENCE
"""Seconds without a byte after which the end waits no longer: large files are read for their hash first, and a hub that has
failed already is given less."""
MUCH = 64 << 20
"""Bytes of an attempt that are more than asking again sends."""
_KEPT = {"begun": ("step", "files", "bytes", "what"), "arrived": ("step", "url", "bytes", "seconds", "what"),
         "retry": ("step", "message"), "failed": ("step", "message"), "passed": ("step",), "deleted": ("step",)}  # fmt: skip
"""What an event says of each report."""
_WHEN = {
    "end": "of the last checkpoint once the run finishes",
    "every_save": "of each checkpoint",
    "checkpoint": "of each checkpoint, and all of the newest with its optimizer states",
    "all_checkpoints": "of each checkpoint, and all of each with its optimizer states",
}


class Uploads:
    """The uploads of one run, on rank 0. A context: the process that sends is gone after it."""

    def __init__(self, run: RunFolder, config: RunConfig, writer: AsyncWriter) -> None:
        self._run, self._writer, self._section = run, writer, config.run
        self._name = str(config.run.hub_model_id)
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._taking = threading.Lock()
        self._answered = threading.Event()
        self._refused: WorkbenchError | None = None
        self._form = " --form adapter" if isinstance(config.adapter, Lora) else ""
        self._asked: int | None = None
        self._orders_made: list[int] = []
        self._became: dict[int, str] = {}
        self._warned: set[str] = set()
        self._trouble = ""
        self._moved = time.monotonic()
        self._sent, self._most, self._mark = (0, 0), 0, 0
        """Bytes that went of how many, the most that went in any attempt, and those of this one when it last moved."""
        self._over = self._closed = self._finishing = False
        environment = {
            **without_tokens(os.environ, HUB_TOKENS),
            **safe_python(os.environ),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_VERBOSITY": "error",
            # Its transfers have no end of their own, and tell of no bytes.
            "HF_HUB_DISABLE_XET": os.environ.get("HF_HUB_DISABLE_XET", "1"),
        }
        self._process = subprocess.Popen(
            [*python(), "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env=environment
        )
        assert self._process.stdin is not None
        self._orders = self._process.stdin.fileno()
        os.set_blocking(self._orders, False)
        self._order({"run": str(run.path)})
        threading.Thread(target=self._read, name="uploads", daemon=True).start()
        writer.beside(self._take)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        """Ends the process; of a run that ends by an error, says what has not arrived."""
        try:
            self._take()
            if problem[0] is not None and self._asked is not None and not (self._closed or self._settled(self._asked)):
                self._warn("not sent", self._missing(self._asked, "it failed or was stopped first"))
        finally:
            if not self._closed:
                self.close()

    def close(self) -> None:
        """Ends the process, which takes its folder away; nothing is written down from here on, since a run's last event is its
        last."""
        with self._taking:
            self._closed = True
        # Processes that were forked meanwhile hold its input too: that this end closes is not enough.
        self._order({"leave": True})
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError, WorkbenchError):
            drop_old(self._run)  # of one that was killed: its links hold the room of checkpoints that are deleted

    # -- orders --------------------------------------------------------------------------------------------------------
    def ready(self) -> list[dict[str, Any]]:
        """The receipt's row, once the hub has said whether it takes what will come, or has not answered in time. Raises
        WorkbenchError where it will not."""
        # The answer is put where `_take` finds it before that is told.
        end = time.monotonic() + CHECK_SECONDS
        while not self._answered.is_set() and time.monotonic() < end:
            self._take()
            self._answered.wait(LOOK_SECONDS)
        self._take()
        if self._refused is not None:
            raise self._refused
        strategy, private = self._section.hub_strategy, self._section.hub_private_repo
        model = "adapter" if self._form else "weights"
        whose = "private" if private else "for everybody unless the repository was private"
        words = f"to {self._name}, {whose}: {model}, tokenizer and model card {_WHEN[strategy]}"
        if self._trouble or not self._answered.is_set():
            words += "; the hub has not answered yet"
        row = {"requested": strategy, "effective": "on", "count": None, "detail": words}
        return [{"feature": "push to hub", **row}]

    def committed(self, step: int) -> None:
        """A checkpoint is whole. Costs its caller one write that never waits; any thread may call it."""
        if self._section.hub_strategy != "end":
            self._send(step)

    def gone_on(self, step: int) -> None:
        """The run goes on from the checkpoint of `step`, which may not have arrived; nor may older ones then, where all are sent."""
        strategy, older = self._section.hub_strategy, list[int]()
        # Behind one that is there already an older one would take the place of its model.
        if strategy == "all_checkpoints" and arrived(self._run, self._name, strategy, step) is None:
            older = [each for each in steps(self._run) if each < step]
        for each in (*older, step):
            self.committed(each)

    def _send(self, step: int) -> None:
        self._asked = step
        self._orders_made.append(step)
        self._order({"send": step})

    def _order(self, line: Mapping[str, Any]) -> None:
        try:
            os.write(self._orders, json.dumps(line).encode() + b"\n")  # shorter than PIPE_BUF: all of it or none
        except OSError:  # full, since the process stands still, or it is gone: told at the end
            return

    # -- reports -------------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        """On a thread: what the process tells, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self._reports.put(json.loads(line))
        self._reports.put({"state": "over"})

    def _take(self) -> None:
        """Writes down what was told: ten times a second on the events' own thread, and while the end waits."""
        with self._taking, contextlib.suppress(queue.Empty):
            while not self._closed:
                self._note(self._reports.get_nowait())

    def _note(self, report: dict[str, Any]) -> None:
        state, step = str(report["state"]), report.get("step")
        if state == "sending":
            self._sent = report["done"], report["total"]
            if report["done"] > self._most or report["done"] >= self._mark + MUCH:
                # More than in any attempt before, or so much that it is no mere asking again.
                self._moved, self._mark = time.monotonic(), report["done"]
                self._most = max(self._most, report["done"])
            return
        if state in ("over", "ready", "refused", "unreachable"):
            self._answer(state, report)
            return
        self._became[report["step"]] = state
        name = f"checkpoint-{step}"
        if state == "begun":
            self._sent, self._mark = (0, report["bytes"]), 0
        elif state == "arrived":
            self._trouble, self._most = "", 0
        elif state == "retry":
            self._trouble = report["message"]
            self._warn(
                f"retry {step}",
                f"{name} has not arrived at {self._name}: {self._trouble}. It is tried again, and the training goes on.",
            )
        elif state == "failed":
            self._warn(f"failed {step}", f"{name} was not sent to {self._name}: {report['message']}")
        elif state == "deleted":
            self._warn(f"deleted {step}", f"{name} was not sent: run.save_total_limit had it deleted before its turn.")
        kept = {key: report[key] for key in _KEPT.get(state, ()) if key in report}
        self._writer.write("upload", state=state, repository=self._name, **kept)

    def _answer(self, state: str, report: dict[str, Any]) -> None:
        """What the hub said to the question whether it takes what will come."""
        if state == "over":
            self._over = True
            if not self._finishing:
                self._warn(
                    "over",
                    "the process that sends has ended, so no more checkpoints are sent. The worker's log tells more.",
                )
        if state == "refused":
            self._refused = WorkbenchError(report["message"], report["hint"])
        elif state == "unreachable":
            self._trouble = report["message"]
            self._warn(
                "unreachable", f"{self._trouble}. Checkpoints are sent once it answers; the training does not wait."
            )
        self._answered.set()

    def _warn(self, what: str, message: str) -> None:
        """Once each."""
        if what not in self._warned:
            self._warned.add(what)
            words = visible(redact(message))
            self._writer.write("finding", path="run.push_to_hub", severity="warning", rule="hub", message=words)

    def _settled(self, step: int) -> bool:
        return self._became.get(step) in ("arrived", "failed", "passed", "deleted")

    @property
    def phase(self) -> str:
        """What a run that has made its steps does."""
        return f"Sending the last checkpoint to {self._name}"

    def sends_last(self, *, stopped: bool) -> bool:
        """Whether the last checkpoint is to be sent: `end` waits for a run that was stopped to go on."""
        return not (stopped and self._section.hub_strategy == "end")

    def leave(self) -> None:
        """Says what has not arrived, where the run is stopped without waiting."""
        self._take()
        if self._asked is not None and not self._settled(self._asked):
            self._warn("not sent", self._missing(self._asked, "it was stopped at once"))
        self.close()

    # -- the end -------------------------------------------------------------------------------------------------------
    def finish(self, step: int, look: Callable[[int, int], str], *, hurried: bool) -> None:
        """Waits until the checkpoint of `step` has arrived: as long as the config says, and while bytes move.
        `look` is told how much went of how much and says why to wait no longer, empty to go on."""
        if self._asked != step or self._became.get(step) == "failed":
            self._became.pop(step, None)
            self._send(step)
        self._finishing = True
        self._order({"finish": True})
        begun = self._moved = time.monotonic()
        section = self._section
        longest = min(section.hub_wait_seconds, section.grace_seconds if hurried else section.hub_wait_seconds)
        why = ""
        while not why:
            self._take()
            if self._settled(step):
                break
            now = time.monotonic()
            still = TROUBLED if self._trouble else STILL
            if self._over:
                why = "the process that sends has ended"
            elif now - begun >= longest:
                why = f"it took longer than {longest:g} s"
            elif now - self._moved >= still:
                why = self._trouble or f"no byte went for {still:g} s"
            else:
                why = look(*self._sent)
                time.sleep(LOOK_SECONDS)
        if why:
            self._warn("not sent", self._missing(step, why))
        self.close()

    def _missing(self, step: int, why: str) -> str:
        again = f"`workbench push {called(self._run)} --checkpoint {step}{self._form} --to {self._name}` sends it"
        older = [
            f"checkpoint-{each}"
            for each in dict.fromkeys(self._orders_made)
            if each != step and not self._settled(each)
        ]
        nor = f" Nor had {', '.join(older)}, which going on with the run sends while they are kept." if older else ""
        return f"checkpoint-{step} had not arrived at {self._name} when the run ended: {why}; {again}.{nor}"
