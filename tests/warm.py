"""Commands in processes of their own that import nothing first: each is forked from one that has imported them all.

The parent knows no torch, as the commands themselves do not. From the fork on a command goes its usual way: the entry of
`python -P -m workbench`, and arguments, environment, import path, folder, standard files and exit code of its own. What
it starts is started as ever. Where the start itself is looked at (what is imported, how it is called), start Python.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent / "prestarted"))
import prestarted

sys.path.pop(0)

if TYPE_CHECKING:
    from engine.client import Inspector

ROOT = Path(__file__).parents[1]
LONGEST = 1 << 17


def command(
    *words: str, cwd: Path | None = None, timeout: float = 60, terminal: int | None = None, code: str = ""
) -> subprocess.CompletedProcess[str]:
    """`workbench WORDS`, or `code` with these arguments; what it wrote, or nothing where it wrote to `terminal`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        files = [nothing.fileno(), terminal or out.fileno(), terminal or err.fileno()]
        asked = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": dict(os.environ), "code": code}
        ended = _ask(json.dumps(asked).encode(), files, timeout)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode("utf-8", "replace"))
    return subprocess.CompletedProcess(words, ended, *said)


@contextlib.contextmanager
def sharing(inspector: Inspector) -> Iterator[None]:
    """Commands that run in this process meanwhile ask this inspector and leave it open, so that it imports once."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.client.Inspector", lambda: contextlib.nullcontext(inspector))
        yield


def here(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`workbench WORDS` from its entry to its exit code in this very process."""
    import pytest

    from workbench.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["workbench", *words])
        patch.chdir(cwd or Path.cwd())
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            gc.enable()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def _ask(asked: bytes, files: Sequence[int], timeout: float) -> int:
    with _parent(os.getpid()) as calls:
        socket.send_fds(calls, [asked], files)
        pid = int(calls.recv(100))
        calls.settimeout(timeout)
        try:
            return int(calls.recv(100))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired("workbench", timeout) from None


def _parent(owner: int) -> socket.socket:
    """A line of one's own to the warm parent."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
    line.connect(_place(owner))
    return line


@functools.cache
def _place(owner: int) -> str:
    """Starts the warm parent of this process; the socket where it listens. It ends with this process."""
    place = Path(tempfile.mkdtemp(prefix="workbench-tests-warm-")) / "calls"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-P", __file__, str(place), str(owner)]
    parent = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    atexit.register(_end, parent, owner, place)
    while not place.exists():
        assert parent.poll() is None, "the warm parent did not start"
        time.sleep(0.02)
    return str(place)


def _end(parent: subprocess.Popen[bytes], owner: int, place: Path) -> None:
    if os.getpid() == owner:
        parent.kill()
        parent.wait()
        place.unlink(missing_ok=True)
        place.parent.rmdir()


def _serve(place: str, owner: int) -> None:
    entry = importlib.import_module("workbench.__main__")
    for module, _ in entry.COMMANDS.values():
        importlib.import_module(f"workbench.cli.{module}")
    assert not {"torch", "transformers", "datasets", "numpy"} & sys.modules.keys()
    del sys.modules["workbench.__main__"]  # each command runs it anew
    prestarted.install()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"{place}.new")
        door.listen(8)
        os.rename(f"{place}.new", place)
        door.settimeout(5)
        while os.getppid() == owner:
            try:
                calls, _ = door.accept()
            except TimeoutError:
                continue
            calls.settimeout(None)
            with calls:
                _answer(calls, door)


def _answer(calls: socket.socket, door: socket.socket) -> None:
    asked, files, _, _ = socket.recv_fds(calls, LONGEST, 3)
    if not (pid := os.fork()):
        door.close()
        calls.close()
        os._exit(_become(json.loads(asked), files))
    for each in files:
        os.close(each)
    calls.sendall(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # it was not waited for
        calls.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _become(asked: dict[str, object], files: Sequence[int]) -> int:
    """The command, in this process; its exit code."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(asked["environment"])  # type: ignore[call-overload]
    for name, number in (("stdout", 1), ("stderr", 2)):
        encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
        errors = errors or ("strict" if number == 1 else "backslashreplace")
        setattr(sys, name, open(number, "w", encoding=encoding, errors=errors, buffering=1, closefd=False))  # noqa: SIM115
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(part)]
    if any(os.path.exists(os.path.join(part, "sitecustomize.py")) for part in sys.path):
        importlib.import_module("sitecustomize")
    sys.argv = ["workbench", *asked["words"]]  # type: ignore[misc]
    code = 0
    try:
        if asked["code"]:
            exec(str(asked["code"]), {"__name__": "__main__"})
        else:
            runpy.run_module("workbench", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
