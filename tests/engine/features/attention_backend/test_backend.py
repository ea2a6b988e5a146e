"""A model is loaded with the attention that was asked for, or with torch's own and the reason, which the receipt tells."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.features.attention_backend import EAGER_ALONE
from engine.features.load import load
from engine.models.load import Loaded
from engine.planning.auto import resolved
from engine.rules import read
from engine.trainers.receipt import _attention
from tests.caches import own_cache
from tests.engine.features.families import made


def config(attention, name="builtin/tiny", method="sft"):
    return resolved(
        read(
            {
                "model": {"name": name, "dtype": "bfloat16", "attention": attention},
                "method": {"kind": method},
                "data": {"train": [{"path": "rows.jsonl"}]},
            }
        ).config
    )


def told(given, loaded: Loaded):
    return _attention(given, loaded.model, loaded.attention_reason)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_4"])
def test_a_package_that_is_not_here_leaves_torchs_own_and_the_receipt_says_why(tmp_path, monkeypatch, name):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path))
    monkeypatch.setattr("engine.features.attention_backend.backend.installed", lambda package: None)
    given = config(name)
    loaded = load(given)
    entry = told(given, loaded)
    assert (entry["requested"], entry["effective"]) == (name, "sdpa")
    package = {"flash_attention_2": "flash-attn", "flash_attention_4": "flash-attn-4"}[name]
    assert entry["detail"] == f"{name} does not serve here: the package {package} is not installed"
    assert loaded.model(torch.arange(6)[None]).logits.isfinite().all()


def test_what_serves_is_in_force_without_a_word(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path))
    for name in ("flex_attention", "eager"):
        given = config(name)
        assert told(given, load(given)) == {
            "feature": "attention", "requested": name, "effective": name, "count": None, "detail": "",
        }  # fmt: skip


@pytest.mark.parametrize("kind", sorted(EAGER_ALONE))
def test_transformers_has_no_fused_attention_for_the_models_that_auto_gives_eager(kind):
    served = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    # 5.17 says that it has one for capped scores too, and leaves the cap out: the next test shows what is taken there.
    assert not served._supports_sdpa or served.config_class().attn_logit_softcapping


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_a_model_without_fused_attention_is_loaded_with_eager_and_the_receipt_says_why(tmp_path, method):
    made("gemma2").save_pretrained(tmp_path)
    given = config("sdpa", name=str(tmp_path), method=method)
    loaded = load(given)
    entry = told(given, loaded)
    assert (entry["requested"], entry["effective"]) == ("sdpa", "eager")
    assert entry["detail"] == f"sdpa does not serve here: transformers has none for {type(loaded.model).__name__}"
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.model(torch.arange(1, 7)[None]).logits.isfinite().all()


def test_a_card_whose_cudnn_fails_under_masks_has_them_kept_whole_and_the_receipt_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path))
    monkeypatch.setattr("engine.features.load.at_stake", lambda model, device: True)
    given = config("sdpa")
    loaded = load(given)
    entry = told(given, loaded)
    assert (entry["requested"], entry["effective"]) == ("sdpa", "sdpa_whole_tiles")
    assert "cuDNN before 9.26" in entry["detail"]
    assert loaded.model(torch.arange(64)[None]).logits.isfinite().all()
