"""Shared test helpers: where the real public data lies, an environment that keeps tests apart, no run left behind, and
how tests go side by side: a file stays whole in one process, and a test marked `alone` has the machine to itself."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.assertion import rewrite

from tests import caches, card_seconds, renderers, signals
from tests.prestarted import prestarted

HERE = Path(__file__).parent
NOBODY = 65534
MARK = f"WORKBENCH_TESTS_{uuid.uuid4().hex[:8]}"
"""Stands in the environment of every process that these tests start, also of those that outlive their parent. Each
process of tests side by side has one of its own."""
ROOM = "WORKBENCH_TESTS_ROOM"
"""Names the folder of the two locks by which one test has the machine to itself."""
COMPLETE = bool(os.environ.get("WORKBENCH_TESTS_COMPLETE"))
"""Set where everything a test needs is to be installed: then a test that skips for want of it fails."""
MAY_LACK = re.compile(
    r"(?i)\b(cuda|card|device|compiler|compiles|kernel's log|tmpfs|control groups?|needs root|makes no|slurm)\b"
)
"""What a machine may lack all the same: a device, a compiler, a right, a call of another kernel."""

HEAVY = [
    "browser",
    "end_to_end",
    "widgets/test_workbench_life",
    "docs",
    "workbench/screens/test_build",
    "engine/export",
    "engine/trainers/test_streaming",
    "engine/trainers/test_losses",
    "engine/kernels/test_kernels",
    "engine/trainers",
    "fault",
    "demos",
    "benchmarks",
    "workbench/screens",
    "engine/data",
    "engine/features",
    "engine/compat",
    "engine/run",
    "workbench",
    "widgets",
    "engine",
]
"""Where tests are long, the longest first: the last file to be given out keeps the other process waiting."""

signals.hear_in_children()
os.environ[MARK] = "1"
# The tests start hundreds of processes, and each would compile the whole source anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("WORKBENCH_WARM", "0")  # a worker that waits is tests/fault/test_warm_worker.py's to look at

# A run in a test's own process waits for a disk thirty times, and no power fails under it. What is forced to a disk, and when,
# is tests/fault/test_saving_killed.py's to look at, in processes of their own.
os.fsync = os.fdatasync = lambda handle: None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file whole in one process, since its tests share what is built once; all of a browser, since they share a server.
    Tests of a card, which is lent for minutes, go one by one wherever a process is free, but those that fill half of it."""
    from xdist.scheduler import LoadScopeScheduling

    of_a_card = config.option.markexpr == "gpu"

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if of_a_card:
                # Those beside each other would compile the same products behind the unpacking.
                whole = "2_to_the_31" in nodeid or "[experts_packed" in nodeid
                return nodeid.split("-" if "[experts_packed" in nodeid else "[", 1)[0] if whole else nodeid
            return "tests/browser" if file.startswith("tests/browser/") else file

    config.option.loadscopereorder = False  # they come in the order of `HEAVY`, or of `tests.card_seconds`
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Processes of tests are forked from the one that has imported torch, but for those of a card: it was told that there is
    none."""
    _rewrite_once(config)
    gc.enable()
    if "not gpu" in config.option.markexpr:
        prestarted.wait(600)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three processes more than cores, where each has 3 GiB: tests wait for browsers, terminals, runs and ranks two fifths of their
    time. On two cores four took 9:09 min, five 8:28."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores + 3, psutil.virtual_memory().total // (3 << 30)))


def _rewrite_once(config: pytest.Config) -> None:
    """In a fresh clone pytest rewrites the asserts of 400 files, in each process of tests anew if they begin together: five
    seconds each. Meanwhile torch is imported elsewhere, and a core is free."""
    named = [Path(each).absolute() for each in config.args]
    tests = named if all(each.is_file() for each in named) else HERE.rglob("test_*.py")
    for file in (*tests, *HERE.rglob("conftest.py")):
        kept = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        # A file that cannot be read or is no Python is told where it is collected.
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            if rewrite.try_makedirs(kept.parent) and rewrite._read_pyc(file, kept) is None:
                stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, kept)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _beside_others(config):
        return  # one after the other: those of a file share what is built once
    if config.option.markexpr == "gpu":
        items.sort(key=lambda item: -card_seconds.of(item.nodeid))
    else:
        files: dict[str, int] = {}
        for item in items:
            file = item.nodeid.split("::", 1)[0]
            files[file] = files.get(file, 0) + 1
        items.sort(key=lambda item: _turn(item.nodeid.split("::", 1)[0], files))


def _turn(file: str, files: dict[str, int]) -> tuple[int, int, str]:
    """Files of one row of `HEAVY` go by their number of tests."""
    name = file.removeprefix("tests/")
    row = next((place for place, each in enumerate(HEAVY) if name.startswith(each)), len(HEAVY))
    return row, -files[file], file


def pytest_collection_finish(session: pytest.Session) -> None:
    _keep_imports()
    gc.enable()
    _take_back(_AT_FIRST)


def pytest_runtest_setup() -> None:
    caches.unpack_plainly()
    caches.seed_plainly()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if len(sys.modules) > _KEPT["modules"] + 50:
        _keep_imports()


def _keep_imports() -> None:
    """What was imported stays: no collection of garbage looks through it again and again. A run in this process ends with
    one, which takes longer than its steps where torch and its friends came after the last time."""
    gc.collect()
    gc.freeze()
    _KEPT["modules"] = len(sys.modules)


_KEPT = {"modules": 0}
# Garbage is looked for while torch and its friends are imported, for a fifth of what that takes, and none is found. The tests of an
# app, which makes thousands of small objects and keeps few, spent a sixth of their time so.
gc.disable()
gc.set_threshold(20_000, 10, 10)
# Memory that a test gives back to the kernel is cleared again for the next: half of the pages of a step on images were that.
if sys.platform == "linux":
    for name, size in ((-3, 1 << 30), (-1, 1 << 29)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(name, size)
renderers.install()
caches.share_rows()
caches.share_what_libraries_read()


def pytest_configure(config: pytest.Config) -> None:
    if not _beside_others(config):
        os.environ[ROOM] = tempfile.mkdtemp(prefix="workbench-tests-room-")
        prestarted.hold(Path(os.environ[ROOM]))
        if getattr(config.option, "numprocesses", None) and config.option.markexpr != "gpu":
            prestarted.begin(Path(os.environ[ROOM]))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(prestarted.HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    prestarted.install()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _beside_others(config):
        shutil.rmtree(os.environ.pop(ROOM))


def _beside_others(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Beside others a test waits for one that needs the machine alone, and that one for all others."""
    if not _beside_others(item.config):
        return (yield)
    folder = Path(os.environ[ROOM])
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Said aloud, since a child that the test forked may still hold the file.
            fcntl.flock(room, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _complete((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _complete((yield))


def _complete(report: Any) -> Any:
    """The report, failed where it was skipped for want of something that is to be there."""
    if COMPLETE and report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        place, line, reason = report.longrepr
        if not MAY_LACK.search(reason):
            report.outcome, report.longrepr = "failed", f"{place}:{line}: may not be skipped here. {reason}"
    return report


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real public data named by WORKBENCH_TEST_DATA; tests that need it skip without it."""
    folder = os.environ.get("WORKBENCH_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("WORKBENCH_TEST_DATA names no folder of test data")
    return Path(folder)


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder of a user without privileges, whose rights this process has meanwhile: root may read and write all."""
    with tempfile.TemporaryDirectory() as name:
        if root := os.geteuid() == 0:
            os.chown(name, NOBODY, -1)
            os.setresuid(NOBODY, NOBODY, 0)
        try:
            yield Path(name)
        finally:
            if root:
                os.setresuid(0, 0, 0)


_AT_FIRST = prestarted.at_import(dict(os.environ))


def _take_back(before: dict[str, str]) -> None:
    """What libraries read at import is in the environment as it was `before`. Some write it themselves (scikit-learn when it
    is imported, transformers for deterministic operations), and each process that a later test starts would have to
    import all by itself: `prestarted` has none that began with such variables."""
    for name in prestarted.at_import(dict(os.environ)):
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _environment_is_left_as_found() -> Iterator[None]:
    before = prestarted.at_import(dict(os.environ))
    yield
    _take_back(before)


@pytest.fixture(autouse=True)
def _card_multiplies_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of a card share a process in any order: whatever one of them switches for all products, the next has its own."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    from engine.compat.process_switches import restored

    with restored():
        yield


@pytest.fixture(scope="module", autouse=True)
def _environment_is_left_to_other_files() -> Iterator[None]:
    yield
    _take_back(_AT_FIRST)


@pytest.fixture(scope="module", autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    """A run outlives its window by design; one that outlives its test slows down all that come after it."""
    yield
    _, left = psutil.wait_procs([each for each in psutil.process_iter() if _is_orphan(each)], timeout=20)
    told = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            told.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    assert not told, f"still running 20 seconds after the last test of this file, now killed: {told}"


def _line(process: psutil.Process) -> Iterator[int]:
    """The process and all that it comes from; one that was forked for another comes from that one, where it still lives."""
    yield process.pid
    yield from (each.pid for each in process.parents())
    asker = int(process.environ().get(prestarted.ASKER, -1))
    if psutil.pid_exists(asker):
        yield from _line(psutil.Process(asker))


def _is_orphan(process: psutil.Process) -> bool:
    """Whether these tests started it and it belongs to none of their processes any more."""
    try:
        return MARK in process.environ() and os.getpid() not in _line(process)
    except psutil.Error:
        return False
