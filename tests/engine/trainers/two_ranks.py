"""Some processes that train runs together on the CPU, as torchrun starts them, and stay for the next run."""

from __future__ import annotations

import os
import socket
from multiprocessing import get_context
from types import TracebackType
from typing import Any

from engine.config.files import as_yaml
from engine.run.store import RunFolder, create
from tests.engine.trainers.conftest import BASE


def run_folder(root: Any, settings: dict[str, Any]) -> RunFolder:
    """A run that is ready to be trained, with these settings on top of the plain ones."""
    mapping: dict[str, Any] = {"version": 1}
    for path, value in (BASE | settings).items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    return create(root, as_yaml(mapping), {"method": "test", "model": "builtin/tiny"})


def _serve(rank: int, ranks: int, port: int, cache: str, asked: Any, told: Any, first: Any) -> None:
    os.environ |= {"WORKBENCH_CACHE": cache, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if rank < ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    from accelerate.state import AcceleratorState

    from engine.worker import main

    torch.set_num_threads(1)
    if first is not None:
        first()
    while (folder := asked.get()) is not None:
        told.put(main(folder))
        # Each run has a process of its own elsewhere; accelerate keeps how the one before was divided.
        AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class TwoRanks:
    """`with TwoRanks(cache) as two: two.train(run)`; a run's exit code is checked. One process more trains runs alone."""

    RANKS = 2

    def __init__(self, cache: str, first: Any = None) -> None:
        """`first` is a function that each process calls before its first run."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = get_context("spawn")
        self._asked, self._told = [context.Queue() for _ in range(self.RANKS + 1)], context.Queue()
        self._ranks = [
            context.Process(target=_serve, args=(rank, self.RANKS, port, cache, asked, self._told, first), daemon=True)
            for rank, asked in enumerate(self._asked)
        ]

    def __enter__(self) -> TwoRanks:
        for process in self._ranks:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        for queue, process in zip(self._asked, self._ranks, strict=True):
            queue.put(None)
            process.join(10 if kind is None else 0.1)
            process.kill()

    def train(self, run: RunFolder) -> RunFolder:
        """They train this run together."""
        return self._train(run, self._asked[: self.RANKS])

    def train_alone(self, run: RunFolder) -> RunFolder:
        """One process trains it."""
        return self._train(run, self._asked[self.RANKS :])

    def _train(self, run: RunFolder, asked: list[Any]) -> RunFolder:
        for queue in asked:
            queue.put(str(run.path))
        codes = [self._told.get(timeout=170) for _ in asked]
        assert not any(codes), run.events.read_text()[-4000:]
        return run


class FourRanks(TwoRanks):
    """The same with four."""

    RANKS = 4
