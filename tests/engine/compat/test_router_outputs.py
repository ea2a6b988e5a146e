"""Router logits that transformers 5.17 asks of GraniteMoE and does not record."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.compat.router_outputs import hand_on_router_logits


class TopKRouter(nn.Module):
    def forward(self, x):
        logits = x @ torch.ones(4, 3)
        return logits.topk(2).indices, logits.topk(2).values, logits


class Backbone(nn.Module):
    """As 5.17 has it: what it records has no router logits."""

    __module__ = "transformers.models.granitemoe.modeling_granitemoe"
    _can_record_outputs = {"hidden_states": nn.Module}

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=True)
        self.layers = nn.ModuleList([TopKRouter(), TopKRouter()])

    def forward(self, x):
        for layer in self.layers:
            layer(x)
        return {"last_hidden_state": x}


def test_routers_that_are_not_recorded_are_heard_where_they_are_asked_for():
    backbone, x = Backbone(), torch.randn(5, 4)
    undo = hand_on_router_logits(backbone)
    for _ in range(2):
        assert [each.shape for each in backbone(x)["router_logits"]] == [(5, 3), (5, 3)]
    assert "router_logits" not in backbone(x, output_router_logits=False)
    undo()
    assert "router_logits" not in backbone(x)
    assert not any(layer._forward_hooks for layer in backbone.layers)


def test_nothing_that_is_computed_again_is_held(monkeypatch):
    """Held logits would keep what each layer that is computed again was computed from, until the next forward pass."""
    made, plain = [], TopKRouter.forward
    monkeypatch.setattr(
        TopKRouter, "forward", lambda self, x: (out := plain(self, x), made.append(weakref.ref(out[2])))[0]
    )
    backbone, x = Backbone(), torch.randn(5, 4, requires_grad=True)

    def behind(layer, x):
        return layer(x)[1].sin()

    monkeypatch.setattr(
        Backbone,
        "forward",
        lambda self, x: {"out": sum(checkpoint(behind, layer, x, use_reentrant=False) for layer in self.layers)},
    )
    hand_on_router_logits(backbone)
    backbone(x)["out"].sum().backward()
    assert len(made) == 4
    assert [each() for each in made] == [None] * 4


def test_models_whose_routers_are_recorded_are_left_alone(monkeypatch):
    assert hand_on_router_logits(nn.Linear(2, 2)) is None
    monkeypatch.setitem(Backbone._can_record_outputs, "router_logits", TopKRouter)
    assert hand_on_router_logits(Backbone()) is None
