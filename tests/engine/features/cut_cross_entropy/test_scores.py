"""A model whose own scores are not those of the fused head is refused before the first step; all others pass untouched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from engine.errors import ModelError
from engine.features.cut_cross_entropy import scores
from engine.features.sequence import Features
from engine.rules import read
from tests.engine.features.conftest import built_of, tiny_model
from tests.engine.features.families import FAMILIES, PLAIN, SHAPE, made


def fused(model, **more):
    add_fused_lm_head(model, **more)
    return SimpleNamespace(model=model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_that_is_served_makes_its_scores_so(family, dtype):
    model = made(family).to(dtype)
    for weight in model.get_output_embeddings().parameters():
        torch.nn.init.normal_(weight)
    trainer = fused(model, temperature=0.7)
    before, random = [set(vars(module)) for module in model.modules()], torch.get_rng_state()
    assert scores.relative_error(model) < (1e-6 if dtype == torch.float32 else 1e-2)
    scores.refuse_other_scores(built_of(trainer))
    assert [set(vars(module)) for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("kind", "told", "differs"),
    [
        ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {"lru_width": 32, "rope_parameters": PLAIN}),
        ("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", {"bos_token_id": 1, "eos_token_id": 2}),
    ],
    ids=["a cap by another name", "a norm before the matrix"],
)
def test_a_model_with_more_around_its_matrix_is_refused_before_the_first_step(tmp_path, kind, told, differs):
    model = getattr(transformers, kind)(getattr(transformers, told)(**SHAPE, **differs))
    trainer = fused(model)
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(ModelError, match=rf"model.name: {kind} makes its scores by more than one matrix"):
        Features(read({}).config).apply(built_of(trainer, tmp_path))
    assert [set(vars(module)) for module in model.modules()] == before


def test_a_cap_and_a_scale_that_the_head_does_not_know_are_found_out_under_an_adapter_too():
    model = tiny_model()
    add_fused_lm_head(model)
    trainer = SimpleNamespace(model=get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])))
    scores.refuse_other_scores(built_of(trainer))
    plain = model.lm_head.forward
    for changed in (lambda x: 30 * torch.tanh(plain(x) / 30), lambda x: plain(x) * 1.5, lambda x: plain(x).roll(1, -1)):
        model.lm_head.forward = changed
        with pytest.raises(ModelError, match="more than one matrix"):
            scores.refuse_other_scores(built_of(trainer))


def test_a_model_without_a_backbone_of_its_own_is_refused_and_one_that_calls_part_of_it_is_taken_as_it_comes():
    alone = fused(tiny_model())
    alone.model.base_model_prefix = "none"
    with pytest.raises(ModelError, match="does not tell its layers from its head"):
        scores.refuse_other_scores(built_of(alone))
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=61, word_embed_proj_dim=32
        )
    )  # fmt: skip
    scores.refuse_other_scores(built_of(fused(opt)))
    assert scores.relative_error(opt) is None


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_a_head_that_is_nothing_yet_or_broken_tells_nothing(weight):
    model = tiny_model()
    torch.nn.init.constant_(model.get_output_embeddings().weight, weight)
    assert scores.relative_error(fused(model).model) is None
