"""Layers whose weights FSDP2 puts together by hooks are compiled within them, and their numbers are the plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from engine.features.compile.apply import WITHIN_HOOKS, compile_layers
from tests.engine.features.conftest import tiny_model


class Block(torch.nn.Module):
    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.silu(self.up(hidden)))


class Checkpointed(torch.nn.Module):
    """Layers with their checkpoint around the call, as transformers has it before 5.23."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden.square().mean()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs that are made, differentiated by torch and run as they are."""
    counter, whole = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, options=None, **told: whole(run, backend=counter, **told))
    counters.clear()
    return counter


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def learned(model: Any, step: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of two steps and the weights after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = step(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: whole(weight).detach().clone() for name, weight in model.named_parameters()}


def language(tier: bool) -> Any:
    torch.manual_seed(0)
    model = tiny_model().train()
    if tier:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def around() -> Any:
    torch.manual_seed(0)
    return Checkpointed()


@pytest.mark.parametrize("kind", ["kept", "checkpointed", "checkpoint around the call"])
def test_shared_out_layers_are_one_graph_and_learn_what_plain_ones_do(kind: str, mesh: Any, graphs: Any) -> None:
    def made() -> tuple[Any, list[torch.nn.Module]]:
        model = around() if kind == "checkpoint around the call" else language(kind == "checkpointed")
        return model, list(model.layers if isinstance(model, Checkpointed) else model.model.layers)

    ids = torch.arange(24).reshape(2, 12)
    hidden = torch.linspace(-1, 1, 48).reshape(6, 8)
    plain, _ = made()
    step = (
        (lambda m: m(hidden))
        if isinstance(plain, Checkpointed)
        else (lambda m: m(ids, labels=ids, use_cache=False).loss)
    )
    losses, weights = learned(plain, step)

    ours, layers = made()
    undo = compile_layers(layers, {}, part=WITHIN_HOOKS)
    for layer in layers:  # as accelerate does it, after the trainer is built
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    found, learned_weights = learned(ours, step)
    assert all(
        isinstance(layer, FSDPModule) and isinstance(weight, DTensor)
        for layer in layers
        for weight in layer.parameters()
    )
    assert graphs.frame_count == 1, "every layer runs the first one's graph"
    assert graphs.op_count >= 1
    assert not counters["graph_break"]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(learned_weights[name], weight, rtol=1e-4, atol=1e-6)
    undo()
    assert not any("forward" in vars(layer) for layer in layers)
