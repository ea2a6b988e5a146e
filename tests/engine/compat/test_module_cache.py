"""A step walks over all modules only where something turns, and what trains, evaluates and is counted stays the same."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation

from engine.compat.module_cache import cache_traversals, put_checkpoints_aside
from tests.engine.features.conftest import tiny_model


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
    undo, told = cache_traversals(model, Accelerator()), model.noticing.told
    for _ in range(5):
        assert model.train() is model
    assert model.noticing.told == told + 1
    undo()
    model.train()
    assert model.noticing.told == told + 2
    assert "train" not in vars(model)


def test_evaluation_and_one_module_turned_alone_are_noticed(model):
    cache_traversals(model, Accelerator())
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
    undo, walks = cache_traversals(model, Accelerator()), []
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


def test_weights_are_listed_once_until_they_are_others(model):
    wanted, undo = list(model.parameters()), cache_traversals(model, Accelerator())
    assert all(each is before for each, before in zip(model.parameters(), wanted, strict=True))
    model.noticing.weight = torch.nn.Parameter(torch.ones(1))
    assert len(list(model.parameters())) == len(wanted)  # the price: one weight more is not seen
    assert list(model.parameters(recurse=False)) == []
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    assert [id(each) for each in model.parameters()] == [id(each) for _, each in model.named_parameters()]
    undo()
    assert "parameters" not in vars(model)


def test_weights_are_listed_anew_where_only_what_is_trained_became_others(model):
    """As FSDP2 leaves it: parts that see and do not learn come first and stay whole."""
    model.requires_grad_(False)
    model.lm_head = torch.nn.Linear(2, 2)
    undo = cache_traversals(model, Accelerator())
    list(model.parameters())
    model.lm_head.weight = torch.nn.Parameter(torch.ones(2, 2))
    assert [id(each) for each in model.parameters()] == [id(each) for _, each in model.named_parameters()]
    undo()


def test_unwrapping_gives_the_model_as_the_library_does(model):
    accelerator = Accelerator()
    undo, wrapped = cache_traversals(model, accelerator), torch.nn.DataParallel(model)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(wrapped) is model
    undo()
    assert "unwrap_model" not in vars(accelerator)


@pytest.fixture(params=[False, True], ids=["all weights", "adapter"])
def checkpointed(request, model):
    """The model as a trainer has it, its checkpointing turned on, and the part of it that is transformers'."""
    given = get_peft_model(model, LoraConfig(target_modules="all-linear")) if request.param else model
    undo = put_checkpoints_aside(model)
    given.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield given.train(), model
    undo()
    assert not {"gradient_checkpointing_enable", "gradient_checkpointing_disable"} & set(vars(model))


def test_a_pass_without_checkpoints_leaves_them_and_the_embeddings_as_they_were(checkpointed):
    given, model = checkpointed
    layer, hooks = model.model.layers[0], model.get_input_embeddings()._forward_hooks
    before = len(hooks), layer._gradient_checkpointing_func
    for _ in range(5):
        with unwrap_model_for_generation(
            given, Accelerator(), gradient_checkpointing_kwargs={"use_reentrant": False}
        ) as bare:
            assert not bare.is_gradient_checkpointing
        with disable_gradient_checkpointing(given, {"use_reentrant": False}):
            assert not layer.gradient_checkpointing
        assert layer.gradient_checkpointing
    assert (len(hooks), layer._gradient_checkpointing_func) == before


def test_checkpoints_turned_on_in_another_way_are_those_that_were_asked_for(checkpointed):
    given, model = checkpointed
    given.gradient_checkpointing_disable()
    given.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    layer = model.model.layers[0]
    assert layer.gradient_checkpointing
    assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": True}


def test_a_layer_left_out_of_the_checkpoints_stays_out(checkpointed):
    given, model = checkpointed
    model.model.layers[0].gradient_checkpointing = False
    with disable_gradient_checkpointing(given, {"use_reentrant": False}):
        pass
    assert not model.model.layers[0].gradient_checkpointing
    assert model.model.gradient_checkpointing
