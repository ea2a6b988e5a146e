"""Packed rows kept apart under flash attention: the numbers of each document alone, in batches of several packs too."""

from __future__ import annotations

import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import modeling_flash_attention_utils as flash_utils

from engine.data.collate import LanguageCollator
from engine.errors import ModelError
from engine.features.attention_backend import apply as attention_backend
from engine.features.attention_backend.backend import settle, trial
from engine.features.attention_backend.positions import attach_positions
from engine.features.built import Built
from tests.engine.features.conftest import tiny_model
from tests.engine.features.families import made


def attend(q, k, v, causal=False, softmax_scale=None, dropout_p=0.0):
    """flash_attn_func by torch's own: [B, T, heads, width]."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def attend_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None, dropout_p=0.0
):
    """flash_attn_varlen_func: [tokens, heads, width], one document after the other."""
    assert cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    parts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*(x[None] for x in part), causal, softmax_scale)[0] for part in parts])


@pytest.fixture
def flash(monkeypatch):
    """transformers' flash attention with these two in the place of the package's."""
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *a, **k: (attend, attend_varlen, None, None, None))
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn",
                 "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):  # fmt: skip
        monkeypatch.setattr(flash_utils, name, None, raising=False)  # the last one came after transformers 5.17


def config(packing=True, apart=True):
    return SimpleNamespace(data=SimpleNamespace(packing=packing, packing_cross_doc_attn_mask=apart))


def packs(vocabulary=128):
    """Two packs of documents of other lengths, the second one padded."""
    rows = [{"seq_lengths": [5, 7]}, {"seq_lengths": [3, 4, 2]}]
    for number, row in enumerate(rows):
        row["input_ids"] = torch.randint(
            vocabulary, (sum(row["seq_lengths"]),), generator=torch.Generator().manual_seed(number)
        ).tolist()
        row["labels"] = list(row["input_ids"])
    return LanguageCollator(0)(rows)


def step(model, batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_documents_of_several_packs_do_not_see_each_other(flash, checkpointing):
    model, batch = tiny_model().double(), packs()
    assert batch["input_ids"].shape == (2, 12)
    loss, gradients = step(model, batch)  # torch's own with its mask of all pairs
    model.config._attn_implementation = "flash_attention_2"
    assert step(model, batch)[0] != pytest.approx(loss, rel=1e-4)  # what transformers makes of more than one row
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    done = attention_backend.prepare(config(), Built(model))
    ours, found = step(model.train(), batch)
    assert ours == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    done.undo()
    assert step(model, batch)[0] != pytest.approx(loss, rel=1e-4)


def test_bounds_are_those_of_the_flattened_batch():
    found = attention_backend.beginnings(packs()["position_ids"])
    assert found["cu_seq_lens_q"].tolist() == [0, 5, 12, 15, 19, 21, 24]
    assert (found["max_length_q"], found["max_length_k"]) == (7, 7)


def test_bounds_that_the_host_knows_are_not_asked_of_the_device():
    known = packs()["position_ids"]
    far = torch.full_like(known, 3)  # where a look would find no beginning
    attach_positions(far, known)
    found, wanted = attention_backend.beginnings(far), attention_backend.beginnings(known)
    assert torch.equal(found["cu_seq_lens_q"], wanted["cu_seq_lens_q"])
    assert found["max_length_q"] == wanted["max_length_q"]


def test_positions_that_are_on_the_host_themselves_hold_no_circle():
    positions = torch.arange(4)
    attach_positions(positions, positions)
    gone = weakref.ref(positions)
    gc.disable()
    try:
        del positions
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def torchs(monkeypatch):
    """Torch's attention over documents, whose kernel wants a card, by torch's own attention of each."""
    calls = []
    # Before torch 2.12 its attention takes heads that share keys without being told.
    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def over_documents(q, k, v, bounds, _, longest, __, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        calls.append(window_size)
        assert enable_gqa == (asked and q.shape[1] != k.shape[1])
        assert (bounds.dtype, longest) == (torch.int32, int(bounds.diff().max()))
        outs = []
        for part in zip(*(x.split(bounds.diff().tolist()) for x in (q, k, v)), strict=True):
            own, key, value = (x.transpose(0, 1) for x in part)
            ages = torch.arange(own.shape[1])[:, None] - torch.arange(own.shape[1])
            seen = (ages >= 0) & ((ages <= window_size[0]) | (window_size[0] < 0))
            outs.append(F.scaled_dot_product_attention(own, key, value, seen, scale=scale, enable_gqa=True))
        return torch.cat(outs, 1).transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", over_documents)
    return calls


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_torchs_attention_over_documents_keeps_packs_apart_and_makes_no_mask(
    torchs, checkpointing, window, monkeypatch
):
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    model, batch = tiny_model(**sliding).double(), packs()
    loss, gradients = step(model, batch)  # torch's own with its mask of all pairs
    settle(model, "varlen")
    assert model.config._attn_implementation == "varlen"
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention_backend.prepare(config(), Built(model))
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
    ours, found = step(model.train(), batch)
    assert ours == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    assert set(torchs) == {((window or 0) - 1, 0)}


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen2", "qwen3", "qwen3_vl", "mistral", "phi3", "granite", "cohere"]
)
def test_each_family_has_the_losses_of_the_mask_under_torchs_attention_over_documents(torchs, family):
    model, batch = made(family).double(), packs(61)
    masked = model(**batch, use_cache=False).loss.item()
    settle(model, "varlen")
    attention_backend.prepare(config(), Built(model))
    assert model(**batch, use_cache=False).loss.item() == pytest.approx(masked, rel=1e-12)
    assert len(torchs) == 2  # layers


def test_rows_with_padding_or_a_cache_take_torchs_fused_attention(torchs):
    model = tiny_model().double().eval()
    ids, mask = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        plain = [model(ids, attention_mask=mask).logits, model(ids).logits, model.generate(ids, max_new_tokens=4)]
        settle(model, "varlen")
        attention_backend.prepare(config(), Built(model))
        again = [model(ids, attention_mask=mask).logits, model(ids).logits, model.generate(ids, max_new_tokens=4)]
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
    assert not torchs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model.config, "attention_dropout", 0.1), "no dropout, and the model asks for 0.1"),
        (lambda model: setattr(model.config, "attn_logit_softcapping", 50.0), "no cap on scores"),
        (lambda model: setattr(model.model.layers[0].self_attn, "sinks", torch.zeros(2)), "no attention sinks"),
        (lambda model: setattr(model, "_supports_attention_backend", False), "in its own way"),
    ],
)
def test_what_torchs_attention_over_documents_has_no_form_for_is_left_to_its_own(change, words):
    model = tiny_model()
    change(model)
    reason = settle(model, "varlen")
    assert model.config._attn_implementation == "sdpa"
    assert reason.startswith("varlen does not serve here: ")
    assert words in reason


def test_other_attention_and_plain_rows_are_left_alone(flash):
    model = tiny_model()
    assert attention_backend.prepare(config(), Built(model)) is None
    model.config._attn_implementation = "flash_attention_2"
    assert attention_backend.prepare(config(packing=False), Built(model)) is None
    assert attention_backend.prepare(config(apart=False), Built(model)) is None
    model = model.double()
    rows = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6)}
    plain = step(model, rows)[0]
    attention_backend.prepare(config(), Built(model))
    assert step(model, rows)[0] == plain


def test_a_model_that_hands_nothing_on_is_refused():
    class Backbone(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    backbone = Backbone()
    model = SimpleNamespace(base_model=backbone, config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    with pytest.raises(ModelError, match="Backbone does not tell its layers where documents begin"):
        attention_backend.prepare(config(), Built(model))


def test_the_names_that_are_handed_on_are_those_that_transformers_reads():
    known = inspect.signature(flash_utils._flash_attention_forward).parameters
    assert set(attention_backend.beginnings(torch.arange(3)[None])) <= set(known)


def test_flex_attention_gives_the_same_numbers_as_torchs_own_over_packs():
    """Its mask of blocks, by torch's own operations; a CPU has no gradients of it, which a trial finds out."""
    model, batch = tiny_model().double(), packs()
    settle(model, "flex_attention")
    assert model.config._attn_implementation == "flex_attention"
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        ours = model(**batch, use_cache=False).logits
    settle(model, "sdpa")
    with torch.no_grad():
        torch.testing.assert_close(ours, model(**batch, use_cache=False).logits, rtol=1e-9, atol=1e-12)
    with torch.compiler.set_stance("force_eager"):
        reason = settle(model, "flex_attention", torch.device("cpu"))
    assert model.config._attn_implementation == "sdpa"
    assert "does not support backward on CPU" in reason


def test_a_trial_finds_out_attention_that_computes_something_else(flash, monkeypatch):
    model = tiny_model()
    assert trial("flash_attention_2", model, torch.device("cpu")) is None
    monkeypatch.setattr(flash_utils, "_flash_varlen_fn", lambda *args, **kwargs: 1.1 * attend_varlen(*args, **kwargs))
    assert trial("flash_attention_2", model, torch.device("cpu")) == "its output differs from torch's own by 10.0%"


def test_what_does_not_serve_leaves_the_model_with_its_own_and_the_reason(monkeypatch):
    model, ids = tiny_model(), torch.arange(8)[None]
    plain = model(ids).logits
    monkeypatch.setattr("engine.features.attention_backend.backend.installed", lambda package: None)
    reason = settle(model, "flash_attention_2")
    assert model.config._attn_implementation == "sdpa"
    assert reason.startswith("flash_attention_2 does not serve here: ")
    assert torch.equal(model(ids).logits, plain)
    monkeypatch.setattr("engine.features.attention_backend.backend.trial", lambda *args: "no kernel for this card")
    assert settle(model, "eager", torch.device("cpu")) == "eager does not serve here: no kernel for this card"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name", ["varlen", "cudnn", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
)
def test_on_the_gpu_packs_are_kept_apart_without_a_mask_of_all_pairs(name):
    """What `settle` tries is so on this card, in batches of changing widths; without the package the reason is told."""
    model = tiny_model(hidden_size=256, num_attention_heads=4, head_dim=64).to("cuda", torch.bfloat16)
    batch = {key: value.cuda() for key, value in packs().items()}
    loss, gradients = step(model, batch)
    reason = settle(model, name, torch.device("cuda"))
    if model.config._attn_implementation != name:
        assert reason
        pytest.skip(reason)
    attention_backend.prepare(config(), Built(model))
    for cut in (12, 9, 12, 7):
        step(model, {key: value[:, :cut] for key, value in batch.items()})
    ours, found = step(model, batch)
    assert ours == pytest.approx(loss, rel=2e-2)
    for key, gradient in gradients.items():
        assert (found[key].double() - gradient.double()).norm() <= 5e-2 * gradient.double().norm() + 1e-6, key
