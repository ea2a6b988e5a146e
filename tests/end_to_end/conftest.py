"""Real runs on a desk of their own: `train` goes through the command line, `train_here` lets the worker run in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from engine.config.files import dump
from engine.data.gather_facts import gather_facts
from engine.planning.auto import resolved
from engine.rules import read
from engine.run import checkpoint
from engine.run.store import RunFolder, create, runs_in

WORKBENCH = [sys.executable, "-P", "-m", "workbench"]


@dataclass(frozen=True)
class Run:
    """A run folder and what its events say, newest segment last."""

    folder: RunFolder

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.events.read_text("utf-8").splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def curve(self, name: str, segment: int | None = None) -> dict[int, float]:
        return {
            event["step"]: event[name]
            for event in self.of("metrics")
            if name in event and segment in (None, event["segment"])
        }

    @property
    def held_out(self) -> float:
        """The last loss on rows that were not trained on."""
        return list(self.curve("eval_loss").values())[-1]

    @property
    def newest(self) -> Path:
        path, skipped = checkpoint.newest_valid(self.folder)
        assert path is not None
        assert not skipped
        return path

    def receipt(self, feature: str) -> dict[str, Any]:
        return next(entry for entry in self.of("receipt")[-1]["entries"] if entry["feature"] == feature)


@dataclass(frozen=True)
class Desk:
    """One folder of runs and the commands on it."""

    root: Path

    def config(self, settings: dict[str, Any]) -> Path:
        """A config file of dotted settings."""
        file = self.root / f"config-{len(list(self.root.glob('config-*')))}.yaml"
        with file.open("w") as out:
            YAML().dump(nested(settings), out)
        return file

    def workbench(self, *arguments: str | Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*WORKBENCH, *map(str, arguments)],
            cwd=self.root,
            env={**os.environ, "WORKBENCH_RUNS": str(self.root / "runs")},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    def train(self, settings: dict[str, Any], *arguments: str) -> Run:
        """A run from its config to its end."""
        known = {run.path for run in runs_in(self.root / "runs")}
        done = self.workbench("train", self.config(settings), *arguments)
        assert done.returncode == 0, done.stderr
        (path,) = {run.path for run in runs_in(self.root / "runs")} - known
        return Run(RunFolder(path))

    def train_here(self, settings: dict[str, Any]) -> Run:
        """The same run without a process of its own, whose imports would cost more than the training."""
        mapping = nested(settings)
        facts = gather_facts(read(mapping).config)
        reading = read(mapping, facts)
        assert reading.ok, [finding.message for finding in reading.findings]
        return self.work(dump(resolved(reading.config, facts)))

    def work(self, config_text: str) -> Run:
        """Let the worker train a complete config to its end, here."""
        from engine.worker import main

        folder = create(self.root / "runs", config_text, {"name": "here", "method": "", "model": ""})
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            assert main(str(folder.path)) == 0, folder.events.read_text("utf-8")[-2000:]
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Run(folder)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted settings as a config's mapping."""
    mapping: dict[str, Any] = {"version": 1}
    for path, value in settings.items():
        section, name = path.split(".")
        mapping.setdefault(section, {})[name] = value
    return mapping


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture(scope="module")
def shared_desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"after {seconds:.0f} s still not: {what}"
            time.sleep(0.05)

    return wait
