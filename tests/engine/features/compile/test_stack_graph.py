"""A recorded stack gives the gradients of the layers, also where they add up, and whatever was not recorded runs as before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.errors import ModelError
from engine.features.compile import apply as compiled
from engine.features.compile import stack_graph
from engine.features.compile.stack_graph import StackGraph
from tests.engine.features.conftest import built_of, tiny_model
from tests.engine.features.families import batches as rows_of
from tests.engine.features.families import made


class Again:
    """Records as a card does, as far as its memory goes: what is played reads and writes the tensors of the recording, and
    a forward pass writes over what the backward pass was given, as they share a pool."""

    def __init__(self) -> None:
        self.plays = self.recordings = 0
        self.back = ()

    def warm(self, run):
        run()

    def record(self, run):
        held = run()
        self.recordings += 1
        outs = held if isinstance(held, tuple) else (held,)
        self.back = outs if isinstance(held, tuple) else ()

        def play():
            self.plays += 1
            if isinstance(held, tuple):
                new = torch.autograd.grad(self.last, self.wrt, self.grad, allow_unused=True)
            else:
                for each in self.back:
                    if each is not None:
                        each.fill_(float("nan"))
                with torch.enable_grad():
                    new = (run(),)
                self.last = new[0]
            with torch.no_grad():
                for old, now in zip(outs, new, strict=True):
                    if old is not None:
                        old.detach().copy_(now)

        return play, held


@pytest.fixture
def recorded(monkeypatch):
    """A model whose layers are recorded, and what was told."""
    model, told, by = tiny_model(layers=3).train(), [], Again()
    layers = list(model.model.layers)
    real = stack_graph._Recorded.__init__

    def noted(self, stack, form, tensors, recorder):
        real(self, stack, form, tensors, recorder)
        by.wrt, by.grad = [*self._led, *self.weights], self.grad_out

    monkeypatch.setattr(stack_graph._Recorded, "__init__", noted)
    stack = StackGraph(layers, by, told.append)
    undo = stack.put("forward")
    return model, stack, by, told, undo


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def learn(model, batches):
    """Losses and summed gradients of these batches."""
    model.zero_grad()
    losses = []
    for ids in batches:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


def same(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name, found in ours[1].items():
        assert torch.equal(found, theirs[1][name]), name


def ids(seed, length=9):
    return torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(seed))


def test_a_played_stack_has_the_numbers_of_its_layers_alone_and_added_up(recorded):
    model, _, by, told, _ = recorded
    plain = tiny_model(layers=3).train()
    for seed in range(2):
        same(learn(model, [ids(seed)]), learn(plain, [ids(seed)]))
    assert not by.recordings
    same(learn(model, [ids(5)]), learn(plain, [ids(5)]))
    assert (by.recordings, by.plays) == (2, 2)
    assert [(row.effective, row.count) for row in told] == [("recorded", 3)]
    three = [ids(6), ids(7), ids(8)]
    same(learn(model, three), learn(plain, three))
    assert by.plays == 8
    same(learn(model, [ids(6)]), learn(plain, [ids(6)]))


def test_gradients_come_back_into_what_stands_before_the_layers(recorded):
    model, *_ = recorded
    plain = tiny_model(layers=3).train()
    for each in (model, plain):
        each.model.embed_tokens.weight.requires_grad_(False)
        for name, weight in each.named_parameters():
            weight.requires_grad_("q_proj" in name)
    for seed in range(4):
        same(learn(model, [ids(seed)]), learn(plain, [ids(seed)]))
    assert recorded[2].plays == 4


def test_another_length_evaluation_and_a_second_pass_run_layer_by_layer(recorded):
    model, _, by, _, undo = recorded
    plain = tiny_model(layers=3).train()
    learn(model, [ids(0)])
    learn(model, [ids(1)])
    learn(model, [ids(2)])
    plays = by.plays
    same(learn(model, [ids(3, length=5)]), learn(plain, [ids(3, length=5)]))
    with torch.no_grad():
        assert torch.equal(model(ids(3)).logits, plain(ids(3)).logits)
    assert by.plays == plays
    # Two passes of one form before a backward pass: the second must not write over what the first one keeps.
    for each in (model, plain):
        each.zero_grad()
        first, second = (each(ids(seed), labels=ids(seed), use_cache=False).loss for seed in (3, 4))
        (first + 2 * second).backward()
    assert all(torch.equal(found, gradients(plain)[name]) for name, found in gradients(model).items())
    assert by.plays == plays + 2
    same(learn(model, [ids(6)]), learn(plain, [ids(6)]))
    undo()
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_moved_weights_are_not_played(recorded):
    model, _, by, *_ = recorded
    plain = tiny_model(layers=3).train()
    for seed in range(3):
        learn(model, [ids(seed)])
    plays = by.plays
    for weight in model.model.layers.parameters():
        weight.data = weight.data.clone()
    same(learn(model, [ids(4)]), learn(plain, [ids(4)]))
    assert by.plays == plays


def test_a_recording_that_fails_leaves_layers_as_they_are(recorded, monkeypatch):
    model, _, by, told, _ = recorded
    plain = tiny_model(layers=3).train()

    def record(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(by, "record", record)
    for seed in range(4):
        same(learn(model, [ids(seed)]), learn(plain, [ids(seed)]))
    assert [row.effective for row in told] == ["off"]
    assert "not permitted" in told[0].detail


def test_where_no_batch_comes_again_the_receipt_says_so(recorded, monkeypatch):
    model, _, by, told, _ = recorded
    monkeypatch.setattr(stack_graph, "SILENT", 4)
    for seed in range(6):
        learn(model, [ids(seed, length=5 + seed % 2)])
    assert [row.effective for row in told] == ["off"]
    assert "the same shapes" in told[0].detail
    for seed in range(3):
        learn(model, [ids(seed)])
    assert [row.effective for row in told] == ["off", "recorded"]
    assert by.recordings == 2


def test_of_a_model_that_sees_the_layers_that_read_text_are_recorded(monkeypatch):
    model, seen = made("qwen3_vl").train(), []

    class Fails(Again):
        def record(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(stack_graph, "recorder", lambda device: Fails())
    writer = SimpleNamespace(write=lambda kind, entries: seen.extend(entries))
    built = built_of(SimpleNamespace(model=model, writer=writer))
    undo = compiled._record(built, built.decoder_layers(), compiled.WITHIN_HOOKS)
    for batch in rows_of(4, 2, 5):
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    undo()
    assert [entry["feature"] for entry in seen] == [stack_graph.FEATURE]
    assert "not permitted" in seen[0]["detail"]


def test_what_cannot_be_recorded_is_named():
    model = tiny_model(layers=2)
    layers = list(model.model.layers)
    assert stack_graph.problem(layers) is None
    assert stack_graph.problem(layers[:1]) == "the model has no stack of layers"
    hook = layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "listens to Qwen3MLP" in (stack_graph.problem(layers) or "")
    hook.remove()
    hook = layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert "gradients" in (stack_graph.problem(layers) or "")
    hook.remove()
    layers[0].mlp.drop = torch.nn.Dropout(0.1)
    assert stack_graph.problem(layers) == "dropout in the layers"
    with pytest.raises(ModelError, match="for a GPU"):
        stack_graph.recorder(torch.device("cpu"))


def test_layers_that_cannot_be_recorded_end_the_launch_by_name():
    from tests.engine.features.compile.test_apply import Small, Stepping, config

    class Two(Small):
        def __init__(self):
            super().__init__()
            self.layers.append(type(self.layers[0])())

    asked = config(options={"stack_cudagraph": True})
    for model, words in ((Small(), "no stack of layers"), (Two(), "for a GPU")):
        with pytest.raises(ModelError, match=words):
            compiled.apply(asked, built_of(Stepping(model)))
        assert all("_compiled_call_impl" not in vars(layer) for layer in model.layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layers_are", ["plain", "compiled"])
def test_on_a_card_recorded_layers_have_the_numbers_of_layers_that_are_launched(layers_are):
    ours, plain = (tiny_model(layers=3).cuda().train() for _ in range(2))
    layers, told = list(ours.model.layers), []
    undos = [lambda: None]
    if layers_are == "compiled":
        undos = [compiled.compile_layers(list(each.model.layers), {}) for each in (ours, plain)]
    stack = StackGraph(layers, stack_graph.recorder(torch.device("cuda")), told.append)
    undo = stack.put("_compiled_call_impl" if layers_are == "compiled" else "forward")

    def close(what, ours, theirs):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5), what
        apart = {name: float((ours[1][name] - g).norm() / g.norm().clamp_min(1e-12)) for name, g in theirs[1].items()}
        assert max(apart.values()) < 1e-4, (what, sorted(apart.items(), key=lambda each: -each[1])[:5])

    for batches in ([0], [1], [2], [3], [4, 5], [6, 7, 8], [9]):
        rows = [ids(seed).cuda() for seed in batches]
        close(batches, learn(ours, rows), learn(plain, rows))
    assert [row.effective for row in told] == ["recorded"], told
    mixed = [ids(10).cuda(), ids(11, length=5).cuda(), ids(12).cuda()]
    close("another length between", learn(ours, mixed), learn(plain, mixed))
    found = []
    for each in (ours, plain):
        each.zero_grad()
        first, second = (each(ids(seed).cuda(), labels=ids(seed).cuda(), use_cache=False).loss for seed in (13, 14))
        with torch.no_grad():
            each(ids(15).cuda())
        (first + 2 * second).backward()
        each(ids(16).cuda(), labels=ids(16).cuda(), use_cache=False)  # is never differentiated
        found.append(([first.item(), second.item()], gradients(each)))
    close("two passes before a backward pass, and one after it", *found)
    undo()
    for each in undos:
        each()
    torch._dynamo.reset()
