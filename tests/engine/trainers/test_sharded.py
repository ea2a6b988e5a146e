"""Where the states of an optimizer of shares come to lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.trainers import sharded


@pytest.mark.parametrize(
    ("group", "device"),
    [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({"fused": None}, "cpu"), ({}, "cpu")],
)
def test_steps_come_back_where_the_optimizers_kernel_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: dict[str, Any], device: str
) -> None:
    """A fused kernel on a card reads them there; torch's own loading moves them, which shares do not go through. `meta` stands
    for the card."""
    model = torch.nn.Linear(3, 2, bias=False, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0].update(group)
    kept = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    torch.save([kept], tmp_path / sharded.GROUPS)
    sizes = {"weight.step": torch.Size(()), "weight.exp_avg": model.weight.shape}
    told = {
        name: SimpleNamespace(size=size, properties=SimpleNamespace(dtype=torch.float32))
        for name, size in sizes.items()
    }
    monkeypatch.setattr(sharded, "_stored", lambda _: told)
    monkeypatch.setattr(sharded, "_load", lambda *_: None)
    sharded.load_optimizer(optimizer, model, tmp_path)
    state = optimizer.state[model.weight]
    assert (state["step"].device.type, state["exp_avg"].device.type) == (device, "meta")
    whole = {"param_groups": [{**kept, "params": [0]}], "state": {0: {"step": torch.tensor(3.0)}}}
    torch.save(whole, tmp_path / sharded.OPTIMIZER)
    sharded.take_optimizer(optimizer, model, tmp_path)
    assert optimizer.state[model.weight]["step"].device.type == device
