"""Two processes that train runs together on the CPU, as torchrun starts them, and stay for the next run."""

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


def _serve(rank: int, port: int, cache: str, asked: Any, told: Any) -> None:
    os.environ |= {"WORKBENCH_CACHE": cache, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if rank < 2:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from engine.worker import main

    torch.set_num_threads(1)
    while (folder := asked.get()) is not None:
        told.put(main(folder))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class TwoRanks:
    """`with TwoRanks(cache) as two: two.train(run)`; a run's exit code is checked. A third process trains runs alone."""

    def __init__(self, cache: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = get_context("spawn")
        self._asked, self._told = [context.Queue() for _ in range(3)], context.Queue()
        self._ranks = [
            context.Process(target=_serve, args=(rank, port, cache, self._asked[rank], self._told), daemon=True)
            for rank in range(3)
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
        """Two train this run together."""
        return self._train(run, self._asked[:2])

    def train_alone(self, run: RunFolder) -> RunFolder:
        """One process trains it."""
        return self._train(run, self._asked[2:])

    def _train(self, run: RunFolder, asked: list[Any]) -> RunFolder:
        for queue in asked:
            queue.put(str(run.path))
        codes = [self._told.get(timeout=170) for _ in asked]
        assert not any(codes), run.events.read_text()[-4000:]
        return run
