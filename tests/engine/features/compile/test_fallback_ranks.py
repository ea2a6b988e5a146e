"""A compiler that fails on one of two processes leaves the other one nothing to wait for."""

from __future__ import annotations

import datetime
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engine.features.compile import apply as compiled
from engine.features.compile import fallback


class Layer(torch.nn.Module):
    """Has a buffer, as models' layers or rotations have, which DDP sends around before each pass."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
        self.register_buffer("place", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + self.place


def _rank(rank: int, folder: str, shares: bool) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=patience)

    def compile_(function: Any, **_: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if rank == 1:
                raise RuntimeError("no compiler")
            return function(*args, **kwargs)

        return call

    torch.compile = compile_  # type: ignore[assignment]
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(Layer(), Layer())
    switch, reported = fallback.Switch(requested=False), list[Any]()
    compiled.compile_layers(list(model), {}, switch, part=compiled.WITHIN_HOOKS if shares else compiled.WHOLE_CALL)
    if shares:
        for layer in model:
            fully_shard(layer)
    passed = fully_shard(model) if shares else DistributedDataParallel(model)

    def training_step(x: torch.Tensor) -> float:
        model.zero_grad()
        loss = passed(x).square().mean()
        loss.backward()
        return loss.item()

    trainer = SimpleNamespace(model=model, training_step=training_step)
    built: Any = SimpleNamespace(training=trainer, events=None, report=reported.append, warn=lambda *_: None)
    compiling = fallback.Compiling(2, "", "the card computes them faster")
    fallback.watch_first_step(built, switch, compiling)
    batch = torch.full((2, 4), 1.0 + rank)
    losses = [trainer.training_step(batch) for _ in range(2)]
    told = [(entry.effective, entry.detail) for entry in reported]
    if shares:
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
    grads = [weight.grad.full_tensor() if shares else weight.grad for weight in model.parameters()]
    torch.save((losses, told, grads), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True], ids=["ddp", "fsdp2"])
def test_a_compiler_that_fails_on_one_of_two_processes_stops_neither(tmp_path: Any, shares: bool) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path), shares), nprocs=2)
    (first, _, ours), (second, told, theirs) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert all(map(torch.equal, ours, theirs))
    ((effective, detail),) = told
    assert effective == "off"
    assert "compiling failed at step 1 (RuntimeError: no compiler)" in detail


class Wide(Layer):
    """Has more than the first bucket of gradients takes, 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def test_buckets_of_gradients_cut_no_layers_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(Wide(), Wide())
        compiled.compile_layers(list(model), {})
        DistributedDataParallel(model)(torch.ones(2, 600)).sum().backward()
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
    assert len(graphs) == 1
