"""Packs lose nothing, are nearly full, always the same, and do not let documents see each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.packing import best_fit


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), max_size=120), capacity=st.integers(64, 256))
def test_each_document_is_in_one_pack_and_no_pack_is_over(lengths: list[int], capacity: int) -> None:
    packs = best_fit(lengths, capacity)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= capacity for pack in packs)
    assert best_fit(lengths, capacity) == packs
    # Best-fit decreasing never leaves two packs that would fit into one.
    sums = sorted(sum(lengths[index] for index in pack) for pack in packs)
    assert len(sums) < 2 or sums[0] + sums[1] > capacity


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packs_are_as_few_as_the_guarantee_of_best_fit_decreasing(lengths: list[int]) -> None:
    least = -(-sum(lengths) // 100)
    assert len(best_fit(lengths, 100)) <= max(1, 11 * least // 9 + 2)


def test_a_document_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 9 tokens and a pack holds 8"):
        best_fit([3, 9], 8)


def test_a_hundred_thousand_documents_take_about_a_second() -> None:
    import random
    import time

    draw = random.Random(0)
    lengths = [draw.randrange(1, 2048) for _ in range(100_000)]
    before = time.process_time()
    packs = best_fit(lengths, 2048)
    assert time.process_time() - before < 3
    assert sum(lengths) / (len(packs) * 2048) > 0.99


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config).eval()


def _pack(*documents: list[int], separate: bool = True) -> dict[str, Any]:
    ids = [token for document in documents for token in document]
    row: dict[str, Any] = {"input_ids": ids, "labels": list(ids)}
    return row | ({"seq_lengths": [len(document) for document in documents]} if separate else {})


A, CHANGED, B, C = [5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [21, 22, 23, 24], [31, 32, 33]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_token_attends_to_another_document(model: Any, attention: str) -> None:
    import torch

    from engine.data.collate import LanguageCollator

    model.set_attn_implementation(attention)
    collate = LanguageCollator(0)
    with torch.no_grad():
        # Two packs of different lengths, so that padding is there too.
        one = model(**_inputs(collate([_pack(A, B, C), _pack(B, A)]))).logits
        two = model(**_inputs(collate([_pack(CHANGED, B, C), _pack(B, CHANGED)]))).logits
        alone = model(input_ids=torch.tensor([B])).logits
    assert torch.equal(one[0, 5:], two[0, 5:])
    assert torch.equal(one[1, :4], two[1, :4])
    assert not torch.equal(one[0, :5], two[0, :5])
    torch.testing.assert_close(one[0, 5:9], alone[0], atol=1e-5, rtol=1e-5)


def test_without_the_setting_documents_do_see_each_other(model: Any) -> None:
    import torch

    from engine.data.collate import LanguageCollator

    collate = LanguageCollator(0)
    with torch.no_grad():
        one = model(**_inputs(collate([_pack(A, B, separate=False)]))).logits
        two = model(**_inputs(collate([_pack(CHANGED, B, separate=False)]))).logits
    assert not torch.equal(one[0, 5:], two[0, 5:])


def test_the_loss_of_a_pack_is_that_of_its_documents(model: Any) -> None:
    import torch

    from engine.data.collate import LanguageCollator

    collate = LanguageCollator(0)
    with torch.no_grad():
        packed = model(**collate([_pack(A, B, C)])).loss
        apart = model(**collate([_pack(each, separate=False) for each in (A, B, C)])).loss
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def _inputs(batch: Any) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def test_batches_are_padded_on_the_right_and_padding_is_never_trained() -> None:
    from engine.data.collate import LanguageCollator, PreferenceCollator

    batch = LanguageCollator(9)([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    pair = PreferenceCollator(9)([{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}])
    assert pair["input_ids"].tolist() == [[1, 2, 3, 9], [1, 2, 4, 5]]
    assert pair["completion_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert pair["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_collators_give_what_the_libraries_own_ones_give() -> None:
    import torch
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from engine.data.collate import LanguageCollator, PreferenceCollator

    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    pairs = [
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6]},
        {"prompt_ids": [7], "chosen_ids": [8], "rejected_ids": [9, 10]},
    ]
    for ours, theirs, given_rows in (
        (LanguageCollator(0), DataCollatorForLanguageModeling(0), rows),
        (PreferenceCollator(0), DataCollatorForPreference(0), pairs),
    ):
        one, two = ours(given_rows), theirs(given_rows)
        assert set(one) == set(two)
        assert all(torch.equal(one[name], two[name]) for name in one)
    packs = [_pack(A, B), _pack(C)]
    flat = DataCollatorForLanguageModeling(0, padding_free=True)([_pack(A, B)])
    ours_flat = LanguageCollator(0)(packs[:1])
    assert torch.equal(ours_flat["position_ids"], flat["position_ids"])
    assert torch.equal(ours_flat["labels"], flat["labels"])
