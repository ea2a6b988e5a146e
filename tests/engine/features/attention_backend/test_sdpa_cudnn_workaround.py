"""Torch's fused attention kept from the length at which cuDNN's gradients under a mask are NaN: the same numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.features.attention_backend import sdpa_cudnn_workaround
from tests.engine.features.conftest import tiny_model


@pytest.fixture
def cudnn_asked(monkeypatch):
    """Whether cuDNN was among the kernels that torch could take, call after call."""
    seen, own = [], F.scaled_dot_product_attention

    def told(*args, **kwargs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return own(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", told)
    return seen


def layer():
    return SimpleNamespace(num_key_value_groups=2, is_causal=True)


def both(attend, q, k, v, mask):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(layer(), *leaves, mask, scaling=0.3, dropout=0.0)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize(
    ("queries", "keys", "by_cudnn"),
    [(64, 64, False), (192, 192, False), (5, 64, False), (65, 65, True), (128, 128, True), (1, 127, True)],
)
def test_outputs_and_gradients_stay_and_that_length_alone_is_kept_from_cudnn(
    cudnn_asked, kind, queries, keys, by_cudnn
):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, count, 8, dtype=torch.float64) for heads, count in ((4, queries), (2, keys), (2, keys))
    )
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None].repeat(2, 1, 1, 1)
    mask[0, ..., :3] = False
    mask[0, ..., :3, 0] = True  # no row without a key
    if kind == "added":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    plain = both(sdpa_attention_forward, q, k, v, mask)
    ours = both(sdpa_cudnn_workaround.masked_sdpa_attention_forward, q, k, v, mask)
    assert cudnn_asked == [True, by_cudnn]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_without_a_mask_every_length_is_torchs_own_choice(cudnn_asked):
    q, k, v = (torch.randn(1, heads, 64, 8) for heads in (4, 2, 2))
    sdpa_cudnn_workaround.masked_sdpa_attention_forward(layer(), q, k, v, None)
    assert cudnn_asked == [True]


def test_a_compiled_layer_stays_one_graph():
    q, k, v = (torch.randn(1, heads, 64, 8) for heads in (4, 2, 2))
    mask = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    module = torch.nn.Linear(1, 1)
    module.num_key_value_groups = 2

    def run(q, k, v):
        return sdpa_cudnn_workaround.masked_sdpa_attention_forward(module, q, k, v, mask, scaling=0.3)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_a_guarded_model_trains_and_samples_as_before():
    model = tiny_model().double()
    ids, mask = torch.arange(1, 65).repeat(2, 1), torch.ones(2, 64, dtype=torch.long)
    mask[0, :7] = 0  # padded in front, as prompts are

    def found():
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        sampled = model.generate(
            ids[:, :60], attention_mask=mask[:, :60], max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        return loss.item(), [p.grad.clone() for p in model.parameters()], sampled

    plain = found()
    assert "cuDNN before 9.26" in sdpa_cudnn_workaround.guard(model)
    assert model.config._attn_implementation == "sdpa_whole_tiles"
    ours = found()
    assert ours[0] == pytest.approx(plain[0], rel=1e-12)
    for a, b in zip(ours[1], plain[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert torch.equal(ours[2], plain[2])


@pytest.mark.parametrize(
    ("card", "cudnn", "dtype", "expected"),
    [
        ((9, 0), 91900, torch.bfloat16, True), ((9, 0), 92600, torch.bfloat16, False), ((8, 0), 91900, torch.bfloat16, False),
        ((9, 0), 91900, torch.float32, False),
    ],
)  # fmt: skip
def test_it_is_for_16_bits_on_hopper_with_the_releases_that_fail(monkeypatch, card, cudnn, dtype, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    model = tiny_model().to(dtype)
    assert sdpa_cudnn_workaround.at_stake(model, torch.device("cuda")) == expected
    assert not sdpa_cudnn_workaround.at_stake(model, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("keys", [704, 832, 640, 705])
def test_on_the_gpu_gradients_far_below_zero_are_finite_and_right(keys):
    """Without it 704 and 832 keys give NaN on an H100."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, keys, 128, device="cuda") for heads in (2, 1, 1))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(128)
    mask = torch.ones(keys, keys, dtype=torch.bool, device="cuda").tril()[None, None]

    def found(attend, dtype):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(layer(), *leaves, mask, scaling=128**-0.5, dropout=0.0)[0]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    ours, truth = (
        found(sdpa_cudnn_workaround.masked_sdpa_attention_forward, torch.bfloat16),
        found(sdpa_attention_forward, torch.float32),
    )
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, truth, strict=True):
        assert a.isfinite().all(), name
        # All keys share their first number, so what queries get of it is the rounding of large equal sums.
        a, b = (x[..., 1:].float() if name == "dq" else x.float() for x in (a, b))
        assert (a - b).norm() <= 3e-2 * b.norm(), name
