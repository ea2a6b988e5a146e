"""xFormers' attention over documents: what it is told, and that a batch's numbers are those of each document alone.

The package wants a card; a module of its names computes in its place by plain torch from nothing but the lengths and the
tensors that it is given.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from engine.config.facts import Facts, ModelFacts
from engine.features.attention_backend import XFORMERS, backend, chosen
from engine.features.attention_backend import apply as attention_backend
from engine.features.attention_backend.backend import settle
from engine.features.built import Built
from engine.hardware import Gpu, Machine
from engine.rules import read
from tests.engine.features.attention_backend.test_documents import config, packs, step
from tests.engine.features.conftest import tiny_model
from tests.engine.features.families import made

APART = {"packing": True, "packing_cross_doc_attn_mask": True}


class Bias:
    """Who sees whom, as xformers has it: documents one after the other, each token those before it in its own."""

    causal = True

    def __init__(self, lengths, window=None):
        self.lengths, self.window = lengths, window

    @classmethod
    def from_seqlens(cls, lengths):
        assert all(type(length) is int for length in lengths)
        return cls(lengths)

    def make_local_attention(self, window):
        return type(self)(self.lengths, window)


class BothWays(Bias):
    causal = False


def attend(q, k, v, attn_bias, scale):
    """[1, tokens, heads, width], or [1, tokens, shared, heads of each, width]."""
    shape = q.shape
    q, k, v = (x.reshape(shape[1], -1, shape[-1]) for x in (q, k, v))
    outs = []
    for part in zip(*(x.split(attn_bias.lengths) for x in (q, k, v)), strict=True):
        own, key, value = (x.transpose(0, 1) for x in part)
        ages = torch.arange(own.shape[1])[:, None] - torch.arange(own.shape[1])
        seen = (ages >= 0) | (not attn_bias.causal)
        seen &= ages < (attn_bias.window or own.shape[1])
        outs.append(F.scaled_dot_product_attention(own, key, value, seen, scale=scale).transpose(0, 1))
    return torch.cat(outs).reshape(shape)


@pytest.fixture
def package(monkeypatch):
    """The package's names, and that it is installed."""
    ops, top = ModuleType("xformers.ops"), ModuleType("xformers")
    ops.memory_efficient_attention = attend
    ops.fmha = SimpleNamespace(attn_bias=SimpleNamespace(BlockDiagonalCausalMask=Bias, BlockDiagonalMask=BothWays))
    top.ops = ops
    for module in (top, ops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backend, "installed", lambda package: "0.0.35" if package == "xformers" else None)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])  # heads that share keys; a sliding window
@pytest.mark.parametrize("checkpointing", [False, True])
def test_documents_of_several_packs_do_not_see_each_other(package, family, checkpointing):
    changes = {"sliding_window": 3} if family == "mistral" else {}
    model = made(family, num_hidden_layers=2, **changes).double()
    batch = packs(model.config.vocab_size)
    loss, gradients = step(model, batch)  # torch's own with its mask of all pairs
    assert settle(model, "xformers") == ""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    done = attention_backend.prepare(config(), Built(model))
    ours, found = step(model.train(), batch)
    assert ours == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    done.undo()


def test_the_trial_takes_what_computes_right_and_refuses_what_does_not(package, monkeypatch):
    model = tiny_model()
    assert settle(model, "xformers", torch.device("cpu")) == ""
    monkeypatch.setattr(
        sys.modules["xformers.ops"], "memory_efficient_attention", lambda *x, **more: 1.1 * attend(*x, **more)
    )
    model = tiny_model()
    assert "differs from torch's own" in settle(model, "xformers", torch.device("cpu"))
    assert model.config._attn_implementation == "sdpa"


def test_without_the_package_it_is_not_taken_and_said(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(backend, "installed", lambda package: None)
    assert settle(model, "xformers") == "xformers does not serve here: the package xformers is not installed"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("capability", "dtype", "packages", "taken"),
    [
        ((7, 5), "float16", {"xformers": "0.0.35"}, "xformers"),
        ((7, 5), "bfloat16", {"xformers": "0.0.35"}, "sdpa"),
        ((7, 5), "float16", {}, "sdpa"),
        ((8, 0), "bfloat16", {"xformers": "0.0.35"}, "varlen"),
    ],
)
def test_auto_takes_it_where_torchs_own_over_documents_does_not_run(capability, dtype, packages, taken):
    model = ModelFacts("some/model", hidden_size=64, layers=2, heads=2, head_dim=32)
    asked = read({"model": {"name": "some/model", "dtype": dtype}, "data": APART}).config
    machine = Machine(gpus=(Gpu("Tesla T4", 16 * 2**30, capability),))
    assert chosen(asked, Facts(machine=machine, model=model, packages=packages))[0] == taken


def test_auto_leaves_it_where_sums_must_be_the_same_each_time():
    model = ModelFacts("some/model", hidden_size=64, layers=2, heads=2, head_dim=32)
    run = {"full_determinism": True}
    asked = read({"model": {"name": "some/model", "dtype": "float16"}, "data": APART, "run": run}).config
    machine = Machine(gpus=(Gpu("Tesla T4", 16 * 2**30, (7, 5)),))
    assert chosen(asked, Facts(machine=machine, model=model, packages={"xformers": "0.0.35"}))[0] == "sdpa"


def test_asked_for_where_it_is_not_installed_the_command_is_told():
    asked = {"model": {"name": "some/model", "attention": XFORMERS}, "data": APART}
    machine = Machine(gpus=(Gpu("Tesla T4", 16 * 2**30, (7, 5)),))
    found = read(asked, Facts(machine=machine, packages={"xformers": None})).findings
    assert any("pip install xformers" in each.message for each in found)
