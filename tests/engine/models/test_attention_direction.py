"""Encoders do not write, and the first token of a causal model is no vector of its text."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ModelError
from engine.models.attention_direction import is_bidirectional, is_causal_lm, refuse_the_wrong_direction
from engine.rules import read

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def model_of(kind: str, **more: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{**SIZES, **more}))


def config_of(**method: Any) -> Any:
    return read({"version": 1, "model": {"name": "builtin/tiny"}, "method": method}).config


@pytest.mark.parametrize(
    ("kind", "more", "back", "both"),
    [
        ("bert", {}, False, True),
        ("bert", {"is_decoder": True}, True, False),
        ("roberta", {}, False, True),
        ("llama", {}, True, False),
        ("mamba", {}, False, False),
    ],
)
def test_the_direction_is_read_off_the_attention(kind: str, more: dict[str, Any], back: bool, both: bool) -> None:
    model = model_of(kind, **more)
    assert (is_causal_lm(model), is_bidirectional(model)) == (back, both)


def test_a_model_whose_layers_differ_looks_neither_way_alone() -> None:
    model = model_of("llama", num_hidden_layers=2)
    model.model.layers[1].self_attn.is_causal = False
    assert (is_causal_lm(model), is_bidirectional(model)) == (False, False)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "ppo", "distill", "pretrain"])
def test_an_encoder_that_is_to_write_is_refused_before_training(method: str) -> None:
    with pytest.raises(ModelError, match=rf"left to right for {method}; got builtin/tiny \(bert\)") as caught:
        refuse_the_wrong_direction(config_of(kind=method), model_of("bert"))
    assert "embedding, reward or prm" in caught.value.hint
    refuse_the_wrong_direction(config_of(kind=method), model_of("llama"))


def test_the_first_token_stands_for_a_text_only_where_it_has_seen_it() -> None:
    first = config_of(kind="embedding", pooling="first")
    refuse_the_wrong_direction(first, model_of("bert"))
    with pytest.raises(ModelError, match=r"method\.pooling: must be mean or last .*; got first"):
        refuse_the_wrong_direction(first, model_of("llama"))
    refuse_the_wrong_direction(config_of(kind="embedding", pooling="last"), model_of("llama"))
    refuse_the_wrong_direction(config_of(kind="reward"), model_of("bert"))
