"""Ctrl-C in the middle of what is taken along: the process goes, and the command says what is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest

from engine.errors import WorkbenchError
from engine.export.process import Export
from workbench.cli import taking_along


@pytest.mark.parametrize(
    ("do", "left"), [("export", "what was being written is gone"), ("push", "files that arrived are not sent twice")]
)
def test_what_is_cancelled_says_what_it_leaves(monkeypatch: pytest.MonkeyPatch, do: str, left: str) -> None:
    jobs: list[Export] = []

    class Hangs(Export):
        def __init__(self, request: dict[str, Any]) -> None:
            super().__init__(request, (sys.executable, "-c", "import time; time.sleep(600)"))
            jobs.append(self)

    monkeypatch.setattr(taking_along, "Export", Hangs)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(WorkbenchError, match=f"^Cancelled: .*{left}") as told:
        taking_along.followed({"do": do}, as_json=True)
    assert told.value.exit_code == 130
    assert jobs[0]._process is not None
    assert jobs[0]._process.poll() is not None
