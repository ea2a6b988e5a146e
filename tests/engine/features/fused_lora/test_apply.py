"""LoRA in closed form is PEFT's own: outputs and gradients, less kept for the backward pass, and what is left to PEFT."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GemmaConfig, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from engine.errors import ModelError
from engine.features.built import Built
from engine.features.fused_lora import CLOSED_FORM_WIDE
from engine.features.fused_lora.apply import apply, fuse
from engine.features.fused_lora.projections import gated_form
from engine.features.fused_norm_rope.apply import fuse as fuse_attention
from engine.features.gradient_checkpointing.tiers import use_tier
from engine.kernels.lora import Projection, Weights, gated_block, projected
from engine.models.stored_fp8 import Fp8Linear
from engine.models.stored_packed.formats import of_gptq
from engine.models.stored_packed.linear import PackedLinear
from tests.engine.features.conftest import tiny_model
from tests.engine.models.stored_packed.packed_files import gptq
from tests.engine.trainers.conftest import lines

IDS = torch.arange(18).reshape(2, 9) % 128


def qwen2():
    """With a bias beside queries, keys and values."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model


def phi3():
    """With gate and up in one projection, and queries, keys and values in another."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "pad_token_id": 0}
    return Phi3ForCausalLM(Phi3Config(**shape, num_attention_heads=4, num_key_value_heads=2))


def adapted(base=None, dtype=torch.float64, **settings):
    """A tiny model with adapters that already say something, in training."""
    base = tiny_model() if base is None else base
    torch.manual_seed(0)
    settings = {"r": 2, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    model = get_peft_model(base, LoraConfig(**settings)).to(dtype)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.train()


def layers(model):
    return list(model.get_base_model().model.layers)


def step(model, ids=IDS, times=1):
    """Logits and gradients of so many passes, whose gradients add up; dropout draws the same each time."""
    model.zero_grad()
    torch.manual_seed(5)
    for _ in range(times):
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs, allowed):
    (logits, found), (wanted_logits, wanted) = ours, theirs
    assert float((logits - wanted_logits).norm()) <= allowed * float(wanted_logits.norm())
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= allowed * float(gradient.norm()), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "in 2 gated blocks, 2 groups of one input, 2 by themselves"),
        ({"target_modules": ["q_proj", "v_proj"]}, "in 2 gated blocks, 2 groups of one input"),
        ({"target_modules": ["o_proj", "up_proj"], "use_rslora": True}, "in 2 gated blocks, 2 by themselves"),
        ({"lora_dropout": 0.4}, "in 2 gated blocks, 2 groups of one input, 2 by themselves"),
        ({"bias": "all", "modules_to_save": ["embed_tokens"]}, "in 2 gated blocks, 2 groups of one input, 2 by"),
        ({"phi3": True}, "in 2 gated blocks, 4 by themselves"),
        ({"rank_pattern": {"k_proj": 5}, "alpha_pattern": {"gate_proj": 1}}, "in 2 gated blocks, 2 groups"),
    ],
    ids=["all", "attention", "rslora", "dropout", "bias and embeddings", "halves", "ranks"],
)
def test_outputs_and_gradients_are_pefts_and_it_is_taken_back(settings, words):
    base = phi3() if settings.pop("phi3", False) else qwen2() if "bias" in settings else None
    model, times = adapted(base, **settings), 2
    theirs = step(model, times=times)
    with torch.no_grad(), model.disable_adapter():
        off = model(IDS).logits
    found, undo = fuse(layers(model))
    assert words in found.summary()
    assert not found.left
    same(step(model, times=times), theirs, 1e-10)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(IDS).logits, off)
    undo()
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(step(model, times=times)[0], theirs[0])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("tier", ["full", "selective", "medium"])
def test_under_every_kind_of_checkpoint_numbers_are_pefts(tier, dropout):
    model = adapted(lora_dropout=dropout)
    base = model.get_base_model()
    if tier != "full":
        use_tier(base, tier)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    theirs = step(model)
    fuse(layers(model))
    same(step(model), theirs, 1e-10)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_in_other_formats_numbers_differ_by_rounding_alone(dtype, allowed):
    wide, model = adapted(), adapted(dtype=dtype)
    wide.load_state_dict(model.state_dict())
    truth, theirs = step(wide), step(model)
    fuse(layers(model))
    ours = step(model)
    for name, exact in truth[1].items():
        error, peft = (float((each[1][name].double() - exact).norm() / exact.norm()) for each in (ours, theirs))
        assert error <= 1.5 * peft + allowed, name
    assert all(gradient.dtype == dtype for gradient in ours[1].values())


def test_float32_adapters_of_a_bfloat16_model_are_multiplied_in_float32():
    model = adapted(dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float()
    truth = step(copy.deepcopy(model).double())
    theirs = step(model)
    fuse(layers(model))
    ours = step(model)
    assert {each.dtype for each in ours[1].values()} == {torch.float32}
    # How far bfloat16 rounds one gradient is the affair of the processor and of torch's products, which 2.11 and 2.13 add up
    # in other orders; over all of them closed form stays as near to the truth as PEFT does.
    away, peft = (
        {name: float((each[1][name] - exact).norm() / exact.norm()) for name, exact in truth[1].items()}
        for each in (ours, theirs)
    )
    assert all(error <= 3 * peft[name] + 1e-6 for name, error in away.items())
    assert sum(away.values()) <= 1.1 * sum(peft.values())


def kept(model):
    """Bytes that a forward pass keeps for the backward pass, each storage once, and weights not."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(IDS, use_cache=False).logits  # held, so that no storage is taken again
    del out
    return sum(found.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_less_is_kept_for_the_backward_pass(dropout):
    model = adapted(dtype=torch.float32, lora_dropout=dropout)
    theirs = kept(model)
    fuse(layers(model))
    ours = kept(model)
    tokens, wide = IDS.numel(), 64
    # Of each block at least act(gate) and the product are not kept; with dropout also what it left of every input.
    assert theirs - ours >= CLOSED_FORM_WIDE * tokens * wide * 4 * 2
    if not dropout:
        assert theirs - ours < 1.2 * CLOSED_FORM_WIDE * tokens * wide * 4 * 2, "the estimate counts what is saved"
    assert ours < (0.85 if dropout == 0 else 0.75) * theirs


class Products(TorchDispatchMode):
    """Notes the shape of every product."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
            self.made.append((tuple(out.shape), args[-1].shape[0]))
        return out


def test_no_product_is_as_large_as_a_weight_and_a_checkpoint_leaves_out_the_last_one():
    model = adapted()
    weights = {tuple(p.shape) for name, p in model.named_parameters() if "base_layer" in name}
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with Products() as theirs:
        step(model)
    fuse(layers(model))
    with Products() as ours:
        step(model)
    assert not weights & {shape for shape, _ in ours.made}
    tokens = IDS.numel()
    last = ((tokens, 32), 64)  # down, which gate and up share with it in the backward pass: their inner size is 64 too
    assert theirs.made.count(last) - ours.made.count(last) == len(layers(model))


def quantized(layer):
    bnb = pytest.importorskip("bitsandbytes")
    out = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    out.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=out)
    return out.to("cpu")


def in_fp8(layer):
    high, wide = layer.weight.shape
    scale = torch.rand(-(-high // 24), -(-wide // 24)) + 0.5
    return Fp8Linear(layer, layer.weight.data.to(torch.float8_e4m3fn), scale, (24, 24))


def in_groups(layer):
    tensors, _ = gptq(layer.weight.data, group=16, ordered=True)
    found = PackedLinear(layer)
    found.fill(of_gptq(tensors.get, *layer.weight.shape, {}))
    return found


@pytest.mark.parametrize("make", [quantized, in_fp8, in_groups], ids=["nf4", "fp8", "gptq"])
def test_over_quantized_weights_numbers_are_pefts(make):
    base = tiny_model(hidden_size=64, intermediate_size=64)
    for layer in base.model.layers:
        for path, linear in list(layer.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, make(linear))
    base.is_loaded_in_4bit = make is quantized
    model = adapted(base, dtype=torch.float32)
    theirs = step(model)
    found, _ = fuse(layers(model))
    assert (found.blocks, found.groups, found.alone, found.served) == (2, 2, 2, 14)
    same(step(model), theirs, 1e-5)


def asked(model, on=True):
    return apply(SimpleNamespace(kernels=SimpleNamespace(fused_lora=on)), Built(model))


def test_what_is_not_plain_lora_is_left_to_peft_with_its_reason():
    with pytest.raises(ModelError, match="PEFT computes all 14 adapted projections: 14 with DoRA"):
        asked(adapted(use_dora=True))
    with pytest.raises(ModelError, match="no decoder layer with a LoRA adapter"):
        asked(tiny_model())
    assert asked(adapted(), on="auto") is None
    model = adapted()
    layers(model)[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    layers(model)[1].mlp.down_proj.base_layer = torch.nn.utils.parametrizations.weight_norm(
        layers(model)[1].mlp.down_proj.base_layer
    )
    theirs = step(model)
    done = asked(model)
    assert done.count == 12
    assert "left to PEFT: 1 with hooks on it, 1 with ParametrizedLinear weights" in done.detail
    assert "1 gated blocks" in done.detail
    same(step(model), theirs, 1e-10)


def test_who_listens_at_an_adapters_matrix_goes_on_hearing():
    model, heard = adapted(), []
    layers(model)[0].self_attn.o_proj.lora_A["default"].register_forward_hook(lambda *_: heard.append(1))
    theirs = step(model)
    assert "1 with hooks on it" in asked(model).detail
    same(step(model), theirs, 1e-10)
    assert heard == [1, 1]


def test_a_second_adapter_and_a_merged_one_are_seen_when_they_come():
    model = adapted().eval()
    fuse(layers(model))
    model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear"))
    model.double()
    with torch.no_grad():
        one = model(IDS).logits
        model.set_adapter("other")
        other = model(IDS).logits
        model.base_model.set_adapter(["default", "other"])
        torch.testing.assert_close(model(IDS).logits, one)  # B of the new one is zero
        model.set_adapter("default")
        model.merge_adapter()
        torch.testing.assert_close(model(IDS).logits, one)
        model.unmerge_adapter()
        with model.disable_adapter():
            torch.testing.assert_close(model(IDS).logits, other)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (1, 32)])
def test_a_batch_without_a_token_or_with_one_has_results_of_its_shape_and_plain_gradients(shape):
    model = adapted()
    layer = layers(model)[0]
    x = torch.randn(shape, dtype=torch.float64)

    def through(module):
        given = x.clone().requires_grad_()
        out = module(given)
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        return [out.detach(), *torch.autograd.grad(out.sum(), [given, *trained])]

    modules = layer.mlp, layer.self_attn.q_proj
    theirs = [through(module) for module in modules]
    found, undo = fuse([layer])
    assert found.blocks == 1
    for module, plain in zip(modules, theirs, strict=True):
        for ours, wanted in zip(through(module), plain, strict=True):
            assert ours.shape == wanted.shape
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
    undo()


@pytest.mark.parametrize("lora_first", [True, False])
def test_beside_the_fused_norm_of_attention_either_order_gives_the_same(lora_first):
    model = adapted()
    attention = [layer.self_attn for layer in layers(model)]
    undo = fuse_attention(attention)
    theirs = step(model)  # with norms in float64, which the model's own class rounds to float32
    undo()
    wraps = [lambda: fuse(layers(model))[1], lambda: fuse_attention(attention)]
    undos = [wrap() for wrap in (wraps if lora_first else reversed(wraps))]
    same(step(model), theirs, 1e-10)
    for undo in reversed(undos):
        undo()
    assert all("forward" not in vars(module) for module in model.modules())


def test_where_processes_add_up_gradients_each_is_reduced_once(tmp_path):
    model = adapted()
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, theirs = step(model, times=2)
    fuse(layers(model))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        ranks = DistributedDataParallel(model)
        model.zero_grad()
        with ranks.no_sync():
            ranks(IDS, labels=IDS, use_cache=False).loss.backward()
        ranks(IDS, labels=IDS, use_cache=False).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, theirs[name], rtol=1e-10, atol=1e-13)


def test_a_gated_block_is_known_by_what_its_class_computes():
    small = {"hidden_size": 8, "intermediate_size": 16}
    gemma = GemmaMLP(GemmaConfig(**small))
    assert gated_form(tiny_model().model.layers[0].mlp) == "silu"
    assert gated_form(gemma) == "gelu_tanh"
    gemma.act_fn = torch.nn.GELU()
    assert gated_form(gemma) == "gelu"
    gemma.act_fn = torch.nn.ReLU()
    assert gated_form(gemma) is None
    assert gated_form(Phi3MLP(Phi3Config(**small))) == "silu"

    class Other(GemmaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))

    other = Other(GemmaConfig(**small))
    other.act_fn = torch.nn.SiLU()
    assert gated_form(other) is None


def drawn(rows, columns, rank=2, trained=True, scale=1.5):
    """A projection with all that may train, in float64."""
    weight, bias = torch.randn(rows, columns, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)
    a, b = torch.randn(rank, columns, dtype=torch.float64), torch.randn(rows, rank, dtype=torch.float64)
    for each in (weight, bias, a, b) if trained else ():
        each.requires_grad_()
    layer = Projection(lambda x: torch.nn.functional.linear(x, weight, bias), lambda dtype: weight, rows, scale)
    return layer, Weights(weight, bias, a, b)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_every_gradient_of_a_block_is_that_of_finite_differences(activation):
    torch.manual_seed(0)
    front, down = [drawn(5, 3), drawn(5, 3, rank=1)], drawn(4, 5, scale=0.5)
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    for group in ([*front, down], [drawn(10, 3), down]):
        leaves = (x, *(tensor for _, weights in group for tensor in weights))
        assert torch.autograd.gradcheck(lambda x, *_, g=group: gated_block(x, g, activation, in_place=False), leaves)
        slope = torch.randn(2, 2, 4, dtype=torch.float64)
        both = [
            torch.autograd.grad(gated_block(x, group, activation, in_place=spent), leaves, slope) for spent in (0, 1)
        ]
        for kept, spent in zip(*both, strict=True):
            torch.testing.assert_close(spent, kept)
    leaves = (x, *(tensor for _, weights in front for tensor in weights))
    assert torch.autograd.gradcheck(lambda x, *_: tuple(projected(x, front)), leaves)


def test_a_second_backward_pass_over_spent_memory_is_refused():
    torch.manual_seed(0)
    group = [drawn(5, 3), drawn(5, 3), drawn(3, 5)]
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    out = gated_block(x, group, "silu").sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="taken before"):
        torch.autograd.grad(out, x)
    twice = gated_block(x, group, "silu", in_place=False).sum()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(twice, x, retain_graph=True)[0], first)


@pytest.mark.slow
def test_a_run_of_20_steps_learns_along_the_same_curve(train):
    base = {
        "method.kind": "sft", "optim.max_steps": 20, "run.save_steps": 20, "adapter.kind": "lora", "adapter.r": 8,
        "data.train": [{"path": "builtin/dates"}], "optim.learning_rate": 1e-3, "optim.per_device_train_batch_size": 2,
        "optim.gradient_accumulation_steps": 2,
    }  # fmt: skip
    plain, ours = (
        [event for event in lines(train({**base, **more}), "metrics") if "loss" in event]
        for more in ({}, {"kernels.fused_lora": True})
    )
    assert len(ours) == len(plain) >= 10
    for one, other in zip(ours, plain, strict=True):
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), one["step"]
    assert plain[-1]["loss"] < plain[0]["loss"]
