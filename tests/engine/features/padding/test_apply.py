"""Rows padded behind their tokens: the losses and gradients of the mask, without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from engine.config.method import METHODS
from engine.data.collate import LanguageCollator, collator_for
from engine.features.padding import apply as padding
from engine.rules import read
from tests.engine.features.conftest import built_of, tiny_model
from tests.engine.features.families import FAMILIES, SEEING, made

LENGTHS = (12, 5, 9)


def config(kind="sft"):
    return SimpleNamespace(method=METHODS[kind].model_construct())


def rows(vocabulary=61):
    """Three rows of other lengths, padded behind by the collator of a run."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, vocabulary, (length,), generator=draw).tolist() for length in LENGTHS]
    return LanguageCollator(0)([{"input_ids": each, "labels": each} for each in ids])


def step(model, batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def masks(monkeypatch):
    """How many masks transformers made for torch's fused attention."""
    made = []
    own = transformers.masking_utils.sdpa_mask

    def counted(*args, **kwargs):
        mask = own(*args, **kwargs)
        made.extend([] if mask is None else [mask])
        return mask

    known = transformers.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(known, "sdpa", counted)
    return made


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SEEING])
def test_each_family_has_the_losses_and_gradients_of_the_mask(family, masks):
    model, batch = made(family).double(), rows()
    model.set_experts_implementation("eager")  # whose products know float64
    loss, gradients = step(model, batch)
    before = len(masks)
    done = padding.apply(config(), built_of(SimpleNamespace(model=model)))
    ours, found = step(model, batch)
    # A layer that sees a window only has a mask of its own where rows are longer than the window.
    assert len(masks) == before
    assert ours == pytest.approx(loss, rel=1e-12)
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12)
    assert (done.entry()["feature"], done.effective, done.count) == ("padding", "no mask", 1)


def test_nothing_is_asked_of_a_card_about_rows_that_begin_at_nought(monkeypatch):
    """transformers asks in each forward pass whether positions belong to several documents; those of rows alone never do."""
    asked = []
    own = transformers.masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        transformers.masking_utils, "find_packed_sequence_indices", lambda *args: asked.append(args) or own(*args)
    )
    model, batch = made("qwen3").double(), rows()
    step(model, batch)
    assert not asked  # by the mask that is there
    done = padding.apply(config(), built_of(SimpleNamespace(model=model)))
    step(model, batch)
    assert not asked
    model.base_model.register_forward_pre_hook(
        lambda _, args, given: (args, {**given, "attention_mask": None}), with_kwargs=True
    )
    step(model, batch)
    assert asked  # without a mask and without word of it
    done.undo()


def test_the_mask_is_there_without_it_and_again_when_taken_back(masks):
    model, batch = tiny_model().double(), rows()
    step(model, batch)
    assert len(masks) == 1
    done = padding.apply(config(), built_of(SimpleNamespace(model=model)))
    step(model, batch)
    assert len(masks) == 1
    done.undo()
    step(model, batch)
    assert len(masks) == 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reference_and_a_model_with_adapters_go_the_same_way(masks, checkpointing):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    policy, reference, batch = get_peft_model(tiny_model(), lora), tiny_model().eval(), rows()
    if checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy.enable_input_require_grads()
    done = padding.apply(
        config("dpo"), built_of(SimpleNamespace(model=policy, model_wrapped=policy, ref_model=reference))
    )
    assert done.count == 2
    loss, gradients = step(policy.train(), batch)
    with torch.no_grad():
        assert reference(**batch, use_cache=False).loss.item() == loss
    assert any(gradient.any() for gradient in gradients.values())
    assert not masks


def test_rows_padded_in_front_and_sampling_keep_their_mask(masks):
    model = tiny_model().double().eval()
    ids, mask = torch.arange(1, 13).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        plain = [model(ids, attention_mask=mask).logits, model.generate(ids, attention_mask=mask, max_new_tokens=4)]
        made = len(masks)
        padding.apply(config(), built_of(SimpleNamespace(model=model)))
        again = [model(ids, attention_mask=mask).logits, model.generate(ids, attention_mask=mask, max_new_tokens=4)]
    assert made
    assert len(masks) == 2 * made
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def row_of(rows, draw):
    """A prepared row of a method's shape, of any length."""

    def ids(most=9):
        return torch.randint(1, 61, (int(torch.randint(1, most, (), generator=draw)),), generator=draw).tolist()

    text = ids()
    more = {
        "pairs": {"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()},
        "rated": {"prompt_ids": ids(), "completion_ids": ids(), "label": bool(len(text) % 2)},
        "texts": {"anchor_ids": ids(), "positive_ids": ids(), "negative_ids": ids()[2:], "score": 0.5},
        "distill": {"teacher_tokens": text, "teacher_logps": [-1.0] * len(text), "top_k": 1},
    }
    return {"input_ids": text, "labels": text, **more.get(rows, {})}


@pytest.mark.parametrize("kind", [kind for kind, method in METHODS.items() if method.rows != "prompts"])
def test_every_batch_of_every_method_that_has_a_mask_is_padded_behind(kind):
    """So that on a card, which is asked at the first batch alone, no later one is another."""
    told = read({"method": {"kind": kind}}).config
    collate = collator_for(told, SimpleNamespace(pad_token_id=0, eos_token_id=0))
    draw = torch.Generator().manual_seed(0)
    padded_rows = 0
    for count in range(1, 40):
        batch = collate([row_of(METHODS[kind].rows, draw) for _ in range(1 + count % 7)])
        masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
        assert masks
        for mask in masks:
            assert (mask[:, 1:] <= mask[:, :-1]).all()
            assert mask[:, 0].all()
            padded_rows += int((mask == 0).any(1).sum())
    assert padded_rows > 40


def test_what_is_padded_in_front_looks_both_ways_or_sees_is_left_alone():
    told = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 61,
    }
    both_ways = transformers.BertModel(transformers.BertConfig(**told))
    several = [(kind, tiny_model()) for kind in ("grpo", "gdpo", "ppo")]
    for kind, model in [*several, ("embedding", both_ways), ("sft", made("qwen3_vl"))]:
        assert padding.apply(config(kind), built_of(SimpleNamespace(model=model))) is None


def test_packs_of_separate_documents_are_not_told_to_have_lost_a_mask():
    for columns, told in ((["input_ids", "seq_lengths"], False), (["input_ids", "documents"], True)):
        packs = SimpleNamespace(column_names=columns)
        done = padding.apply(config(), built_of(SimpleNamespace(model=tiny_model(), train_dataset=packs)))
        assert (done is not None) is told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_the_gpu_gradients_are_as_near_to_float32_as_those_of_the_mask(compiled, masks):
    shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    batch = {key: value.cuda() for key, value in rows().items()}
    truth = step(tiny_model(**shape).to("cuda"), batch)
    model = tiny_model(**shape).to("cuda", torch.bfloat16)
    plain = step(model, batch)
    before = len(masks)
    padding.apply(config(), built_of(SimpleNamespace(model=model)))
    if compiled:
        torch.compiler.reset()
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    ours = step(model, batch)
    assert len(masks) == before

    def error(found):
        return torch.stack([(found[1][name].float() - right).norm() for name, right in truth[1].items()]).norm()

    assert ours[0] == pytest.approx(truth[0], rel=1e-2)
    assert error(ours) <= 2 * error(plain)
