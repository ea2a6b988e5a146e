"""`run.notify`: one short message to a webhook or an ntfy topic when a run ends, fails, diverges, stalls or fills the disk.

The supervisor knows when, and a process of its own posts: `python -P -m engine.run.notify`, which has `LIMIT` seconds and
whose failure is a line of the log. The address stands in the run's config alone: never in an argument, an event or a
message. What is sent names the run, its state, the cause in a word, the step and the last losses; no row, no path, no text
of an error. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine import figures
from engine.errors import WorkbenchError, host_of, visible
from engine.run import silence
from engine.run.checkpoint import NEEDED
from engine.run.curves import titled, told_by
from engine.run.spawn import python, safe_python, without_tokens
from engine.run.store import RunFolder
from engine.run.view import RunView, fold

LIMIT = 15.0
"""Seconds that a message may take, names of hosts looked up included."""
DISK_SECONDS = 10.0
"""Between two looks at the disk."""
_ASKED = re.compile(r"\bnotify\b")


class Notifier:
    """What the supervisor of one run tells it; each thing is posted once. Raises nothing."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._wanted = False
        # The config is read by who posts; here only whether it may name an address.
        with contextlib.suppress(WorkbenchError):
            self._wanted = bool(_ASKED.search(run.read_config()))
        self._view = RunView(id=run.id)
        self._heard = time.monotonic()
        self._stalled = self._diverged = self._filled = False
        self._looks = 0.0

    def see(self, events: Sequence[dict[str, Any]]) -> None:
        """New events of the run."""
        if not self._wanted:
            return
        fold(self._view, events)
        # Curves are of no interest here, and a run may go on for weeks.
        self._view.series.clear()
        self._heard, self._stalled = time.monotonic(), False
        if self._view.diverged and not self._diverged and not self._view.over:
            self._diverged = True
            step = self._view.diverged_at
            self._post("diverged", f"{self.run.id} diverged at step {step}: its numbers are not finite", step)

    def tick(self) -> None:
        """Called again and again while the worker lives."""
        if not self._wanted:
            return
        self._look_at_disk()
        if self._stalled:
            return
        quiet = silence.silent_for(self._view, time.monotonic() - self._heard)
        if quiet is not None:
            self._stalled = True
            self._post(
                "stalled", f"{self.run.id} is {silence.describe(quiet)} at step {self._view.step}", self._view.step
            )

    def _look_at_disk(self) -> None:
        """Tells while there is still time that the disk will not hold another checkpoint; anew once it did have room again."""
        now = time.monotonic()
        if now < self._looks:
            return
        self._looks = now + DISK_SECONDS
        sizes = [int(entry["bytes"]) for entry in self._view.checkpoints if entry["bytes"]]
        free = free_bytes(self.run)
        if not sizes or free is None:
            return
        needed = int(NEEDED * sizes[-1])
        if free >= 2 * needed:
            self._filled = False
        elif free < needed and not self._filled:
            self._filled = True
            words = f"{self.run.id} fills the disk: {figures.size(free)} free, its next checkpoint needs {figures.size(needed)}"
            self._post("disk", f"{words}; at step {figures.count(self._view.step)}", self._view.step)

    def ended(self, final: Mapping[str, Any]) -> None:
        """The run's last word, or what stands for it: `kind` and `cause`."""
        if not self._wanted:
            return
        state, cause, step = str(final["kind"]), str(final.get("cause") or ""), self._view.step
        if state == "finished":
            words = f"{self.run.id} finished: {figures.count(step)} steps"
        else:
            words = f"{self.run.id} {'was stopped' if state == 'stopped' else state} at step {figures.count(step)}"
        latest = self._view.latest
        lines = [f"{titled(key)} {figures.number(latest[key], 4)}" for key in told_by(latest) if key in latest]
        words = ", ".join([words, *lines]) if state == "finished" else f"{words}: {cause}" if cause else words
        self._post(state, words, step, cause)

    def _post(self, state: str, text: str, step: int | None, cause: str = "") -> None:
        # A cause is a word of ours; what a worker of somebody else wrote there is cut.
        clean = visible(cause)[:60]
        message = {"run": self.run.id, "state": state, "cause": clean, "step": step, "text": visible(text)[:300]}
        try:
            process = subprocess.Popen(
                [*python(), "-m", "engine.run.notify"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**without_tokens(os.environ), **safe_python(os.environ)},
                start_new_session=True,
            )
            assert process.stdin is not None
            with process.stdin as pipe:
                pipe.write(json.dumps({"path": str(self.run.path), "message": message}).encode())
        except OSError as problem:
            print(f"run.notify: {problem.strerror or type(problem).__name__}", file=sys.stderr, flush=True)


def free_bytes(run: RunFolder) -> int | None:
    """Room on the disk of a run; None where that cannot be told."""
    try:
        space = os.statvfs(run)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize


# -- the process that posts --------------------------------------------------------------------------------------------
def main() -> int:
    """Posts one message, read from the input; 0 where there is no address or it was taken."""
    from engine.config.files import parse

    asked = json.loads(sys.stdin.buffer.read())
    run = RunFolder(asked["path"])
    section = parse(run.read_config(), path=run.config).mapping.get("run")
    address = section.get("notify") if isinstance(section, dict) else None
    if not isinstance(address, str) or not (host := host_of(address)):
        return 0
    if problem := posted(address, asked["message"]):
        print(f"run.notify: {visible(host)} {problem}; the run is not touched by it.", file=sys.stderr, flush=True)
        return 1
    return 0


def posted(address: str, message: dict[str, Any]) -> str:
    """Posts the message within `LIMIT`; what went wrong in a few words without the address, empty where it was taken."""
    errors: list[str] = []
    # A name that is being looked up cannot be interrupted, but left behind.
    thread = threading.Thread(target=lambda: errors.append(_sent(address, message)), daemon=True)
    thread.start()
    thread.join(LIMIT)
    return errors[0] if errors else f"did not answer within {LIMIT:g} s"


def _sent(address: str, message: dict[str, Any]) -> str:
    import urllib.error
    import urllib.request  # not in the supervisor, which this module is a part of

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """What is posted goes where the person said, and to no other place."""

        def redirect_request(self, *_: Any) -> None:
            return None

    if any(part == "ntfy" for part in host_of(address).split(".")):
        body, headers = message["text"].encode(), {"Title": "workbench", "Content-Type": "text/plain; charset=utf-8"}
    else:
        # Slack and Mattermost show `text`, Discord `content`.
        body = json.dumps({**message, "content": message["text"]}).encode()
        headers = {"Content-Type": "application/json"}
    headers["User-Agent"] = "workbench"
    try:
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        with urllib.request.build_opener(NoRedirect).open(request, timeout=LIMIT):
            return ""
    except urllib.error.HTTPError as problem:
        return f"refused it with status {problem.code}"
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "reason", problem)
        return f"could not be reached ({type(reason).__name__})"


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
