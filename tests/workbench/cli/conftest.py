"""A working directory for commands around runs, which train with the small worker of the fault tests."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.run import store
from engine.run.process import send

SMALL = Path(__file__).parents[2] / "fault" / "small_worker"


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """It holds `my.yaml`, the CONFIG of the test's module; a step takes its STEP_SECONDS. What still runs afterwards is killed."""
    module: Any = request.module
    (tmp_path / "my.yaml").write_text(module.CONFIG)
    monkeypatch.setenv("PYTHONPATH", str(SMALL))
    monkeypatch.setenv("SMALL_WORKER", json.dumps({"step_seconds": module.STEP_SECONDS, "save_steps": 20}))
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    yield tmp_path
    for run in store.runs_in(tmp_path / "runs"):
        for who in (run.supervisor(), run.worker()):
            if who is not None:
                send(who, signal.SIGKILL)
