"""Curves of expert load are those of the routers' own choices, in every family, also under checkpoints and adapters."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from engine.features.compile import apply as compiled
from engine.features.fused_experts.apply import blocks, fuse
from engine.features.router_load.apply import Pictures, apply, spread
from engine.run.expert_load import digits
from tests.engine.features.compile.test_apply import cache, config  # noqa: F401  what is compiled goes with the test
from tests.engine.features.conftest import built_of
from tests.engine.features.families import batches, made

MIXTURES = ("qwen3_moe", "qwen3_5_moe", "qwen3_vl_moe", "mixtral", "gpt_oss")


class Trainer:
    def __init__(self, model):
        self.model, self.logged = model.train(), []
        self.accelerator = SimpleNamespace(reduce=lambda tensor, how: tensor)

    def log(self, logs):
        self.logged.append(logs)


def step(trainer, ids):
    trainer.model(input_ids=ids, labels=ids).loss.backward()


def test_curves_say_how_tokens_spread():
    even, one, none = torch.tensor([3, 3, 3, 3]), torch.tensor([8, 0, 0, 0]), torch.zeros(4).long()
    assert spread([even]) == {"experts/entropy": 1, "experts/fullest": 1, "experts/unused": 0}
    assert spread([one]) == {"experts/entropy": 0, "experts/fullest": 4, "experts/unused": 0.75}
    assert spread([even, one]) == {"experts/entropy": 0.5, "experts/fullest": 4, "experts/unused": 3 / 8}
    assert spread([none]) == {}


@pytest.mark.parametrize("family", MIXTURES)
def test_the_choices_of_a_familys_routers_are_counted(family):
    trainer = Trainer(made(family))
    chosen: list[torch.Tensor] = []
    for block in blocks(built_of(trainer)):
        block.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1].flatten()))
    receipt = apply(SimpleNamespace(), built_of(trainer))
    for ids in batches(2, 3, 7):
        step(trainer, ids)
    layers = receipt.count
    by_layer = [torch.cat(chosen[layer::layers]).bincount(minlength=4) for layer in range(layers)]
    trainer.log({"loss": 1.0})
    assert trainer.logged == [{"loss": 1.0, **spread(by_layer)}]
    assert 0 < trainer.logged[0]["experts/entropy"] <= 1
    trainer.log({"loss": 1.0})
    assert trainer.logged[1] == {"loss": 1.0}, "the counts begin anew with each line"
    receipt.undo()
    step(trainer, batches(1, 3, 7)[0])
    trainer.log({"loss": 2.0})
    assert trainer.logged[2] == {"loss": 2.0}


def test_the_load_of_each_expert_is_written_as_a_picture_now_and_then(monkeypatch):
    written, trainer = [], Trainer(made("mixtral"))
    trainer.writer = SimpleNamespace(write=lambda kind, **told: written.append((kind, told)))
    built = built_of(trainer)
    chosen: list[torch.Tensor] = []
    for block in blocks(built):
        block.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1].flatten()))
    apply(SimpleNamespace(), built)
    for _ in range(2):
        step(trainer, batches(1, 3, 7)[0])
        trainer.log({"loss": 1.0})
    half = len(chosen) // 2
    load = [digits(each.bincount(minlength=4).tolist()) for each in chosen[:half]]
    assert written == [("experts", {"load": load, "layers": list(range(half))})]
    monkeypatch.setattr("engine.features.router_load.apply.PICTURE_SECONDS", 0.0)
    step(trainer, batches(1, 3, 7)[0])
    trainer.log({"loss": 1.0})
    assert len(written) == 1, "the same load is no new picture"
    step(trainer, torch.full((1, 4), 7))  # of one token, which goes to two experts
    trainer.log({"loss": 1.0})
    assert len(written) == 2


def test_a_picture_names_the_layers_of_the_model_that_have_experts():
    written, trainer = [], Trainer(made("qwen3_moe", mlp_only_layers=[0], num_hidden_layers=3))
    trainer.writer = SimpleNamespace(write=lambda kind, **told: written.append(told))
    apply(SimpleNamespace(), built_of(trainer))
    step(trainer, batches(1, 3, 7)[0])
    trainer.log({"loss": 1.0})
    assert written[0]["layers"] == [1, 2]


def test_a_month_of_pictures_is_less_than_a_thousand(monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr("engine.features.router_load.apply.time", SimpleNamespace(monotonic=lambda: now[0]))
    pictures = Pictures(SimpleNamespace(write=lambda kind, **told: written.append(now[0])), [0])
    counts = {}
    for day in (1, 30):
        while now[0] < day * 86_400:
            pictures.show(["59" if len(written) % 2 else "95"])
            now[0] += 10.0
        counts[day] = len(written)
    assert 300 < counts[1] < 500
    assert counts[1] < counts[30] < 1000


@pytest.mark.parametrize("fused", [False, True])
def test_checkpoints_adapters_and_evaluation_change_no_share(fused):
    found = []
    for adapted in (False, True):
        model = made("mixtral")
        if adapted:
            told = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
            model = get_peft_model(model, LoraConfig(r=2, **told))
            if fused:
                fuse(blocks(built_of(SimpleNamespace(model=model))))
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        trainer = Trainer(model)
        apply(SimpleNamespace(), built_of(trainer))
        ids, other = batches(2, 2, 9)
        step(trainer, ids)
        with torch.no_grad():
            model.eval()(input_ids=other)
        trainer.log({"loss": 0.0})
        trainer.log({"eval_loss": 0.0})
        found.append(trainer.logged)
    assert found[0] == found[1]
    assert found[0][1] == {"eval_loss": 0.0}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("tier", [False, "full"])
def test_compiled_layers_of_fused_experts_stay_one_graph_and_are_counted(cache, tier):  # noqa: F811
    counters.clear()
    found = []
    for on in (False, True):
        model = made("qwen3_moe")
        if tier:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer = Trainer(model)
        trainer.training_step = trainer.ref_model = trainer.writer = None
        fuse(blocks(built_of(trainer)))
        apply(SimpleNamespace(), built_of(trainer))
        if on:
            compiled.apply(config(tier=tier), built_of(trainer))
        step(trainer, batches(1, 2, 8)[0])
        trainer.log({"loss": 0.0})
        found.append(trainer.logged)
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
    assert found[0] == found[1]


def test_a_dense_model_has_no_such_curves():
    assert apply(SimpleNamespace(), built_of(Trainer(made("qwen3")))) is None
