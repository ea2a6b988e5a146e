"""Answers sampled with a static cache: the same ones, from one recorded pass on a GPU, and nothing left on the model."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from engine.config.tree import fields
from engine.features.built import base_model
from engine.run.store import RunFolder
from engine.trainers import recorded_tokens
from engine.trainers.recorded_tokens import sampling_recorded
from tests.caches import own_cache
from tests.engine.trainers.building import Built
from tests.engine.trainers.test_grpo import GRPO, LORA, ROWS
from tests.engine.trainers.test_shared_prompts import ONE_BATCH

STATIC = {"method.cache_implementation": "static"}


@pytest.mark.parametrize(
    ("adapter", "first"), [(LORA, 256), ({}, 256), (LORA, 2)], ids=["lora", "full", "room that is doubled"]
)
def test_the_same_answers_are_sampled_in_room_for_the_longest(tmp_path, monkeypatch, adapter, first):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    monkeypatch.setattr(recorded_tokens, "FIRST", first)
    monkeypatch.setattr(recorded_tokens, "TILE", 4)
    built = Built({**GRPO, **ONE_BATCH, **STATIC, **adapter}, ROWS, tmp_path)
    trainer = built.trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.model.train()
    assert "answers are sampled with a static cache" in trainer.receipt_note()
    prompts = [list(row["prompt_ids"]) for row in built.rows for _ in range(4)]
    kept = set(vars(base_model(trainer.model))), set(vars(trainer.model))
    made = []
    init = recorded_tokens.RecordedPass.__init__
    monkeypatch.setattr(
        recorded_tokens.RecordedPass, "__init__", lambda self, *of: (made.append(self), init(self, *of))[1]
    )
    found = {}
    for shares in (True, False):
        for why in ("", "not now"):
            trainer.shares_prompts, trainer.not_recorded = shares, why
            torch.manual_seed(5)
            found[shares, why] = trainer._generate_single_turn(prompts, None, {}, 4)[0]
    trainer.rewards.close()
    assert found[True, ""] == found[True, "not now"]
    assert found[False, ""] == found[False, "not now"]
    assert len({tuple(answer) for answer in found[True, ""]}) > 8
    assert len(made) == 2
    assert all(each.calls > 4 for each in made), "tokens went through the pass that a GPU records"
    longest = max(map(len, prompts)) + trainer.max_completion_length
    assert all(each.room.places < longest + 4 for each in made), "no more room than the longest answer takes"
    if first == 2:
        assert all(each.room.places > max(map(len, prompts)) + 2 + 4 for each in made)
    assert kept == (set(vars(base_model(trainer.model))), set(vars(trainer.model)))


def test_what_has_no_static_cache_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**GRPO, **ONE_BATCH, "method.cache_implementation": "dynamic"}, ROWS, tmp_path)
    trainer, model = built.trainer, base_model(built.model)
    trainer.rewards.close()
    assert "as keys and values grow: method.cache_implementation is dynamic" in trainer.receipt_note()
    asked = built.config.with_values({fields.method.cache_implementation: "static"})
    assert recorded_tokens.refused(asked, model, whole=True) == ""
    assert "not all on this device" in recorded_tokens.refused(asked, model, whole=False)
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    assert "flash_attention_2" in recorded_tokens.refused(asked, model, whole=True)
    monkeypatch.setattr(model.config, "num_experts", 8, raising=False)
    assert "experts" in recorded_tokens.refused(asked, model, whole=True)


def test_generate_asks_the_model_for_its_compiled_pass() -> None:
    """What is put on an instance: transformers' `generate` reads both names, and takes the second's answer for each token."""
    sample = inspect.getsource(GenerationMixin._sample)
    assert "self._valid_auto_compile_criteria(model_kwargs, generation_config)" in sample
    assert "self.get_compiled_call(generation_config.compile_config)" in sample
    assert callable(PreTrainedModel.get_compiled_call)


def small(device: str) -> tuple[Qwen3ForCausalLM, dict[str, Any]]:
    """A model, and what it is asked to go on with."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape).to(device, torch.float32).eval()
    ids = torch.randint(2, 512, (4, 20), device=device)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return model, {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": 40,
        "do_sample": False,
        "pad_token_id": 0,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("first", [256, 8])
def test_on_a_gpu_tokens_are_replayed_and_are_those_of_the_plain_pass(first, monkeypatch) -> None:
    monkeypatch.setattr(recorded_tokens, "FIRST", first)
    monkeypatch.setattr(recorded_tokens, "TILE", 8)
    model, asked = small("cuda")
    plain = model.generate(**asked)
    with sampling_recorded(model, model, 40) as passes:
        ours, again = model.generate(**asked), model.generate(**asked)
    assert passes[0].reason == ""
    assert passes[0].replayed > 30
    assert ours.tolist() == plain.tolist() == again.tolist()
    with torch.no_grad():
        model.lm_head.weight.copy_(-model.lm_head.weight)  # weights that moved are read where they lie
    with sampling_recorded(model, model, 40):
        assert model.generate(**asked).tolist() == model.generate(**asked).tolist() != ours.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_pass_that_asks_the_host_is_computed_as_before() -> None:
    model, asked = small("cuda")
    plain = model.generate(**asked)
    model.model.layers[1].register_forward_hook(lambda layer, args, out: float(out.sum()) and None)
    with sampling_recorded(model, model, 40) as passes:
        ours = model.generate(**asked)
    assert passes[0].reason
    assert passes[0].replayed == 0
    assert ours.tolist() == plain.tolist()
    # Neither chances nor other recordings are hurt by one that failed.
    torch.manual_seed(3)
    torch.rand(4, device="cuda")
    fresh, asked = small("cuda")
    with sampling_recorded(fresh, fresh, 40) as passes:
        fresh.generate(**{**asked, "do_sample": True})
    assert passes[0].replayed > 30


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_hundred_samplings_hold_no_more_than_forty() -> None:
    """A recording's pool of memory stays with the allocator when the recording is gone, and the next one has a pool of its own."""
    model, asked = small("cuda")
    held = []
    for _ in range(100):
        with sampling_recorded(model, model, 40) as passes:
            model.generate(**asked)
        assert passes[0].replayed > 30
        held.append(torch.cuda.memory_reserved() >> 20)
    print(f"MiB reserved after 1, 2, 31, 32, 40 and 100 samplings: {[held[at - 1] for at in (1, 2, 31, 32, 40, 100)]}")
    assert max(held[40:]) <= max(held[:40]) + 16


def test_recordings_that_are_gone_give_their_memory_back_now_and_then(monkeypatch) -> None:
    """Counted on a CPU, where none is made: how often the allocator is told to let go of what it keeps."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(emptied)))
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    recorded_tokens.recorder_of.cache_clear()
    for number in range(2 * recorded_tokens.RELEASED):
        one = recorded_tokens.RecordedPass(lambda **inputs: None, None)
        one.graph = object()
        one.let_go()
        one.let_go()
        assert (one.graph, len(emptied)) == (None, (number + 1) // recorded_tokens.RELEASED)
    recorded_tokens.recorder_of.cache_clear()
