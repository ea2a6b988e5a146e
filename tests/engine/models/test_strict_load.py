"""A folder that lacks weights, or holds some of another shape, is refused; a new head is new."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models.strict_load import load_strictly

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def saved(tmp_path: Path):
    """`saved(class, type, **config)` is a folder of such a model."""

    def save(loader: str, kind: str, **more: object) -> str:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **SIZES, **more)
        getattr(transformers, loader).from_config(config).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def load(loader: str, source: str, head: str, **more: object):
    import transformers

    return load_strictly(getattr(transformers, loader), source, head, **more)


def test_a_folder_without_the_head_that_writes_is_no_language_model(saved) -> None:
    folder = saved("AutoModel", "llama", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"holds no lm_head\.weight, so it would start from random numbers"):
        load("AutoModelForCausalLM", folder, "vocabulary")
    load("AutoModel", folder, "none")


def test_a_head_that_is_tied_to_the_embeddings_is_not_missing(saved) -> None:
    load("AutoModelForCausalLM", saved("AutoModel", "llama", tie_word_embeddings=True), "vocabulary")


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_new_head_of_scores_is_new(saved, kind: str) -> None:
    load("AutoModelForSequenceClassification", saved("AutoModelForCausalLM", kind), "score", num_labels=1)


def test_an_encoder_without_its_pooler_gives_vectors_and_one_without_a_layer_does_not(saved, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved("AutoModelForMaskedLM", "bert")
    load("AutoModel", folder, "none")
    file = Path(folder) / "model.safetensors"
    weights = {name: each for name, each in load_file(file).items() if "attention.self.query" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"holds no .*attention\.self\.query\.bias \(and 1 more\)"):
        load("AutoModel", folder, "none")
    with pytest.raises(ModelError, match=r"attention\.self\.query\.bias \(and 1 more\)"):
        load("AutoModelForTokenClassification", folder, "steps", num_labels=2)


def test_a_head_of_another_size_is_named_with_both_shapes(saved) -> None:
    folder = saved("AutoModelForSequenceClassification", "llama", num_labels=3)
    with pytest.raises(ModelError, match=r"score\.weight in .* has the shape 3 x 16, and 1 x 16 is wanted\."):
        load("AutoModelForSequenceClassification", folder, "score", num_labels=1)


def test_a_kind_of_model_that_has_no_such_head_is_told_so(saved) -> None:
    from engine.features.load import load_model
    from engine.rules import read

    folder = saved("AutoModelForCausalLM", "gemma3_text", head_dim=8, num_key_value_heads=1)
    config = read({"version": 1, "model": {"name": folder, "dtype": "float32"}, "method": {"kind": "prm"}}).config
    with pytest.raises(ModelError, match="has no AutoModelForTokenClassification for models such as") as caught:
        load_model(config)
    assert caught.value.hint == "Choose another model, or another method."
