"""A step walks over all modules only where something turns, and what trains, evaluates and is counted stays the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.patches.walks import walk_once
from tests.engine.patches.conftest import tiny_model


class Noticing(torch.nn.Module):
    """Counts how often it is told what it is."""

    told = 0

    def train(self, mode=True):
        self.told += 1
        return super().train(mode)


@pytest.fixture
def model():
    model = tiny_model(layers=1)
    model.noticing = Noticing()
    return model.eval()


def test_a_step_after_another_turns_no_module(model):
    undo, told = walk_once(SimpleNamespace(model=model)), model.noticing.told
    for _ in range(5):
        assert model.train() is model
    assert model.noticing.told == told + 1
    undo()
    model.train()
    assert model.noticing.told == told + 2
    assert "train" not in vars(model)


def test_evaluation_and_one_module_turned_alone_are_noticed(model):
    walk_once(SimpleNamespace(model=model))
    model.train()
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())
    model.model.layers[0].eval()
    model.train()
    assert all(module.training for module in model.modules())


def test_weights_are_counted_once_and_what_is_trained_each_time(model):
    wanted = {each: model.num_parameters(exclude_embeddings=each) for each in (False, True)}
    undo, walks = walk_once(SimpleNamespace(model=model)), []
    plain = model.named_parameters
    model.named_parameters = lambda *args, **kwargs: walks.append(1) or plain(*args, **kwargs)
    for _ in range(3):
        assert {each: model.num_parameters(exclude_embeddings=each) for each in (False, True)} == wanted
    assert len(walks) == 2
    model.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == 0
    del model.named_parameters
    undo()
    assert "num_parameters" not in vars(model)
