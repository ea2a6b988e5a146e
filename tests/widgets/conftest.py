"""A run as a worker writes it, without a worker; and drafts that need no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.run import store
from engine.run.events import EventWriter
from engine.run.store import RunFolder
from widgets import asking


class Written:
    """A run folder and the pen for it. `host` of another machine keeps supervisors away from it."""

    def __init__(self, root: Path, name: str = "Dates", model: str = "builtin/tiny", max_steps: int = 1000) -> None:
        info = {"name": name, "method": "sft", "model": model, "host": "another-machine"}
        self.folder: RunFolder = store.create(root, "version: 1\nmodel:\n  name: builtin/tiny\n", info)
        self.folder.update_json(state="running")
        self.pen = EventWriter(self.folder)
        self.pen.write("started", method="sft", model=model, max_steps=max_steps, epochs=1, resumed_from_step=None)
        self.step = 0

    def steps(self, count: int, **more: float) -> None:
        for _ in range(count):
            self.step += 1
            loss = 2 * math.exp(-self.step / 300) + 0.05 * math.sin(self.step)
            numbers = {"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 9000.0}
            self.pen.write("metrics", step=self.step, epoch=self.step / 1000, **numbers, **more)

    def finish(self) -> None:
        self.pen.write("finished", step=self.step, seconds=3.0)
        self.folder.update_json(state="finished")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Written]:
    return lambda **options: Written(tmp_path / "runs", **options)


@pytest.fixture(autouse=True)
def _no_widget_is_left_open() -> Iterator[None]:
    """A test that leaves one keeps the inspector for those behind it, which look at its end."""
    before = asking._users
    yield
    assert asking._users == before, "a widget, or its right to ask, was left open"
