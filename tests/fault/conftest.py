from __future__ import annotations

import json
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
    def start(steps: int = 5000, **config: object) -> RunFolder:
        text = json.dumps({"steps": steps, "step_seconds": 0.01, **config})
        return launch.launch(text, runs_dir=runs, name="small", info={"method": "small", "grace_seconds": 1})

    return start
