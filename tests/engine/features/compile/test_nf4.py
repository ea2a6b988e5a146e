"""4-bit weights in compiled layers: one graph a layer, forward and backward, and the numbers of the plain pass.

bitsandbytes registers its products as operations that torch's compiler takes whole; these tests fail by name where a
release no longer does. Graphs are traced and differentiated, and run operation by operation: code is built in the slow case.
"""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engine.features.compile import apply as compiled
from engine.features.compile.recompute_4bit import Recompute4bit
from engine.features.gradient_checkpointing.tiers import POLICIES, WIDEST, is_4bit_product
from tests.engine.features.conftest import built_of, tiny_model

bnb = pytest.importorskip("bitsandbytes")


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Compiled code goes here, and torch forgets it afterwards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def quantized(linear, dtype, *, nested=True, kind="nf4"):
    """The same layer with 4-bit weights; `nested` statistics are quantized again."""
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, compress_statistics=nested, quant_type=kind
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        linear.weight.data.to(dtype), requires_grad=False, compress_statistics=nested, quant_type=kind, module=layer
    )
    return layer.to("cpu")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_a_product_with_4_bit_weights_is_one_graph_both_ways(nested, kind):
    torch.manual_seed(0)
    layer = quantized(torch.nn.Linear(64, 96, bias=False), torch.bfloat16, nested=nested, kind=kind)
    assert layer.weight.quant_state.nested is nested
    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for call in (layer, traced):
        out = call(x)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
    (out, gradient), (ours, found) = results
    assert torch.equal(ours, out)
    assert torch.equal(found, gradient)
    assert gradient.abs().sum() > 0


def adapted(nested, targets, dtype=torch.float32):
    """Two decoder layers with 4-bit weights and adapters that already say something, each layer checkpointed."""
    model = tiny_model(hidden_size=64, intermediate_size=64).to(dtype)
    for layer in model.model.layers:
        for path, linear in list(layer.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, quantized(linear, dtype, nested=nested))
    model.is_loaded_in_4bit = True
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn_like(weight).mul_(0.1).to(dtype)
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def step(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def settings(tier):
    return SimpleNamespace(
        kernels=SimpleNamespace(torch_compile=True, torch_compile_options={}),
        memory=SimpleNamespace(gradient_checkpointing=tier),
        data=SimpleNamespace(packing=True),
        model=SimpleNamespace(name="nobody/of-no-shape", revision=None),
        distributed=SimpleNamespace(strategy="auto", expert_parallel_size=1),
    )


def check_one_graph(nested, allowed, targets=("q_proj", "down_proj")):
    model, ids = adapted(nested, list(targets)), torch.arange(24).reshape(2, 12)
    loss, gradients = step(model, ids)
    assert len(gradients) == 2 * len(targets) * 2  # A and B of the projections in two layers, and nothing of the base
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    compiled.apply(settings("full"), built_of(SimpleNamespace(model=model, training_step=None)))
    ours, found = step(model, ids)
    assert counters["stats"]["unique_graphs"] - graphs == 1  # the second layer takes the first one's
    assert sum(counters["graph_break"].values()) == breaks
    assert ours == pytest.approx(loss, rel=allowed)
    for name, gradient in gradients.items():
        assert (found[name].double() - gradient.double()).norm() <= allowed * gradient.double().norm() + 1e-9, name


@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpointed_layer_of_4_bit_weights_and_adapters_is_one_graph(monkeypatch, nested):
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options=None, **how: plain(call, backend="aot_eager", **how))
    check_one_graph(nested, 1e-6)


class Unpacking(torch.autograd.Function):
    """The product as bitsandbytes before 0.50 has it: its weight is unpacked in forward and again in backward."""

    @staticmethod
    def forward(ctx, x, packed, state):
        ctx.packed, ctx.state = packed, state
        return torch.nn.functional.linear(x, bnb.functional.dequantize_4bit(packed, state))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ bnb.functional.dequantize_4bit(ctx.packed, ctx.state), None, None


OTHERS = [(False, True, WIDEST["medium"]), (False, True, WIDEST["selective"]), (False, False, WIDEST["medium"])]


@pytest.mark.parametrize(
    ("products", "checkpointed", "widest"),
    [
        pytest.param(*each, marks=pytest.mark.slow if each[0] != each[1] and each[2] is None else ())
        for each in [*itertools.product([True, False], [True, False], [None]), *OTHERS]
    ],
)
def test_no_unpacked_weight_waits_for_the_backward_pass_and_a_tier_holds_its_products(products, checkpointed, widest):
    layer = quantized(torch.nn.Linear(64, 96, bias=False), torch.bfloat16)
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)

    def layer_of(x):
        return Unpacking.apply(x, layer.weight.view(-1, 1), layer.weight.quant_state) + layer(x).square()

    def call(x):
        return checkpoint(layer_of, x, use_reentrant=False) if checkpointed else layer_of(x)

    def as_torch_2_11_has_it(graph):
        for node in graph.nodes:  # the checkpoint's mark is not in an autograd.Function
            if getattr(node.target, "namespace", "") == "bitsandbytes":
                node.meta.pop("recompute", None)
        return graph

    def run(mark):
        def parted(joint, inputs, **more):
            mark(as_torch_2_11_has_it(joint.graph))
            return min_cut_rematerialization_partition(joint, inputs, **more)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=parted)
        held = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: held.append(tuple(each.shape)) or each, lambda each: each
        ):
            out = torch.compile(call, fullgraph=True, backend=backend)(x)
        return held, (out, *torch.autograd.grad(out.float().square().sum(), x))

    held, wanted = run(lambda graph: None)
    # What torch would hold by itself; 2.15 unpacks it again.
    assert ((96, 64) in held) == (Version(torch.__version__) < Version("2.15"))
    held, found = run(Recompute4bit(products=products, widest=widest))
    assert (96, 64) not in held
    results = sum(torch.Size(shape).numel() == 2 * 5 * 96 for shape in held)
    again = products or widest == WIDEST["medium"]  # which is for products no wider than their input
    assert results == (not (again and checkpointed))  # what is squared
    assert all(map(torch.equal, found, wanted))


class Executed(TorchDispatchMode):
    """How many products with 4-bit weights are computed."""

    products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.products += is_4bit_product(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(("tier", "again"), [("selective", 0), ("medium", 1), (None, 1)])
def test_a_tier_of_plain_layers_holds_products_with_4_bit_weights(tier, again):
    layer = quantized(torch.nn.Linear(64, 96, bias=False), torch.bfloat16)
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    how = {"context_fn": partial(create_selective_checkpoint_contexts, POLICIES[tier])} if tier else {}
    with Executed() as executed:
        out = checkpoint(lambda x: layer(x).square().sin(), x, use_reentrant=False, **how)
        first = executed.products
        out.sum().backward()
    assert (first, executed.products) == (1, 1 + again)


@pytest.mark.parametrize(("tier", "products"), [("full", True), ("selective", False), (False, False)])
def test_layers_in_four_bits_are_compiled_so_and_others_are_not(monkeypatch, tier, products):
    seen = []
    monkeypatch.setattr(compiled.torch, "compile", lambda call, options, **_: seen.append(options or {}) or call)
    for model in (adapted(True, ["q_proj"]), tiny_model()):
        compiled.apply(settings(tier), built_of(SimpleNamespace(model=model, training_step=None)))
    ours = [options.get("joint_custom_pre_pass") for options in seen]
    assert [each and each.products for each in ours] == [products, products, None, None]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_the_code_that_is_built_for_it_gives_the_plain_numbers():
    check_one_graph(True, 1e-4, EVERY)
