from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.run import launch
from engine.run.process import send
from engine.run.store import RunFolder, runs_in

SMALL = Path(__file__).parent / "small_worker"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runs folder whose runs use the small worker; what is still alive at the end is killed."""
    monkeypatch.setenv("PYTHONPATH", str(SMALL))
    root = tmp_path / "runs"
    yield root
    for run in runs_in(root):
        for who in (run.supervisor(), run.worker()):
            if who is not None:
                send(who, signal.SIGKILL)


@pytest.fixture
def start(runs: Path) -> Callable[..., RunFolder]:
    """A run of the small worker. The grace is long: on a busy machine a worker that means to answer may take its time."""

    def start(steps: int = 5000, grace: float = 30, **config: object) -> RunFolder:
        text = json.dumps({"steps": steps, "step_seconds": 0.01, **config})
        return launch.launch(text, runs_dir=runs, name="small", info={"method": "small", "grace_seconds": grace})

    return start


@pytest.fixture(scope="session")
def promptly() -> Callable[[float], float]:
    """So many seconds on a machine with a core to spare; more where others keep its cores busy."""

    def limit(seconds: float) -> float:
        return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    return limit
