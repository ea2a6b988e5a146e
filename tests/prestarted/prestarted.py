"""Processes that need torch, forked from one that has imported it: an import costs each ten seconds of a core otherwise.

`python -P -m engine.worker` and its like, torchrun and its ranks, started through `subprocess` while tests run, are forked
from a server that all processes of these tests share. So are the processes of tests side by side themselves. From the fork on each goes its usual way: entry, arguments, environment (also as the
kernel shows it), folder, standard files, limits, session and exit code of its own. What cannot be told apart by that is
started as ever: another interpreter or import path, other variables that libraries read at import, another user,
namespace or control group, a process under strace, or one that has to come before the server is ready.
The standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SMALL = ROOT / "tests" / "fault" / "small_worker"
"""Puts another worker in the place of `engine.worker`, and nothing else."""
PLACE = "WORKBENCH_TESTS_ROOM"
"""Names the folder of these tests, where the server listens."""
ASKER = "WORKBENCH_TESTS_ASKER"
"""Names, in the environment of a process that the server forked, the one that asked for it: its parent in all but name."""
COLD = "WORKBENCH_TESTS_COLD"
"""Set where a process is to be started as ever."""
WARM = "WORKBENCH_TESTS_WARM"
"""Set for `python [-P] -c CODE ...` whose start is not what is looked at: it is forked too, where its code may find torch and
all the rest imported already."""
TORCHRUN = "engine.compat.torchrun"
MODULES = (
    "engine.worker",
    "engine.inspector",
    "engine.chat",
    "engine.export",
    "tests.engine.trainers.two_ranks",
    TORCHRUN,
)
AT_IMPORT = re.compile(
    r"(?i)^(TRANSFORMERS_|HF_DATASETS|TORCH(?!INDUCTOR_CACHE_DIR)|PYTORCH_|KMP_|LD_|CUDA_LAUNCH|NCCL_|GLOO_|ACCELERATE_|TRL_"
    r"|XFORMERS_|DISABLE_|USE_|TRITON_(?!CACHE_DIR)|PYTHON(?!PATH|SAFEPATH|UNBUFFERED|FAULTHANDLER|IOENCODING|DONTWRITE)"
    r"|OMP_(?!WAIT)|WORLD_SIZE|LOCAL_RANK|RANK$)"
)
SIDE_BY_SIDE = "import sys;exec(eval(sys.stdin.readline()))"
"""What pytest-xdist has each of its processes do first, as the word behind `-c`."""
OF_RANKS = re.compile(
    r"^(TORCHELASTIC_|TORCH_NCCL_ASYNC_ERROR_HANDLING$|TORCH_FR_BUFFER_SIZE$|(GLOO|NCCL)_SOCKET_IFNAME$|WORLD_SIZE$|LOCAL_RANK$|RANK$)"
)
"""What torchrun and its ranks are told, and torch reads when processes meet, not at import."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
NAMESPACES = ("mnt", "net", "pid", "user", "uts", "ipc")
LONGEST = 1 << 17


def at_import(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if AT_IMPORT.search(name)}


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which asks the server where it can. Whose child the process is remains the only difference."""

    _line: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, *files = rest[:12]
        _, gid, gids, uid, umask, start_new_session, process_group = rest[12:]
        plain = executable is None and preexec_fn is None and close_fds and not pass_fds and not shell
        plain = plain and gid is None and gids is None and uid is None and umask < 0 and process_group in (-1, None)
        if plain and (line := _line_for(args, env, cwd)) is not None:
            stdin, _, _, stdout, _, stderr = files
            given = [each if each != -1 else number for number, each in enumerate((stdin, stdout, stderr))]
            asked = {
                "argv": [os.fsdecode(each) for each in args],
                "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
                "environment": {**(os.environ if env is None else env), ASKER: str(os.getpid())},
                "session": bool(start_new_session),
                "group": os.getpgrp() if SIDE_BY_SIDE in args else None,  # what ends the tests ends these too
                "limits": [resource.getrlimit(limit) for limit in LIMITS],
            }
            with contextlib.suppress(OSError, ValueError):
                socket.send_fds(line, [json.dumps(asked).encode()], given)
                self.pid = int(line.recv(100))
                self._child_created = True
                self._line = line
                self._close_pipe_fds(*files)  # type: ignore[attr-defined]
                return
            line.close()
        _note_cold(args, env)
        super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._line is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._line], [], [], 0)[0]:
            return 0, 0
        try:
            status = int(self._line.recv(100) or signal.SIGKILL)
        except OSError:
            status = signal.SIGKILL
        self._line.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **others: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(_deadstate, **others)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None and self._line.fileno() >= 0:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def _line_for(args: Any, env: Any, cwd: Any) -> socket.socket | None:
    """A line to the server, where it can start this in no way that differs; it is started where nobody has yet."""
    environment = dict(os.environ if env is None else env)
    room = environment.get(PLACE)
    if room is None or COLD in environment or not sys.platform.startswith("linux"):
        return None
    if not isinstance(args, (list, tuple)) or (module := module_of(args, environment)) is None:
        return None
    if cwd is not None and not os.path.isdir(cwd):
        return None
    place = Path(room) / "prestarted"
    try:
        known = json.loads((place / "known").read_text())
        told, own = at_import(environment), known["at_import"]
        if module == TORCHRUN or "TORCHELASTIC_RUN_ID" in environment:
            told, own = ({name: each[name] for name in each if not OF_RANKS.search(name)} for each in (told, own))
        same = own == told and known["surroundings"] == surroundings()
        if not same or names_on(further(environment, module)) & {"sitecustomize", *known["modules"]}:
            return None
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
        line.connect(str(place / "calls"))
    except (OSError, ValueError):
        begin(Path(room))
        return None
    return line


def further(environment: dict[str, str], module: str) -> list[str]:
    """Folders on the import path that the server has not; what lies there it must not have imported from elsewhere."""
    known = {str(ROOT), str(HERE)}
    if module != "engine.worker" and "SMALL_BALLAST" not in environment:
        known.add(str(SMALL))
    return [
        each
        for each in environment.get("PYTHONPATH", "").split(os.pathsep)
        if os.path.isabs(each) and each not in known
    ]


def names_on(folders: list[str]) -> set[str]:
    return {each.partition(".")[0] for folder in folders if os.path.isdir(folder) for each in os.listdir(folder)}


def _note_cold(args: Any, env: Any) -> None:
    """Tells `tests/cpu_seconds.py` of a process that imports all by itself, and the test it is for."""
    environment = os.environ if env is None else env
    if (
        PLACE in environment
        and isinstance(args, (list, tuple))
        and (module := module_of(args, environment)) is not None
    ):
        with contextlib.suppress(OSError), open(Path(environment[PLACE]) / "cold", "a") as file:
            print(module, os.environ.get("PYTEST_CURRENT_TEST", ""), sep="\t", file=file)


def module_of(args: Any, environment: Any) -> str | None:
    """The module that `python -P [-u] -m MODULE ...` starts, if it is one of those that need torch; torchrun says -P in the
    environment of its ranks. `-c` for a process of tests side by side, and for code that may be WARM."""
    words = [os.fsdecode(each) for each in args]
    if words[0] == sys.executable and (words[1:] == ["-u", "-c", SIDE_BY_SIDE] or WARM in environment):
        return "-c" if "-c" in words[1:3] else None
    flags = [each for each in words[1:] if each not in ("-P", "-u")][:2]
    safe = "-P" in words[1:3] or bool(environment.get("PYTHONSAFEPATH"))
    if words[0] == sys.executable and safe and flags[:1] == ["-m"] and flags[1] in MODULES:
        return flags[1]
    return None


def surroundings() -> list[Any]:
    """What a process has from the one that started it, beyond what is handed on."""
    tracer = re.search(r"TracerPid:\s*(\d+)", Path("/proc/self/status").read_text())
    groups = Path("/proc/self/cgroup").read_text()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    return [os.geteuid(), os.getegid(), tracer[1] if tracer else "", groups, spaces]


def begin(room: Path) -> None:
    """Start the server, once for all; nobody waits for it."""
    place = room / "prestarted"
    try:
        place.mkdir()
    except OSError:
        return
    mark = re.compile(r"^WORKBENCH_TESTS_(?!ROOM)")
    environment = {name: value for name, value in os.environ.items() if not mark.match(name)}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(place / "hub"), "TOKENIZERS_PARALLELISM": "false"}
    # The kernel shows a process's environment as it lies in memory from its start on: room for that of a child.
    environment["ZZ_ROOM"] = "x" * (1 << 15)
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "server.py"), str(place)],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    _BEGUN.append(server)


def wait(seconds: float = 120) -> None:
    """Until the server serves, where several processes would import the same at once otherwise. Starts it."""
    room = os.environ.get(PLACE)
    if room is None or COLD in os.environ or not sys.platform.startswith("linux"):
        return
    begin(Path(room))
    end = time.monotonic() + seconds
    place = Path(room) / "prestarted"
    while not any((place / each).exists() for each in ("known", "failed")) and time.monotonic() < end:
        if any(server.poll() is not None for server in _BEGUN):
            return
        time.sleep(0.05)


def install() -> None:
    """From now on `subprocess` asks the server."""
    if subprocess.Popen is not Popen:
        subprocess.Popen = Popen  # type: ignore[misc]


def hold(room: Path) -> None:
    """The server lives as long as this process holds the room."""
    file = (room / "held").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    _HELD.append(file)


_HELD: list[Any] = []
_BEGUN: list[subprocess.Popen[bytes]] = []
