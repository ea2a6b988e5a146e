"""A compiler that fails takes no run down that had not asked for it: the batch is computed anew, from the same state."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.errors import ModelError
from engine.features.compile import apply as compiled
from engine.features.compile import fallback, recompiles
from engine.features.layer_offloading.apply import LayerOffloading
from engine.features.layer_offloading.layer_stream import LayerStream
from engine.features.sequence import Features
from tests.engine.features.compile.test_apply import Layer, Small, Stepping, config, recording, step
from tests.engine.features.conftest import built_of, tiny_model

WHY = "the card computes compiled layers faster"


class Noisy(Layer):
    """Takes random numbers and stops in the backward pass while it is compiled, as a backend may."""

    broken: type[BaseException] | None = None
    landed = False

    def forward(self, x, **kwargs):
        y = torch.nn.functional.dropout(self.up(x), 0.5)
        return _Breaks.apply(y, self).sum()


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, layer):
        ctx.layer, ctx.broken = layer, layer.broken
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.broken is not None:
            ctx.layer.landed = any(weight.grad is not None for weight in ctx.layer.beside())
            raise ctx.broken("no kernel for \x1b[31mthis\x1b[0m\nmore lines")
        return gradient, None


class Trainer:
    """Steps over two layers, counts as trainers do, and takes its row numbers out of the batch."""

    def __init__(self, writer=None):
        torch.manual_seed(0)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Noisy(), Noisy()]).double()
        self.model.layers[0].beside = self.model.layers[1].parameters
        self.writer, self.seen, self.rows = writer, 0, []
        self._metrics = {"train": defaultdict(list)}
        self.losses: list[float] = []

    def training_step(self, model, inputs):
        self.rows.extend(inputs.pop("row"))
        self.seen += 1
        loss = sum(layer(inputs["x"]) for layer in model.layers)
        self._metrics["train"]["loss"].append(loss.item())
        loss.backward()
        self.losses.append(loss.item())
        return loss.detach()

    def gradients(self):
        return [weight.grad.clone() for weight in self.model.parameters()]


class Told(list):
    def write(self, kind: str, **payload: Any) -> None:
        self.append((kind, payload))


def compiler_fails(monkeypatch, trainer, broken):
    """In place of the compiler: the layer's own call, which in the first layer fails as `broken` when differentiated."""

    def compile_(function, **_):
        def call(layer, *args, **kwargs):
            layer.broken = broken if layer is trainer.model.layers[0] else None
            try:
                return function(layer, *args, **kwargs)
            finally:
                layer.broken = None

        return call

    monkeypatch.setattr(compiled.torch, "compile", compile_)


def stepped(trainer, steps=2):
    batch = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(7)
    for number in range(steps):
        trainer.training_step(trainer.model, {"x": batch, "row": [number]})
    return trainer


def test_plain_layers_take_over_from_the_state_in_which_the_step_began(monkeypatch, capsys):
    plain, told = stepped(Trainer()), Told()
    ours = Trainer(told)
    compiler_fails(monkeypatch, ours, RuntimeError)
    done = compiled.apply(config(), built_of(ours, auto=WHY))
    assert (done.requested, done.effective) == ("auto", "inductor")
    stepped(ours)
    assert ours.model.layers[0].landed  # the other layer had its gradient when this one failed
    # And yet: the same losses, gradients, random numbers and counts as if nothing had been compiled.
    assert ours.losses == plain.losses
    assert all(map(torch.equal, ours.gradients(), plain.gradients()))
    assert (ours.rows, ours.seen, ours._metrics) == (plain.rows, plain.seen, plain._metrics)
    assert isinstance(ours._metrics["train"], defaultdict)
    entry = next(payload["entries"][0] for kind, payload in told if kind == "receipt")
    assert (entry["requested"], entry["effective"], entry["count"]) == ("auto", "off", None)
    assert "RuntimeError: no kernel for" in entry["detail"]
    assert WHY in entry["detail"]
    finding = next(payload for kind, payload in told if kind == "finding")
    assert finding["severity"] == "warning"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "\x1b" not in said + finding["message"] + entry["detail"]


def test_who_asked_for_it_gets_the_compilers_error(monkeypatch):
    trainer = Trainer()
    compiler_fails(monkeypatch, trainer, RuntimeError)
    compiled.apply(config(), built_of(trainer))
    with pytest.raises(RuntimeError, match="no kernel"):
        stepped(trainer)


@pytest.mark.parametrize("broken", [torch.OutOfMemoryError, ModelError, KeyboardInterrupt])
def test_what_is_no_failure_of_the_compiler_ends_the_run_under_auto_too(monkeypatch, broken):
    trainer = Trainer()
    compiler_fails(monkeypatch, trainer, broken)
    compiled.apply(config(), built_of(trainer, auto=WHY))
    with pytest.raises(broken):
        stepped(trainer)


def test_a_batch_that_plain_layers_cannot_compute_either_fails_with_its_own_error(monkeypatch):
    trainer = Trainer()
    compiler_fails(monkeypatch, trainer, None)
    compiled.apply(config(), built_of(trainer, auto=WHY))
    trainer.model.layers[0].up.weight.data = torch.randn(2, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        stepped(trainer)


def test_auto_without_layers_or_a_compiler_leaves_plain_layers_and_says_so(monkeypatch):
    bare = compiled.apply(config(), built_of(SimpleNamespace(model=torch.nn.Linear(2, 2)), auto=WHY))
    assert (bare.requested, bare.effective) == ("auto", "off")
    assert "no decoder layers" in bare.detail
    trainer = Trainer()
    monkeypatch.setattr(compiled, "refusal", lambda: "torch needs a C compiler.")
    assert "C compiler" in compiled.apply(config(), built_of(trainer, auto=WHY)).detail
    assert all("_compiled_call_impl" not in vars(layer) for layer in trainer.model.layers)


@pytest.mark.parametrize("auto", [WHY, None])
def test_auto_compiles_no_policy_whose_stored_reference_rounds_apart(auto):
    trainer = Stepping(tiny_model(layers=1))
    trainer.precompute_ref_logps = True
    done = compiled.apply(config(packing=False), built_of(trainer, auto=auto))
    assert done.effective == ("off" if auto else "inductor")
    assert "stored reference" in done.detail
    assert ("_compiled_call_impl" in vars(trainer.model.model.layers[0])) is (auto is None)


def test_layers_that_stream_and_are_compiled_are_plain_again_when_both_are_taken_back(monkeypatch, tmp_path):
    """Streams lie around the compiled calls; the stream's bytes, which need a card, are left out here."""
    monkeypatch.setattr(compiled, "refusal", lambda: None)
    trainer, patches, offloading = Stepping(tiny_model(layers=2)), Features(None), LayerOffloading()
    stream = object.__new__(LayerStream)
    stream.layers, stream.weights, stream._wraps = list(trainer.model.model.layers), [SimpleNamespace(size=8)], []
    offloading.streams.append(stream)
    patches._add(compiled.apply(config(), built_of(trainer)))
    compiled_calls = [layer._compiled_call_impl for layer in stream.layers]
    patches._add(offloading.on_trainer(built_of(trainer)))
    assert [layer._compiled_call_impl for layer in stream.layers] != compiled_calls
    patches.undo()
    assert all("_compiled_call_impl" not in vars(layer) for layer in stream.layers)


def test_auto_leaves_padded_batches_with_images_as_they_are():
    model = tiny_model(layers=1)
    model.config.vision_config = {}
    done = compiled.apply(config(packing=False), built_of(SimpleNamespace(model=model), auto=WHY))
    assert (done.requested, done.effective) == ("auto", "off")
    assert "images" in done.detail
    assert all("_compiled_call_impl" not in vars(layer) for layer in model.model.layers)


def test_the_reason_stands_in_the_receipt_where_auto_left_it_off():
    off = compiled.apply(config(False), built_of(Trainer(), auto="there is no GPU"))
    assert (off.requested, off.effective, off.detail) == ("auto", "off", "there is no GPU")
    assert compiled.apply(config(False), built_of(Trainer())) is None


def test_options_are_a_wish_for_it(monkeypatch):
    monkeypatch.setattr(compiled, "refusal", lambda: "torch needs a C compiler.")
    with pytest.raises(ModelError, match="C compiler"):
        compiled.apply(
            config(options={"shape_padding": True}), built_of(Trainer(), auto="torch_compile_options are given")
        )


def test_a_real_compiler_that_stops_leaves_the_plain_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, x, told, seen = Small(), torch.randn(3, 8), Told(), []
    loss, gradients = step(model, x)
    trainer = Stepping(model)
    trainer.writer = told
    compiled.apply(config(), built_of(trainer, auto=WHY))
    with recording(seen, end=True):
        ours, found = trainer.training_step(x)
    torch._dynamo.reset()
    assert len(seen) == 1  # the compiler was at work, and stopped
    assert ours == loss
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert "Enough" in next(payload["entries"][0] for kind, payload in told if kind == "receipt")["detail"]


@pytest.mark.parametrize(("auto", "effective"), [(WHY, "off"), (None, "inductor")])
def test_layers_in_pieces_are_kept_by_those_alone_who_asked_for_them(monkeypatch, auto, effective):
    counted = itertools.chain([(0, 0)], itertools.repeat((9, 7)))
    monkeypatch.setattr(fallback, "graphs_and_breaks", lambda: next(counted))
    trainer, calls = Trainer(Told()), []

    def compile_(function, **_):
        return lambda layer, *args, **kwargs: calls.append(layer) or function(layer, *args, **kwargs)

    monkeypatch.setattr(compiled.torch, "compile", compile_)
    compiled.apply(config(), built_of(trainer, auto=auto))
    stepped(trainer, steps=3)
    assert len(calls) == (2 if auto else 6)
    entry = trainer.writer[0][1]["entries"][0]
    assert entry["effective"] == effective
    assert "9 graphs, 7 breaks" in entry["detail"]


def test_graphs_of_an_earlier_run_in_this_process_are_taken_for_compiled_layers(monkeypatch):
    monkeypatch.setattr(fallback, "graphs_and_breaks", lambda: (5, 0))  # none is new
    monkeypatch.setattr(fallback, "_known", lambda code: code is compiled._call.__code__)
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: function)
    trainer = Trainer(Told())
    compiled.apply(config(), built_of(trainer))
    stepped(trainer)
    entry = trainer.writer[0][1]["entries"][0]
    assert (entry["effective"], entry["count"]) == ("inductor", 2)
    assert "earlier run" in entry["detail"]


def test_a_compiler_that_is_turned_off_is_told_from_one_that_works(monkeypatch):
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: function)
    torch._dynamo.reset()
    trainer = Trainer(Told())
    compiled.apply(config(), built_of(trainer, auto=WHY))
    stepped(trainer)
    assert trainer.writer[0][1]["entries"][0]["effective"] == "off"
    asked = Trainer()
    compiled.apply(config(), built_of(asked))
    with pytest.raises(ModelError, match="without a compiled layer"):
        stepped(asked)


class Formed(GradientCheckpointingLayer):
    """Another graph for each name of a form."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16, dtype=torch.float64)

    def forward(self, x, form):
        return torch.nn.functional.silu(self.up(x)).sum() * len(form)


class InForms(Trainer):
    """Each step's batch has a form of its own."""

    def __init__(self, writer=None):
        super().__init__(writer)
        self.model.layers = torch.nn.ModuleList([Formed()])

    def training_step(self, model, inputs):
        self.seen += 1
        loss = model.layers[0](inputs["x"], "f" * self.seen)
        loss.backward()
        self.losses.append(loss.item())


def through(trainer):
    for form in ("a", "ab", "abc"):
        trainer.model.layers[0](torch.ones(3, 8, dtype=torch.float64), form)


def as_torch_traces(monkeypatch):
    """The front half of the compiler, which counts graphs, and no code of a machine."""
    plain = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: plain(function, backend="eager"))
    torch._dynamo.reset()


def test_batches_in_more_forms_than_torch_would_compile_are_all_compiled(monkeypatch):
    as_torch_traces(monkeypatch)
    trainer = InForms(Told())
    compiled.apply(config(), built_of(trainer, auto=WHY))
    before = counters["stats"]["unique_graphs"]
    stepped(trainer, steps=torch._dynamo.config.recompile_limit + 2)
    assert counters["stats"]["unique_graphs"] - before == torch._dynamo.config.recompile_limit + 2
    assert [payload["entries"][0]["effective"] for kind, payload in trainer.writer if kind == "receipt"] == ["inductor"]


@pytest.mark.parametrize("held_out", [False, True])
def test_one_graph_too_many_is_told_and_ends_the_run_of_who_asked(monkeypatch, capsys, held_out):
    monkeypatch.setattr(recompiles, "MOST_GRAPHS", 2)
    as_torch_traces(monkeypatch)
    plain, ours, asked = (InForms(Told()) for _ in range(3))
    stepped(plain, steps=4)
    compiled.apply(config(), built_of(ours, auto=WHY))
    stepped(ours, steps=4)
    assert ours.losses == plain.losses
    effective = [payload["entries"][0]["effective"] for kind, payload in ours.writer if kind == "receipt"]
    assert effective == ["inductor", "off"]
    assert "more than 2 graphs" in capsys.readouterr().err
    compiled.apply(config(), built_of(asked))
    torch._dynamo.reset()
    with pytest.raises(ModelError, match="more than 2 graphs of a layer"):
        through(asked) if held_out else stepped(asked, steps=4)


def compiler_fails_at(monkeypatch, call_number, broken):
    """In place of the compiler: the layer's own call, which at this one of all calls stops as `broken`."""
    calls = []

    def compile_(function, **_):
        def call(layer, *args, **kwargs):
            calls.append(layer)
            if len(calls) == call_number:
                raise broken("no kernel for \x1b[31mthis shape\x1b[0m\nmore lines")
            return function(layer, *args, **kwargs)

        return call

    monkeypatch.setattr(compiled.torch, "compile", compile_)
    monkeypatch.setattr(fallback, "_known", lambda code: True)
    return calls


def test_a_later_shape_that_does_not_compile_leaves_plain_layers_and_loses_nothing_of_the_step(monkeypatch, capsys):
    plain, told = stepped(Trainer(), steps=4), Told()
    ours = Trainer(told)
    ours.state = SimpleNamespace(global_step=2)
    calls = compiler_fails_at(monkeypatch, 6, RuntimeError)  # the second layer in the third step
    compiled.apply(config(), built_of(ours, auto=WHY))
    stepped(ours, steps=4)
    assert len(calls) == 6
    assert ours.losses == plain.losses
    assert all(map(torch.equal, ours.gradients(), plain.gradients()))
    assert (ours.rows, ours.seen, ours._metrics) == (plain.rows, plain.seen, plain._metrics)
    entries = [payload["entries"][0] for kind, payload in told if kind == "receipt"]
    assert [entry["effective"] for entry in entries] == ["inductor", "off"]
    assert "failed at step 3 (RuntimeError: no kernel for" in entries[-1]["detail"]
    assert WHY in entries[-1]["detail"]
    finding = next(payload for kind, payload in told if kind == "finding")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "\x1b" not in said + finding["message"] + entries[-1]["detail"]


@pytest.mark.parametrize("auto", [WHY, None])
def test_a_later_failure_ends_the_run_of_who_asked_and_of_what_plain_layers_cannot_either(monkeypatch, auto):
    trainer = Trainer()
    compiler_fails_at(monkeypatch, 3, torch.OutOfMemoryError if auto else RuntimeError)
    compiled.apply(config(), built_of(trainer, auto=auto))
    with pytest.raises(RuntimeError, match="no kernel"):
        stepped(trainer)
    assert trainer.seen == 2


def test_held_out_rows_that_do_not_compile_are_computed_by_plain_layers(monkeypatch, capsys):
    trainer = Trainer(Told())
    compiler_fails_at(monkeypatch, 1, RuntimeError)
    compiled.apply(config(), built_of(trainer, auto=WHY))
    with torch.no_grad():
        trainer.model.eval()
        assert torch.isfinite(trainer.model.layers[0](torch.randn(3, 8, dtype=torch.float64)))
    assert "compiling failed" in capsys.readouterr().err
    stepped(trainer.model.train() and trainer)
    assert [payload["entries"][0]["effective"] for kind, payload in trainer.writer if kind == "receipt"] == ["off"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("graph", [1, 2])
def test_a_real_compiler_that_stops_at_a_later_shape_forward_or_backward_leaves_the_plain_step(graph):
    """Of the second shape's two graphs, the forward one is compiled first."""
    from torch._inductor import config as inductor

    def batches(trainer):
        found = []
        for length in (12, 20, 9):
            ids = torch.arange(2 * length).reshape(2, length) % 128
            if length == 20 and hasattr(trainer, "writer"):
                with inductor.patch(post_grad_custom_pre_pass=stop, fx_graph_cache=False):
                    found.append(trainer.training_step(ids))
            else:
                found.append(trainer.training_step(ids))
        return found

    made = []

    def stop(_):
        made.append(1)
        if len(made) == graph:
            raise RuntimeError("no such graph")

    plain = batches(SimpleNamespace(training_step=functools.partial(step, tiny_model().train())))
    torch._dynamo.reset()
    trainer = Stepping(tiny_model().train())
    trainer.writer = Told()
    compiled.apply(config(), built_of(trainer, auto=WHY))
    for (loss, gradients), (ours, found) in zip(plain, batches(trainer), strict=True):
        assert ours == pytest.approx(loss, rel=1e-6)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
    assert len(made) == graph
    effective = [payload["entries"][0]["effective"] for kind, payload in trainer.writer if kind == "receipt"]
    assert effective == ["inductor", "off"]
