"""A save that is killed, or refused, at the k-th system call leaves no invalid checkpoint that could be chosen.

strace stops a small saver at the k-th write, fsync, rename, mkdir or openat, for every k that fires; likewise with
ENOSPC and EIO. Counted are faults that happened, not runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.run import checkpoint, store
from engine.run.store import RunFolder

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

SAVER = """
import os, sys
from engine.run import checkpoint
from engine.run.store import RunFolder
run = RunFolder(sys.argv[1])
tmp = checkpoint.begin(run, 20)
(tmp / "model.safetensors").write_bytes(b"m" * 5000)
(tmp / "optimizer.pt").write_bytes(b"o" * 3000)
(tmp / "rng").mkdir()
(tmp / "rng" / "rank_0.json").write_text("{}")
checkpoint.commit(tmp, {"config_hash": "x"})
checkpoint.prune(run, 2)
"""


def saved(run: RunFolder, step: int) -> None:
    tmp = checkpoint.begin(run, step)
    (tmp / "model.safetensors").write_bytes(b"m" * 4000)
    checkpoint.commit(tmp, {})


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, int]:
    """How often each system call is made by a whole save, and how often before it begins."""
    run = store.create(tmp_path_factory.mktemp("count"), "a", {"name": "x"})
    saved(run, 5)
    saved(run, 10)
    found = {}
    for path in ("-", str(run.path)):
        script = SAVER if path != "-" else SAVER.split("tmp = ")[0]
        out = run.path.parent / "trace"
        subprocess.run(trace(out, None, script, str(run.path)), check=True, env=environment())
        names = [line.split("(")[0].split()[-1] for line in out.read_text().splitlines() if "(" in line]
        found[path] = {name: names.count(name) for name in set(names)}
    return {name: (found["-"].get(name, 0), count) for name, count in found[str(run.path)].items()}


def environment():
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}


def trace(out: Path, inject: str | None, script: str, path: str) -> list[str]:
    wanted = "write,fsync,rename,renameat,mkdir,mkdirat,openat,unlink,unlinkat,rmdir"
    more = ["-e", f"inject={inject}"] if inject else []
    return ["strace", "-f", "-qq", "-o", str(out), "-e", f"trace={wanted}", *more, sys.executable, "-c", script, path]


def faults(tmp_path: Path, call: str, first: int, last: int, what: str, most: int = 40):
    """Run the saver with the k-th `call` faulty for each k; yields the run after each fault that fired."""
    step = max(1, -(-(last - first) // most))
    for k in range(first + 1, last + 1, step):
        run = store.create(tmp_path / f"{call}-{k}", "a", {"name": "x"})
        saved(run, 5)
        saved(run, 10)
        out = tmp_path / "trace"
        done = subprocess.run(
            trace(out, f"{call}:{what}:when={k}", SAVER, str(run.path)), capture_output=True, env=environment()
        )
        if "INJECTED" in out.read_text() or done.returncode in (-9, 137):
            yield k, run, done


def check(run: RunFolder) -> bool:
    """Whatever happened: a valid checkpoint is chosen, no named one is broken; True if the new one is whole."""
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    assert checkpoint.step_of(newest) in (10, 20)
    broken = [
        path
        for path in run.checkpoints.iterdir()
        if checkpoint.step_of(path) and checkpoint.problem_with(path, hashes=True)
    ]
    assert broken == []
    # The next worker cleans up, names what was complete, and can save the same step again.
    checkpoint.collect(run)
    left = {path.name for path in run.checkpoints.iterdir()}
    assert all(name == ".ballast" or name.startswith("checkpoint-") for name in left), left
    assert not [name for name in left if name.endswith(".tmp")]
    saved(run, 20)
    assert checkpoint.step_of(checkpoint.newest_valid(run)[0]) == 20
    return checkpoint.step_of(newest) == 20


@pytest.mark.parametrize("most", [13, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "call", ["write", "fsync", "rename", "renameat", "mkdir", "mkdirat", "openat", "unlinkat", "rmdir"]
)
def test_killed_at_every_call_of_a_save_no_invalid_checkpoint_is_chosen(tmp_path, calls, call, most):
    before, whole = calls.get(call, (0, 0))
    if whole == before:
        pytest.skip(f"a save on this machine makes no {call}")
    fired = [check(run) for _, run, _ in faults(tmp_path, call, before, whole, "signal=KILL", most)]
    assert len(fired) >= min(most, whole - before) // 2
    print(json.dumps({"call": call, "killed": len(fired), "new one whole": sum(fired)}))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("write", "ENOSPC"), ("fsync", "EIO"), ("renameat", "ENOSPC"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("write", "EIO"), ("fsync", "ENOSPC"), ("renameat", "EIO"))
        ),
    ],
)  # fmt: skip
def test_refused_at_every_call_of_a_save_it_fails_in_words_and_nothing_is_lost(tmp_path, calls, call, error):
    before, whole = calls.get(call, (0, 0))
    count = 0
    for _, run, done in faults(tmp_path, call, before, whole, f"error={error}", 20):
        count += 1
        check(run)
        assert done.returncode != 0
        if error == "ENOSPC":
            assert b"the disk is full" in done.stderr or b"No space left" in done.stderr
    assert count >= min(20, whole - before) // 2
