"""Attention with sinks equals the model's own, forward and backward, for every kind of layer, pack, padding and cache."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from engine.config.facts import Facts, ModelFacts
from engine.features.attention_backend import apply, chosen, sinks
from engine.features.attention_backend.backend import settle
from engine.features.built import Built
from engine.hardware import parse_machine
from engine.rules import read

WINDOW, HEADS, SHARED, WIDTH = 16, 4, 2, 8
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.num_key_value_groups = HEADS // SHARED
        self.sinks = torch.nn.Parameter(torch.randn(HEADS, dtype=dtype))


def lengths_mask(lengths, window):
    """Who sees whom in one row of these documents."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(document))
    seen = (document[:, None] == document) & (place[:, None] >= place)
    return seen & (place[:, None] - place < window) if window else seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 500])
@pytest.mark.parametrize("lengths", [[50], [1, 49], [20, 20, 7, 3], [16, 1, 1, 32]])
def test_documents_windows_and_their_gradients_are_those_of_the_models_own(dtype, window, lengths):
    torch.manual_seed(0)
    layer, tokens = Layer(dtype), sum(lengths)
    shapes = [(1, count, tokens, WIDTH) for count in (HEADS, SHARED, SHARED)]
    leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes] + [layer.sinks]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    more = {"scaling": 0.4, "sliding_window": window, "s_aux": layer.sinks}
    told = {"cu_seq_lens_q": bounds, "max_length_q": max(lengths)}
    ours = sinks.sinks_attention_forward(layer, *leaves[:3], None, **more, **told)[0]
    mask = torch.zeros(tokens, tokens, dtype=dtype).masked_fill(~lengths_mask(lengths, window), -torch.inf)
    theirs = eager_attention_forward(layer, *leaves[:3], mask[None, None], **more)[0]
    upstream = torch.randn_like(theirs)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert (ours - theirs).norm() <= tolerance * theirs.norm()
    found, truth = (torch.autograd.grad(out, leaves, upstream) for out in (ours, theirs))
    for mine, other in zip(found, truth, strict=True):
        assert (mine - other).norm() <= tolerance * other.norm()


def test_the_operations_keep_what_torch_asks_of_registered_ones():
    torch.manual_seed(0)
    q, k, v = (torch.randn(12, count, WIDTH, requires_grad=True) for count in (HEADS, SHARED, SHARED))
    sink, bounds = torch.randn(HEADS, requires_grad=True), torch.tensor([0, 5, 12], dtype=torch.int32)
    torch.library.opcheck(sinks.attention_with_sinks, (q, k, v, sink, bounds, 7, 0.3, 4))


def test_torchs_kernels_return_what_the_compiler_is_told_also_of_heads_that_lie_one_after_the_other():
    tokens, bounds = 12, torch.empty(3, dtype=torch.int32, device="meta")
    by_heads = [
        torch.empty(1, count, tokens, 64, dtype=torch.bfloat16, device="meta") for count in (HEADS, SHARED, SHARED)
    ]
    q, k, v = (each.transpose(1, 2).reshape(tokens, -1, 64) for each in by_heads)
    assert not q.is_contiguous()  # as gpt-oss's rotation leaves queries and keys of one row
    sink = torch.empty(HEADS, dtype=torch.bfloat16, device="meta")
    asked = q, k, v, sink, bounds, 7, 0.3, 4
    # Where tensors have no numbers the operation is what the compiler is told, and its own body has torch's kernels tell.
    told, made = sinks.attention_with_sinks(*asked), sinks.attention_with_sinks._init_fn(*asked)
    assert [each.stride() for each in made] == [each.stride() for each in told]
    asked = made[0], q, k, v, sink, *made, bounds, 7, 0.3, 4, False
    told, made = sinks.attention_with_sinks_backward(*asked), sinks.attention_with_sinks_backward._init_fn(*asked)
    assert [each.stride() for each in made] == [each.stride() for each in told]


def test_frozen_sinks_cost_no_gradient_and_change_none():
    torch.manual_seed(0)
    layer = Layer(torch.float64)
    q, k, v = (torch.randn(2, count, 9, WIDTH, dtype=torch.float64, requires_grad=True) for count in (HEADS, 2, 2))
    grads = []
    for trained in (True, False):
        layer.sinks.requires_grad_(trained)
        out = sinks.sinks_attention_forward(layer, q, k, v, None, s_aux=layer.sinks)[0]
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def model(dtype=torch.float32):
    torch.manual_seed(0)
    made = GptOssForCausalLM(
        GptOssConfig(
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            head_dim=16,
            num_key_value_heads=SHARED,
            vocab_size=128,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            pad_token_id=0,
            attn_implementation="eager",
        )
    ).to(dtype)
    for name, weight in made.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return made


def learned(made, ids, mask=None, **more):
    made.zero_grad()
    out = made(ids, attention_mask=mask, **more).logits
    kept = out if mask is None else out[mask.bool()]
    kept.square().mean().backward()
    return [kept.detach(), *(weight.grad.clone() for weight in made.parameters() if weight.grad is not None)]


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm() + 1e-12


def test_a_model_learns_the_same_whole_padded_on_either_side_and_answers_the_same():
    made, ids = model(), torch.randint(1, 128, (2, 40))
    right = torch.ones_like(ids)
    right[1, 30:] = 0
    masks = (None, right, right.flip(1))
    theirs = [learned(made, ids, mask) for mask in masks]
    asked = {"attention_mask": torch.ones_like(ids[:, :20]), "max_new_tokens": 8, "do_sample": False}
    answers = made.generate(ids[:, :20], **asked)
    assert settle(made, "sinks", CPU) == ""
    assert made.config._attn_implementation == "sinks"
    for mask, other in zip(masks, theirs, strict=True):
        same(learned(made, ids, mask), other)
    assert torch.equal(made.generate(ids[:, :20], **asked), answers)


def test_packed_rows_kept_apart_are_those_of_documents_alone():
    made, lengths = model(), [25, 3, 12]
    ids = torch.randint(1, 128, (1, sum(lengths)))
    alone = torch.cat([made(each).logits for each in ids.split(lengths, 1)], 1)
    assert settle(made, "sinks", CPU) == ""
    config = read({"model": {"name": "x"}, "data": {"packing": True, "packing_cross_doc_attn_mask": True}}).config
    told = apply.prepare(config, Built(made))
    assert told is not None
    assert told.effective == "sinks"
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    together = made(ids, position_ids=positions).logits
    assert (together - alone).norm() <= 1e-5 * alone.norm()
    told.undo()


def test_no_mask_is_made_and_no_score_is_kept():
    made = model()
    settle(made, "sinks", CPU)
    seen = []
    for layer in made.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    ids = torch.randint(1, 128, (2, 64))
    largest = []

    def pack(tensor):
        largest.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made.model(ids)
    assert seen == [None, None]
    assert max(largest) < 2 * HEADS * 64 * 64


def test_a_function_that_the_model_does_not_share_is_not_taken(monkeypatch):
    made = model()
    real = sinks.attention_with_sinks
    monkeypatch.setattr(sinks, "attention_with_sinks", lambda q, k, v, sink, *more: real(q, k, v, sink + 0.1, *more))
    assert "differs from the model's own" in settle(made, "sinks", CPU)
    assert made.config._attn_implementation == "eager"


def facts(machine, kind="gpt_oss"):
    return Facts(machine=parse_machine(machine), model=ModelFacts("m", model_type=kind, experts=4))


@pytest.mark.parametrize(
    ("machine", "dtype", "kind", "wanted"),
    [
        ("1xH100-80GB", "bfloat16", "gpt_oss", "sinks"),
        ("1xH100-80GB", "float32", "gpt_oss", "eager"),
        ("1xH100-80GB", "bfloat16", "qwen3_moe", "sdpa"),
        ("cpu", "float32", "gpt_oss", "eager"),
    ],
)
def test_auto_takes_it_where_it_serves(machine, dtype, kind, wanted):
    config = read({"model": {"name": "m", "dtype": dtype}}).config
    assert chosen(config, facts(machine, kind))[0] == wanted


def test_dropout_is_refused_by_name():
    made = model()
    made.config.attention_dropout = 0.1
    assert "dropout" in settle(made, "sinks", CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_card_it_is_the_models_own_within_rounding(dtype):
    made = model(dtype).cuda()
    assert settle(made, "sinks", torch.device("cuda", 0)) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card_the_operation_answers_as_the_compiler_is_told_of_heads_that_lie_one_after_the_other():
    torch.manual_seed(0)
    by_heads = [torch.randn(1, count, 12, 64, dtype=torch.bfloat16, device="cuda") for count in (HEADS, SHARED, SHARED)]
    q, k, v = (each.transpose(1, 2).reshape(12, -1, 64) for each in by_heads)
    sink = torch.randn(HEADS, dtype=torch.bfloat16, device="cuda")
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32, device="cuda")
    asked = q, k, v, sink, bounds, 7, 0.3, 4
    torch.library.opcheck(sinks.attention_with_sinks, asked, test_utils="test_faketensor")
    out, sums = sinks.attention_with_sinks(*asked)
    back = torch.ones_like(out), q, k, v, sink, out, sums, bounds, 7, 0.3, 4, False
    torch.library.opcheck(sinks.attention_with_sinks_backward, back, test_utils="test_faketensor")
