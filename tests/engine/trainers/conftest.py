"""Runs in this process: `train(config)` writes a run folder, lets the worker train it and gives the folder back."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from engine.run.control import Controls
from engine.run.store import RunFolder
from tests.caches import own_cache

CONVERSATIONS = [
    [
        {"role": "user", "content": f"What comes after {number}?"},
        {"role": "assistant", "content": f"{number + 1} comes after {number}."},
    ]
    for number in range(48)
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"What comes after {number}?"}],
        "chosen": [{"role": "assistant", "content": f"{number + 1}"}],
        "rejected": [{"role": "assistant", "content": f"It may be {number} or so."}],
    }
    for number in range(48)
]

RATED = [
    {
        "prompt": [{"role": "user", "content": f"What comes after {number}?"}],
        "completion": [{"role": "assistant", "content": f"{number + 1}" if number % 3 else "I wonder, who knows."}],
        "label": bool(number % 3),
    }
    for number in range(48)
]

TAUGHT = [
    {
        "input_ids": [40 + (number + place) % 60 for place in range(10)],
        "target_token_ids": [[]] * 3
        + [[40 + (number + place) % 60, 110, 120][: 1 + place % 3] for place in range(3, 10)],
        "target_logprobs": [[]] * 3 + [[-0.2, -2.5, -3.0][: 1 + place % 3] for place in range(3, 10)],
    }
    for number in range(48)
]

TEXTS = [
    {"anchor": f"What comes after {number}?", "positive": f"{number + 1}"}
    | ({"negative": "I wonder, who knows."} if number % 2 else {})
    for number in range(48)
]

STEPS = [
    {
        "prompt": f"Count on from {number}.",
        "completions": [f"After {number} comes {number + 1}.", f"After {number + 1} comes {number + 2 + number % 2}."],
        "labels": [True, number % 2 == 0],
    }
    for number in range(48)
]


def lines(run: RunFolder, kind: str, segment: int | None = None) -> list[dict[str, Any]]:
    """The run's events of one kind, of one segment where given."""
    found = [json.loads(line) for line in run.events.read_text("utf-8").splitlines()]
    return [event for event in found if event["kind"] == kind and segment in (None, event["segment"])]


class heard_by:
    """Called in a training, waits until the worker has heard what it was asked; `folder` is that of its run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ears: list[Controls] = []
        listen = Controls.listen
        monkeypatch.setattr(Controls, "listen", lambda ear, writer: (self.ears.append(ear), listen(ear, writer))[1])

    @property
    def folder(self) -> RunFolder:
        return self.ears[-1].folder

    def __call__(self) -> None:
        end = time.monotonic() + 60
        while not self.ears[-1]._heard:
            assert time.monotonic() < end, "the worker hears nothing"
            time.sleep(0.01)


def resumed_from(run: RunFolder, step: int, where: Path) -> RunFolder:
    """A copy of the run as if it had died right after the checkpoint of this step."""
    shutil.copytree(run.path, where)
    copy = RunFolder(where)
    for path in copy.checkpoints.glob("checkpoint-*"):
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)
    kept = [line for line in copy.events.read_text().splitlines() if json.loads(line).get("step", 0) <= step]
    copy.events.write_text("\n".join(kept) + "\n")
    return copy


@pytest.fixture
def source(tmp_path: Path) -> Callable[[list[Any]], str]:
    """A JSONL file of these rows."""

    def write(rows: list[Any]) -> str:
        path = tmp_path / f"rows-{len(list(tmp_path.glob('rows-*')))}.jsonl"
        path.write_text("".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunFolder]:
    """`train({"method.kind": "dpo", ...})` runs the worker here, `train(..., apart=True)` in a process of its own; the exit
    code is checked (`None`: any will do), the folder returned."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))

    def run_worker(
        settings: dict[str, Any] | None = None,
        *,
        folder: RunFolder | None = None,
        code: int | None = 0,
        apart: bool = False,
    ) -> RunFolder:
        from engine.config.files import as_yaml
        from engine.run.store import create
        from engine.worker import main

        if folder is None:
            mapping: dict[str, Any] = {"version": 1}
            for path, value in (BASE | (settings or {})).items():
                section, name = path.split(".", 1)
                mapping.setdefault(section, {})[name] = value
            folder = create(tmp_path / "runs", as_yaml(mapping), {"method": "test", "model": "builtin/tiny"})
        if apart:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                assert process.submit(main, str(folder.path)).result() == code, folder.events.read_text()[-3000:]
            return folder
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            assert main(str(folder.path)) == code or code is None, folder.events.read_text()[-3000:]
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return folder

    return run_worker


BASE: dict[str, Any] = {
    "model.name": "builtin/tiny",
    "model.dtype": "float32",
    "adapter.kind": "none",
    "data.max_length": 128,
    "optim.learning_rate": 1e-3,
    "optim.per_device_train_batch_size": 4,
    "optim.gradient_accumulation_steps": 2,
    "optim.max_steps": 10,
    "run.save_steps": 4,
    "run.save_total_limit": 9,
}
