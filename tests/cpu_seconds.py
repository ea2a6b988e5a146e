"""Where the tests' processor time goes, file by file.

    python tests/cpu_seconds.py -n 0 tests/engine/data             by file
    python tests/cpu_seconds.py --each 40 -n 0 tests/engine/data   also the 40 dearest tests

All other words go to pytest. A test is charged its own process, the children it waited for, and what `prestarted` forked
for it; what lies at the end of a file's tests, such as a server that they shared, is the last one's. Named are processes
that were not forked and imported torch again. The sum at the end holds every process that the tests left behind.
"""

from __future__ import annotations

import collections
import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PLACE = "SECONDS_OF_TESTS"
COLD = "cold"
SUBREAPER = 36


def _spent() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    cpu, wall = _spent(), time.monotonic()
    try:
        return (yield)
    finally:
        _note(item.nodeid, _spent() - cpu, time.monotonic() - wall)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    begun = time.monotonic()
    try:
        return (yield)
    finally:
        _note("(imports and collection)", time.process_time(), time.monotonic() - begun)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    room = Path(os.environ.get("WORKBENCH_TESTS_ROOM", "/nowhere"))
    if hasattr(config, "workerinput"):
        return
    if (forked := room / "prestarted" / "spent").exists():
        for line in forked.read_text().splitlines():
            cpu, _, test = line.partition("\t")
            _note(test.rpartition(" ")[0] or "(forked, for no test)", float(cpu), 0.0)
    if (cold := room / "cold").exists():
        shutil.copy(cold, Path(os.environ[PLACE]) / COLD)


def _note(test: str, cpu: float, wall: float) -> None:
    with (Path(os.environ[PLACE]) / str(os.getpid())).open("a") as file:
        file.write(f"{cpu:.3f}\t{wall:.3f}\t{test}\n")


def _orphans(left: dict[str, list[float]], until: int | None = None) -> None:
    """Adds what processes took that lost their parent: nobody else waits for them, and no test is charged. The server of
    `prestarted` is one, and brings along what it forked, which tests were charged. Returns once all have ended, or the
    process `until`, which is left to be waited for; a test may look whether a process of its own is gone by then."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return
        assert ended is not None
        if ended.si_pid == until:
            return
        name = Path(f"/proc/{ended.si_pid}/comm").read_text().strip()
        _, _, used = os.wait4(ended.si_pid, 0)
        left[name][0] += used.ru_utime + used.ru_stime
        left[name][1] += 1


def main(words: list[str]) -> int:
    each = 0
    if words[:1] == ["--each"]:
        each, words = int(words[1]), words[2:]
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seconds-of-tests-") as name:
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.cpu_seconds", *words]
        left: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
        tested = subprocess.Popen(argv, env={**os.environ, PLACE: name})
        _orphans(left, until=tested.pid)
        code = tested.wait()
        lasted = time.monotonic() - begun
        _orphans(left)
        cold = Path(name) / COLD
        began = cold.read_text().splitlines() if cold.exists() else []
        cold.unlink(missing_ok=True)
        tests: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for file in Path(name).iterdir():
            for line in file.read_text().splitlines():
                cpu, wall, test = line.split("\t")
                tests[test][0] += float(cpu)
                tests[test][1] += float(wall)
    files: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])
    for test, (cpu, wall) in tests.items():
        row = files[test.split("::", 1)[0]]
        for place, value in enumerate((cpu, wall, 1)):
            row[place] += value
    print(f"\n{'CPU s':>8}{'wall s':>8}{'tests':>7}")
    for name, (cpu, wall, count) in sorted(files.items(), key=lambda row: -row[1][0]):
        print(f"{cpu:8.1f}{wall:8.1f}{count:7.0f}  {name}")
    for test, (cpu, wall) in sorted(tests.items(), key=lambda row: -row[1][0])[:each]:
        print(f"{cpu:8.1f}{wall:8.1f}         {test}")
    for line in began:
        print("imported all by itself:", line.replace("\t", " for "))
    for process, (took, number) in sorted(left.items(), key=lambda row: -row[1][0]):
        print(f"{took:8.1f}                 {number:.0f} processes named {process} that lost their parent")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:8.1f}{lasted:8.1f}         all processes")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
