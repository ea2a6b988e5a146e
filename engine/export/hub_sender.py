"""`python -P -m engine.export.hub_sender`: sends the checkpoints of one run to a hub while it trains, and tells of it.

The worker asks in lines of JSON (`engine.export.uploads`): `{"send": N}` for a checkpoint that is whole, `{"finish": true}` once
no more come, `{"leave": true}` to end at once. The process ends with its input or its worker, and alone holds the token by then.
Nothing is sent before the repository is known to be there, to be as private as the config says, and to take what this token
writes.

A network or a hub that fails is told once and tried again, with pauses that grow; one that refuses is tried again with the
next checkpoint. What has arrived is noted in the run's `hub.json` before it is told, so a run that goes on sends nothing twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from engine.config.tree import RunConfig
from engine.errors import Redacting, WorkbenchError, visible
from engine.export import push
from engine.export.hub_folder import HubFolder, drop_old, hub_folder
from engine.run import checkpoint, inside
from engine.run.store import RunFolder

RECORD = "hub.json"
MOST_PAUSE = 300.0
TELL_SECONDS = 0.5
LOOK_SECONDS = 2.0
"""Between two looks whether the worker still lives."""
_LATER = (408, 409, 412, 425, 429)
"""Status codes with which the hub asks for patience; those from 500 on do too."""
_MOST = 1 << 20


class Refused(WorkbenchError):
    """The hub will not take it as things stand, however often it is asked."""


class Sender:
    """Sends what it is asked to; `tell` is given a line of its report."""

    def __init__(self, run: RunFolder, config: RunConfig, tell: Callable[[dict[str, Any]], None]) -> None:
        self._run, self._config, self._tell = run, config, tell
        self._name, self._strategy = str(config.run.hub_model_id), config.run.hub_strategy
        self._waiting: list[int] = []
        self._finishing = False
        self._asked = threading.Condition()
        self._api: Any = None
        self._token = ""
        self._ready = False
        self._sent = self._told = 0.0
        self._total = 0

    def ask(self, line: dict[str, Any]) -> None:
        """Takes up an order; called by the thread that reads them."""
        with self._asked:
            if "send" in line:
                self._waiting.append(int(line["send"]))
            self._finishing |= bool(line.get("finish"))
            self._asked.notify_all()

    def serve(self) -> None:
        """Looks whether the repository takes what will come, and tells; then sends until nothing is left to come."""
        try:
            self._prepare()
        except push.Unreachable as problem:
            self._tell({"state": "unreachable", "message": _cause(problem)})
        except WorkbenchError as problem:
            self._tell({"state": "refused", "message": problem.message, "hint": problem.hint})
        while (step := self._next()) is not None:
            self._send(step)

    # -- what is sent next ---------------------------------------------------------------------------------------------
    def _next(self) -> int | None:
        """The step to send, once there is one; None where no more come."""
        with self._asked:
            self._asked.wait_for(lambda: bool(self._waiting) or self._finishing)
            if not self._waiting:
                return None
            if self._strategy == "all_checkpoints":
                return self._waiting.pop(0)
            *older, step = self._waiting
            self._waiting.clear()
        for each in set(older) - {step}:
            self._tell({"state": "passed", "step": each})
        return step

    def _superseded(self, pause: float) -> bool:
        """Waits; whether a newer checkpoint came that takes the place of the one that waits."""
        newest_alone = self._strategy != "all_checkpoints"
        with self._asked:
            self._asked.wait_for(lambda: newest_alone and bool(self._waiting), timeout=pause)
            return newest_alone and bool(self._waiting)

    # -- the hub -------------------------------------------------------------------------------------------------------
    def _prepare(self) -> None:
        """The repository is there, private where that is asked for, and takes what this token writes. Raises Refused or
        Unreachable."""
        if self._ready:
            return
        from huggingface_hub import HfApi, get_token

        name, private = self._name, self._config.run.hub_private_repo
        if self._api is None:
            self._token = get_token() or ""
            if not self._token:
                raise Refused(
                    "run.push_to_hub: the hub asks for a token, and there is none.",
                    "Run `hf auth login`, or set HF_TOKEN; or remove run.push_to_hub.",
                )
            self._api = HfApi(token=self._token)
        with self._failures():
            self._api.create_repo(name, private=private, exist_ok=True)
            if private and self._api.model_info(name).private is not True:
                raise Refused(
                    f"run.hub_model_id: everybody can read it: {visible(name)} is there already, and run.hub_private_repo is on.",
                    "Make it private on the hub, name another repository, or set run.hub_private_repo: false.",
                )
            # Of a repository that is there a token that may only read says nothing until it writes.
            self._api.auth_check(name, write=True)
        self._ready = True
        self._tell({"state": "ready", "repository": name, "private": private})

    @contextlib.contextmanager
    def _failures(self) -> Any:
        """Tells apart what passes by itself (Unreachable) and what does not (Refused)."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except OfflineModeIsEnabled as problem:
            raise Refused("run.push_to_hub: HF_HUB_OFFLINE forbids to reach the hub.", "Unset it.") from problem
        except (KeyError, TypeError, AttributeError) as problem:
            traceback.print_exc(file=sys.stderr)
            said = f"it answered what its client does not understand ({type(problem).__name__})"
            raise Refused(f"run.push_to_hub: {visible(self._name)}: {said}.", "Look at HF_ENDPOINT.") from problem
        except (HfHubHTTPError, OSError, ValueError, RuntimeError) as problem:
            if isinstance(problem, FileNotFoundError) and not isinstance(problem, HfHubHTTPError):
                raise
            if (told := push.unreachable(problem)) is not None:
                raise told from problem
            answers = (each.response for each in push.chain(problem) if isinstance(each, HfHubHTTPError))
            status = next((answer.status_code for answer in answers if answer is not None), 0)
            said = push.reason(problem, self._token)
            if status in _LATER or status >= 500:
                raise push.Unreachable(f"push: the hub answers with error {status}.") from problem
            self._ready = False  # a repository that is gone, or that was opened to all, is looked at again
            raise Refused(
                f"run.push_to_hub: the hub refuses {visible(self._name)}: {said}", _way_out(status, self._name)
            ) from problem

    # -- one checkpoint ------------------------------------------------------------------------------------------------
    def _send(self, step: int) -> None:
        """Sends one checkpoint, however often it takes; tells what became of it."""
        if (url := arrived(self._run, self._name, self._strategy, step)) is not None:
            self._tell({"state": "arrived", "step": step, "url": url, "again": True})
            return
        pause, begun, card = push.PATIENCE / 12, time.monotonic(), ""
        while True:
            try:
                self._prepare()
                with hub_folder(self._run, self._config, step, self._strategy, card) as folder:
                    card = folder.card  # out of all events of the run, which may be a million
                    digest = _digest(self._run, step)
                    url = self._upload(step, folder)
                self._note(step, digest, url)
                seconds = round(time.monotonic() - begun, 3)
                about = {"url": url, "bytes": folder.bytes, "seconds": seconds, "what": folder.what}
                self._tell({"state": "arrived", "step": step, **about})
                return
            except push.Unreachable as problem:
                self._tell({"state": "retry", "step": step, "message": _cause(problem), "pause": pause})
            except FileNotFoundError:
                self._tell({"state": "deleted", "step": step})
                return
            except WorkbenchError as problem:
                self._tell({"state": "failed", "step": step, "message": problem.full_message})
                return
            except OSError as problem:
                why = problem.strerror or type(problem).__name__
                self._tell({"state": "failed", "step": step, "message": f"it cannot be put together: {visible(why)}."})
                return
            if self._superseded(pause):
                self._tell({"state": "passed", "step": step})
                return
            pause = min(2 * pause, MOST_PAUSE)

    def _upload(self, step: int, folder: HubFolder) -> str:
        """The address of the commit that holds the folder: all of it, or there is none."""
        self._sent, self._total = 0, folder.bytes
        self._tell({"state": "begun", "step": step, "files": folder.files, "bytes": folder.bytes, "what": folder.what})
        with self._failures():
            made = self._api.upload_folder(
                repo_id=self._name, folder_path=folder.path, commit_message=f"Training in progress, step {step}"
            )
        return str(made.commit_url)

    def count(self, sent: int) -> None:
        """Bytes that went, of any request; several threads send."""
        self._sent += sent
        now = time.monotonic()
        if self._total and now - self._told >= TELL_SECONDS:
            self._told = now
            self._tell({"state": "sending", "done": min(int(self._sent), self._total), "total": self._total})

    # -- what has arrived ----------------------------------------------------------------------------------------------
    def _note(self, step: int, digest: str, url: str) -> None:
        known = inside.read_json(self._run, self._run.path / RECORD, _MOST)
        known[_key(self._name, self._strategy, step)] = {"digest": digest, "url": url, "t": time.time()}
        newest = dict(list(known.items())[-1000:])
        try:
            inside.replace(self._run, self._run.path / RECORD, json.dumps(newest, indent=1) + "\n")
        except (OSError, WorkbenchError):  # it has arrived all the same; a run that goes on sends it again
            traceback.print_exc(file=sys.stderr)


def arrived(run: RunFolder, name: str, strategy: str, step: int) -> str | None:
    """The address of the commit that holds this very checkpoint, by what the run notes; None where none does."""
    known = inside.read_json(run, run.path / RECORD, _MOST).get(_key(name, strategy, step))
    try:
        same = isinstance(known, dict) and known.get("digest") == _digest(run, step)
    except OSError:
        return None
    return str(known.get("url") or "") if same and isinstance(known, dict) else None


def _key(name: str, strategy: str, step: int) -> str:
    return f"{name}:{strategy}:{step}"


def _digest(run: RunFolder, step: int) -> str:
    """A checkpoint by what it lists: a run that went back makes another one of the same step."""
    return hashlib.sha256(inside.read(run, run.checkpoints / f"checkpoint-{step}" / checkpoint.COMMIT)).hexdigest()


def _cause(problem: WorkbenchError) -> str:
    return problem.message.removeprefix("push: ").rstrip(".")


def _way_out(status: int, name: str) -> str:
    owner = visible(name.partition("/")[0])
    if status == 401:
        return "The token is not one that the hub knows: run `hf auth login`, or set HF_TOKEN anew."
    if status in (403, 404):
        return f"Take a token that may write for {owner} (`hf auth login`, HF_TOKEN), or name another run.hub_model_id."
    return "Look at run.hub_model_id and at the hub."


def main() -> None:
    """Serves the worker at the other end of the standard input, and leaves when that closes."""
    from engine.config.files import parse
    from engine.rules import read

    # The worker decides when it is over: what ends that one closes the input.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    telling = threading.Lock()

    def tell(line: dict[str, Any]) -> None:
        with telling, contextlib.suppress(OSError):
            out.write(json.dumps(line) + "\n")
            out.flush()

    orders = sys.stdin.buffer
    run = RunFolder(json.loads(orders.readline())["run"])
    sender = Sender(run, read(parse(run.read_config(), path=run.config).mapping).accepted(), tell)
    push.bound(sender.count)

    def listen() -> None:
        for line in orders:
            if (order := json.loads(line)).get("leave"):
                break
            sender.ask(order)
        leave()

    def leave() -> None:
        with contextlib.suppress(OSError, WorkbenchError):
            drop_old(run)
        os._exit(0)

    def outlive_none(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        leave()  # the worker was killed, and what it had forked still holds our input

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=outlive_none, args=(os.getppid(),), daemon=True).start()
    sender.serve()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)
