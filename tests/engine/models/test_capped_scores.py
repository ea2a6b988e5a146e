"""A model that caps its attention's scores computes with the cap, whatever transformers loaded it with."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine.models.capped_scores import keep_capped_scores
from engine.rewards.models import _loaded
from tests.engine.features.families import made

CAP = 0.01


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_capped_scores_are_not_left_to_torchs_fused_attention(family):
    capped = family == "gemma2"
    model = made(family, **({"attn_logit_softcapping": CAP} if capped else {})).eval()
    ids = torch.arange(1, 9)[None]
    model.set_attn_implementation("eager")
    wanted = model(ids).logits
    model.config._attn_implementation = "sdpa"  # as 5.17 loads it
    assert keep_capped_scores(model) == capped
    assert model.config._attn_implementation == ("eager" if capped else "sdpa")
    torch.testing.assert_close(model(ids).logits, wanted)


def test_a_reward_model_keeps_its_cap(tmp_path):
    family = made("gemma2", attn_logit_softcapping=CAP)
    family.config.num_labels = 1
    AutoModelForSequenceClassification.from_config(family.config).save_pretrained(tmp_path)
    model, has_head = _loaded(str(tmp_path), None)
    assert has_head
    assert model.config._attn_implementation == "eager"
