"""Compiled layers give the plain layers' numbers, the options are in force while they are compiled, and nothing stays."""

from __future__ import annotations

import functools
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.compat.cache_names import NAMES
from engine.config.kernels import COMPILE_OPTIONS
from engine.errors import ModelError
from engine.features.compile import apply as compiled
from engine.features.gradient_checkpointing.tiers import tier_of, use_tier
from tests.engine.features.conftest import built_of, tiny_model
from tests.engine.trainers.conftest import CONVERSATIONS, lines

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
# Each option the other way round than torch has it, so that its arrival can be seen.
OPTIONS = {name: not inductor.get_config_copy()[name] for name in COMPILE_OPTIONS}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Compiled code goes here and not where torch would keep it, and torch forgets it afterwards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    yield
    torch._dynamo.reset()


def config(value=True, options=None, tier=False, packing=True):
    return SimpleNamespace(
        kernels=SimpleNamespace(torch_compile=value, torch_compile_options=options or {}),
        memory=SimpleNamespace(gradient_checkpointing=tier),
        data=SimpleNamespace(packing=packing),
        model=SimpleNamespace(name="nobody/of-no-shape", revision=None),
        distributed=SimpleNamespace(strategy="auto", expert_parallel_size=1),
    )


def step(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Stepping:
    """What the patch needs of a trainer: models and a step."""

    writer = None

    def __init__(self, model):
        self.model = model

    def training_step(self, *batch):
        return step(self.model, *batch)


def test_each_option_exists_on_the_installed_torch_and_is_a_switch():
    for name in COMPILE_OPTIONS:
        assert inductor.get_type(name) is bool
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(torch.nn.Identity(), options={"no_such_option": True})


class Layer(GradientCheckpointingLayer):
    """The least that is compiled as a decoder layer is."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x, **kwargs):
        return torch.nn.functional.silu(self.up(x)).sum()


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer()])
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x, labels):
        return SimpleNamespace(loss=self.layers[0](x))


class Enough(Exception):
    """Ends a compilation once what matters was seen, before any code is built."""


def recording(seen, end=False):
    def record(graph):
        seen.append({name: inductor.get_config_copy()[name] for name in COMPILE_OPTIONS})
        if end:
            raise Enough

    return inductor.patch(post_grad_custom_pre_pass=record)


def test_the_options_are_in_force_while_layers_are_compiled_and_at_no_other_time():
    trainer, before, seen = Stepping(Small()), inductor.get_config_copy(), []
    done = compiled.apply(config(options=OPTIONS), built_of(trainer))
    assert (done.count, done.effective) == (1, "inductor")
    with recording(seen, end=True), pytest.raises(Exception, match="Enough"):
        step(trainer.model, torch.randn(3, 8))
    assert seen == [OPTIONS]
    assert inductor.get_config_copy() == before
    done.undo()
    assert "_compiled_call_impl" not in vars(trainer.model.layers[0])
    assert "training_step" not in vars(trainer)
    assert trainer.model.config.use_cache


@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_runs_the_plain_layer(name):
    model, x = Small(), torch.randn(2, 8)
    plain, graphs = model.layers[0](x), counters["stats"]["unique_graphs"]
    compiled.apply(config(), built_of(Stepping(model)))
    with torch.no_grad():
        assert torch.equal(model.layers[0](x, **{name: "a cache"}), plain)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_compiler
def test_compiled_layers_give_the_plain_numbers(tmp_path):
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(3, 8, dtype=torch.float64)
    loss, gradients = step(model, x)
    trainer, seen = Stepping(model), []
    done = compiled.apply(config(options=OPTIONS), built_of(trainer))
    with recording(seen):
        ours, found = trainer.training_step(x)
    assert seen == [OPTIONS, OPTIONS]  # forward and backward
    assert ours == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    assert any((tmp_path / "inductor").rglob("*.so"))
    done.undo()
    assert step(model, x)[0] == loss


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_compiler
@pytest.mark.parametrize("tier", [False, "full", "medium"])
def test_a_qwen3_layer_keeps_its_gradients_over_batches_of_any_length_in_one_graph(tier):
    def run(patched):
        model = tiny_model()
        if tier:
            if tier != "full":
                use_tier(model, tier)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if patched:
            compiled.apply(config(tier=tier, packing=False), built_of(SimpleNamespace(model=model, training_step=None)))
        return [step(model.train(), torch.arange(2 * length).reshape(2, length) % 128) for length in (12, 20, 9)]

    plain, graphs = run(False), counters["stats"]["unique_graphs"]
    for (loss, gradients), (ours, found) in zip(plain, run(True), strict=True):
        assert ours == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] - graphs == 1


class Around(GradientCheckpointingLayer):
    """A layer as releases of transformers before 5.23 have it: the checkpoint is made around it."""

    def __init__(self, config):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)

    def __call__(self, x):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(super().__call__, x)
        return super().__call__(x)

    def _call_impl(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Older(PreTrainedModel):
    config_class, supports_gradient_checkpointing = PreTrainedConfig, True

    def __init__(self):
        super().__init__(PreTrainedConfig())
        self.layers = torch.nn.ModuleList([Around(self.config), Around(self.config)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def get_input_embeddings(self):
        return torch.nn.Embedding(1, 1)


def stepped(model, x):
    model.zero_grad()
    model.train()(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_compiler
def test_a_checkpoint_around_a_layer_becomes_part_of_what_is_compiled():
    torch.manual_seed(0)
    model, x = Older(), torch.randn(3, 8, requires_grad=True)
    plain, products = stepped(model, x), []
    done = compiled.apply(config(), built_of(SimpleNamespace(model=model, training_step=None)))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert [tier_of(layer) for layer in model.layers] == ["full", "full"]

    def count(graph):
        kinds = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        products.append(sum(node.target in kinds for node in graph.nodes))

    with inductor.patch(post_grad_custom_pre_pass=count):
        ours = stepped(model, x)
    # Both forward; then the first of them again, and two gradients of each. The last product is asked for by nobody.
    assert products == [2, 1 + 4]
    for gradient, found in zip(plain, ours, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)
    done.undo()
    assert all(isinstance(layer._gradient_checkpointing_func, functools.partial) for layer in model.layers)
    assert "gradient_checkpointing_enable" not in vars(model)
    for gradient, found in zip(plain, stepped(model, x), strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


def test_a_model_without_layers_and_a_machine_without_a_compiler_are_refused(monkeypatch):
    with pytest.raises(ModelError, match="no decoder layers"):
        compiled.apply(config(), built_of(SimpleNamespace(model=torch.nn.Linear(2, 2))))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ModelError, match="needs a C compiler"):
        compiled.apply(config(), built_of(SimpleNamespace(model=tiny_model())))


def test_a_first_step_without_a_compiled_layer_ends_the_run():
    trainer = Stepping(tiny_model(layers=1))
    done = compiled.apply(config(), built_of(trainer))
    for layer in trainer.model.model.layers:
        del layer._compiled_call_impl
    with pytest.raises(ModelError, match="without a compiled layer"):
        trainer.training_step(torch.arange(8)[None])
    done.undo()
    assert "training_step" not in vars(trainer)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_compiler
@pytest.mark.parametrize("tier", [False, "full", "selective"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_says_what_was_compiled_and_learns_the_same(train, source, adapter, tier):
    settings = {
        "adapter.kind": adapter, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 3,
        "memory.gradient_checkpointing": tier,
    }  # fmt: skip
    losses = []
    for value in (False, True):
        torch._dynamo.reset()
        run = train({**settings, "kernels.torch_compile": value})
        losses.append([event["loss"] for event in lines(run, "metrics")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    said = [e for event in lines(run, "receipt") for e in event["entries"] if e["feature"] == compiled.FEATURE]
    assert [entry["effective"] for entry in said] == ["inductor", "inductor"]
    assert " graphs, 0 breaks" in said[1]["detail"]
