"""A token without weights is named before the first step; one that nobody uses does no harm."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from engine.builtin import tiny
from engine.errors import ModelError
from engine.models.vocabulary import check_of_rows, refuse_tokens_without_weights
from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, lines, source, train  # noqa: F401

ROWS = Dataset.from_list(
    [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "row": 0}, {"input_ids": [4, 5], "labels": [-100, 5], "row": 1}]
)


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The built-in tokenizer of 512 tokens with one more, number 512."""
    from transformers import AutoTokenizer

    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    found = AutoTokenizer.from_pretrained(tiny.folder())
    assert found.add_tokens(["<odd>"]) == 1
    assert found.convert_tokens_to_ids("<odd>") == 512
    return found


def model(size: int) -> Any:
    return SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(size, 4))


def config(*prompts: str, tokenizer: str | None = None) -> Any:
    return SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer), run=SimpleNamespace(prompts=list(prompts)))


def test_a_token_that_is_not_used_does_no_harm(tokenizer: Any) -> None:
    refuse_tokens_without_weights(config("What comes after 7?"), model(512), tokenizer, {"data.train": ROWS})


def test_a_model_with_more_weights_than_tokens_is_not_looked_at_further(tokenizer: Any) -> None:
    refuse_tokens_without_weights(config("<odd>"), model(600), tokenizer, {"data.train": None})


@pytest.mark.parametrize(
    ("row", "number"),
    [
        ({"input_ids": [1, 512], "labels": [1, 512], "row": 7}, 7),
        ({"input_ids": [1, 2], "labels": [-100, 512], "row": 6}, 6),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3, 512], "row": 9}, 9),
        ({"input_ids": [1, 2], "labels": [1, 2], "teacher_tokens": [5, 512], "top_k": 1, "row": 3}, 3),
        ({"input_ids": [1, 512], "labels": [1, 512], "seq_lengths": [1, 1], "rows": [4, 2]}, 4),
    ],
    ids=["language", "labels of their own", "pairs", "a teacher's", "packed"],
)
def test_a_token_without_weights_is_named_with_its_row(tokenizer: Any, row: dict[str, Any], number: int) -> None:
    # beyond the first part that is looked at, behind rows that are as they should be
    good = {name: [1] if isinstance(value, list) else 0 for name, value in row.items()}
    rows = Dataset.from_list([good] * 1001 + [row])
    with pytest.raises(ModelError) as refused:
        refuse_tokens_without_weights(config(), model(512), tokenizer, {"data.train": None, "data.eval": rows})
    said = f"model.name: token 512 (<odd>) in row {number} of data.eval has no weights: the model knows the tokens 0 to 511."
    assert refused.value.message == said
    assert "tokenizer that belongs to the model" in refused.value.hint


def test_a_row_that_has_no_number_is_named_by_its_place(tokenizer: Any) -> None:
    rows = Dataset.from_list([{"input_ids": [1]}] * 1001 + [{"input_ids": [512]}])
    with pytest.raises(ModelError, match=r"token 512 \(<odd>\) in row 1001 of data.train has no weights"):
        refuse_tokens_without_weights(config(), model(512), tokenizer, {"data.train": rows})


def test_a_streams_rows_are_looked_at_as_they_come(tokenizer: Any) -> None:
    check = check_of_rows(config(), model(512), tokenizer)
    assert check is not None
    check([{"input_ids": [1, 511], "labels": [-100, 511], "row": 600}])
    for name in ("input_ids", "labels", "teacher_tokens"):
        with pytest.raises(ModelError, match=r"token 512 \(<odd>\) in a row of data.train has no weights"):
            check([{"row": 0, "input_ids": [1]}, {"row": 1, name: [1, 512]}])
    assert check_of_rows(config(), model(513), tokenizer) is None


def test_padding_and_pinned_prompts_are_looked_at_too(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=r"token 512 \(<odd>\) in run.prompts.1 has no weights"):
        refuse_tokens_without_weights(config("Hello", "An <odd> one"), model(512), tokenizer, {})
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(
        ModelError, match=r"model.tokenizer: token 513 \(<pad>\) which pads every batch, has no weights"
    ):
        refuse_tokens_without_weights(config(tokenizer="here"), model(513), tokenizer, {"data.train": ROWS})


def test_a_run_with_a_tokenizer_of_another_model_ends_before_its_first_step(
    train: Any,  # noqa: F811
    source: Any,  # noqa: F811
    tmp_path: Path,
    shared_data: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder(), folder)
    settings = {"model.name": str(folder), "model.tokenizer": str(shared_data / "tokenizers/minimind")}
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    (failed,) = lines(run, "failed")
    assert failed["cause"] == "error"
    assert failed["message"].startswith("model.tokenizer: token ")
    assert "in row 0 of data.train has no weights: the model knows the tokens 0 to 511." in failed["message"]
    assert not lines(run, "started")
