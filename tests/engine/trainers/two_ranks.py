"""Some processes that train runs together on the CPU, as torchrun starts them, and stay for the next run."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from engine.config.files import as_yaml
from engine.run.store import RunFolder, create
from tests.engine.trainers.conftest import BASE
from tests.prestarted import prestarted

ROOT = Path(__file__).parents[3]


def run_folder(root: Any, settings: dict[str, Any]) -> RunFolder:
    """A run that is ready to be trained, with these settings on top of the plain ones."""
    mapping: dict[str, Any] = {"version": 1}
    for path, value in (BASE | settings).items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    return create(root, as_yaml(mapping), {"method": "test", "model": "builtin/tiny"})


class TwoRanks:
    """`with TwoRanks(cache) as two: two.train(run)`; a run's exit code is checked. One process more trains runs alone."""

    RANKS = 2
    PATIENCE = 170
    """Seconds that a run may take without a new event."""

    def __init__(self, cache: str, first: str = "") -> None:
        """`first` names a function, as `module:function`, that each process calls before its first run."""
        self._cache, self._first = cache, first

    def __enter__(self) -> TwoRanks:
        prestarted.wait()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "WORKBENCH_CACHE": self._cache,
            "CUDA_VISIBLE_DEVICES": "",
        }
        with tempfile.TemporaryDirectory() as place, Listener(f"{place}/calls", backlog=9) as door:
            self._ranks = [
                subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, door.address, str(rank), str(self.RANKS), str(port), self._first],
                    env=environment, stdin=subprocess.DEVNULL,
                )
                for rank in range(self.RANKS + 1)
            ]  # fmt: skip
            with self._noticing_deaths(door.address):
                lines = [door.accept() for _ in self._ranks]
        self._lines = [line for _, line in sorted((line.recv(), line) for line in lines)]
        return self

    @contextlib.contextmanager
    def _noticing_deaths(self, address: str) -> Iterator[None]:
        """Within it a process that ends, which would never come to the door, opens it, so that nobody waits for it."""
        here = threading.Event()

        def watch() -> None:
            while not here.wait(0.2):
                if any(process.poll() is not None for process in self._ranks):
                    for _ in self._ranks:
                        with contextlib.suppress(OSError):
                            Client(address).close()
                    return

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            here.set()
        ended = [process.returncode for process in self._ranks if process.poll() is not None]
        if ended:
            for process in self._ranks:
                process.kill()
            pytest.fail(f"a process ended with exit code {ended[0]} before its first run; what it said stands above")

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        for line, process in zip(self._lines, self._ranks, strict=True):
            line.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10 if kind is None else 0.1)
            process.kill()
            process.wait()

    def train(self, run: RunFolder) -> RunFolder:
        """They train this run together."""
        return self._train(run, self._lines[: self.RANKS])

    def train_alone(self, run: RunFolder) -> RunFolder:
        """One process trains it."""
        return self._train(run, self._lines[self.RANKS :])

    def _train(self, run: RunFolder, lines: list[Connection]) -> RunFolder:
        begun = time.monotonic()
        for line in lines:
            line.send(str(run.path))
        for rank, line in enumerate(lines):
            self._await(run, rank, line, begun)
            assert not line.recv(), f"rank {rank} failed: {run.events.read_text()[-4000:]}"
        return run

    def _await(self, run: RunFolder, rank: int, line: Connection, begun: float) -> None:
        """Waits until the process has an exit code. One that is slow writes events; one that hangs does not."""
        written, since = -1, begun
        while not line.poll(1):
            now = time.monotonic()
            if run.events.exists() and (size := run.events.stat().st_size) != written:
                written, since = size, now
            if now - since > self.PATIENCE:
                stacks = {path.name: path.read_text() for path in sorted((run.path / "beats").glob("*.json"))}
                pytest.fail(
                    f"rank {rank} is still at work after {now - begun:.0f} s, {now - since:.0f} s without an event, at a load of "
                    f"{os.getloadavg()[0]:.1f}: {run.events.read_text()[-4000:]}\n{stacks}"
                )


class FourRanks(TwoRanks):
    """The same with four."""

    RANKS = 4


def _serve(place: str, rank: int, ranks: int, port: int, first: str) -> None:
    if rank < ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    from accelerate.state import AcceleratorState

    from engine.worker import main

    torch.set_num_threads(1)
    if first:
        module, _, name = first.partition(":")
        getattr(importlib.import_module(module), name)()
    with Client(place) as line, contextlib.suppress(EOFError):
        line.send(rank)
        while True:
            line.send(main(line.recv()))
            # Each run has a process of its own elsewhere; accelerate keeps how the one before was divided.
            AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _serve(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
