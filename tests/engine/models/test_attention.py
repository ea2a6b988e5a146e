"""A model is loaded with the attention that was asked for, or with torch's own and the reason, which the receipt tells."""

from __future__ import annotations

import pytest
import torch

from engine.config.schema import read, resolved
from engine.models.load import load_model
from engine.trainers.receipt import _attention


def config(attention):
    return resolved(
        read(
            {
                "model": {"name": "builtin/tiny", "dtype": "bfloat16", "attention": attention},
                "data": {"train": [{"path": "rows.jsonl"}]},
            }
        ).config
    )


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_4"])
def test_a_package_that_is_not_here_leaves_torchs_own_and_the_receipt_says_why(tmp_path, monkeypatch, name):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr("engine.models.attention.installed", lambda package: None)
    given = config(name)
    model = load_model(given)
    entry = _attention(given, model)
    assert (entry["requested"], entry["effective"]) == (name, "sdpa")
    package = {"flash_attention_2": "flash-attn", "flash_attention_4": "flash-attn-4"}[name]
    assert entry["detail"] == f"{name} does not serve here: the package {package} is not installed"
    assert model(torch.arange(6)[None]).logits.isfinite().all()


def test_what_serves_is_in_force_without_a_word(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    for name in ("flex_attention", "eager"):
        given = config(name)
        assert _attention(given, load_model(given)) == {
            "feature": "attention", "requested": name, "effective": name, "count": None, "detail": "",
        }  # fmt: skip


def test_a_card_whose_cudnn_fails_under_masks_has_them_kept_whole_and_the_receipt_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr("engine.models.whole_tiles.at_stake", lambda model, device: True)
    given = config("sdpa")
    model = load_model(given)
    entry = _attention(given, model)
    assert (entry["requested"], entry["effective"]) == ("sdpa", "sdpa_whole_tiles")
    assert "cuDNN before 9.26" in entry["detail"]
    assert model(torch.arange(64)[None]).logits.isfinite().all()
