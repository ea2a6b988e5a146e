"""What FP8 changes is told: of the weights at once, of one layer's output on the first batch, and nothing of the run moves."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.features.fp8_base.apply import apply, summary
from engine.features.fp8_base.layers import compute_in_fp8
from tests.engine.features.conftest import built_of

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
}  # fmt: skip


class Written:
    def __init__(self) -> None:
        self.entries: list[dict] = []

    def write(self, kind, entries):
        assert kind == "receipt"
        self.entries += entries


@pytest.fixture
def trainer():
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).bfloat16()
    model = copy.deepcopy(plain)
    computed = compute_in_fp8(model, least=0)
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    adapted = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    return SimpleNamespace(model=adapted.train(), writer=Written(), plain=plain, computed=computed)


def applied(trainer, kind="fp8"):
    return apply(SimpleNamespace(model=SimpleNamespace(quantization=kind)), built_of(trainer))


def step(trainer):
    ids = torch.arange(24).view(2, 12)
    return trainer.model(input_ids=ids, labels=ids, use_cache=False).loss


def test_the_first_batch_is_measured_once_and_changes_nothing(trainer):
    layer = trainer.model.get_base_model().model.layers[0]
    modes = {name: module.training for name, module in layer.named_modules()}
    torch.manual_seed(1)
    without = step(trainer)
    undo = applied(trainer).undo
    torch.manual_seed(1)
    assert torch.equal(step(trainer), without)  # dropout too drew what it would have drawn
    assert {name: module.training for name, module in layer.named_modules()} == modes
    assert not [module for module in layer.modules() if "forward" in vars(module)]
    step(trainer)
    (entry,) = trainer.writer.entries
    assert (entry["feature"], entry["requested"], entry["effective"], entry["count"]) == (
        "quantization", "fp8", "float8_e4m3fn", 14,
    )  # fmt: skip
    told = float(entry["detail"].rpartition("first batch by ")[2].removesuffix("%")) / 100
    truth, taken = trainer.plain.model.layers[0].eval(), trainer.plain.model.embed_tokens(torch.arange(24).view(2, 12))
    angles = trainer.plain.model.rotary_emb(taken, torch.arange(12)[None])
    with torch.no_grad():
        outputs = [each.eval()(taken, position_embeddings=angles) for each in (layer, truth)]
    ours, wanted = (out[0] if isinstance(out, tuple) else out for out in outputs)
    wrong = (ours.double() - wanted.double()).norm() / (wanted.double() - taken.double()).norm()
    assert told == pytest.approx(wrong.item(), abs=1e-4)
    assert 0.01 < told < 0.1
    undo()
    assert layer._compiled_call_impl is None


def test_a_batch_that_is_sampled_is_not_measured(trainer):
    applied(trainer)
    with torch.no_grad():
        trainer.model.generate(input_ids=torch.arange(5)[None], max_new_tokens=2, do_sample=False)
    assert trainer.writer.entries == []
    step(trainer)
    assert len(trainer.writer.entries) == 1


def test_what_is_told_at_once_is_what_was_swapped(trainer):
    entry = applied(trainer).entry()
    assert entry["detail"] == summary(trainer.computed)
    assert "rounding changed the weights by 2.6" in entry["detail"]
    assert applied(trainer, "nf4") is None
