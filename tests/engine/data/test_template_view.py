"""A row turn by turn: the tokens of each turn together are the row that training takes, and what a template does wrong is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.plan import plan_of
from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.data.template_view import rendered
from engine.errors import DataError

Write = Callable[..., Path]
Config = Callable[..., Any]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "second"},
    ]
}


def _view(config: Any, tokenizer: Any, text: str | None = None, row: int = 0) -> dict[str, Any]:
    return rendered(plan_of(config, tokenizer, "train"), tokenizer, row, text)


def _said(turn: dict[str, Any], *, trained: bool = False) -> str:
    return "".join(token["text"] for token in turn["tokens"] if token["trained"] or not trained)


def test_turns_together_are_the_row_that_is_trained(write: Write, make_config: Config, minimind: Any) -> None:
    config = make_config(write([CHAT]))
    found = _view(config, minimind)
    # This template writes its system message before the loop over turns.
    assert [turn["role"] for turn in found["turns"]] == ["", "user", "assistant", "user", "assistant"]
    (row,) = prepare(config, minimind).dataset
    tokens = [token for turn in found["turns"] for token in turn["tokens"]]
    assert [token["id"] for token in tokens] == row["input_ids"]
    assert [token["trained"] for token in tokens] == [label != IGNORED for label in row["labels"]]
    assert [_said(turn, trained=True) for turn in found["turns"]] == ["", "", "first<|im_end|>", "", "second<|im_end|>"]
    assert (found["flaws"], found["problem"], found["trained"]) == ([], "", sum(token["trained"] for token in tokens))
    assert found["asked"].startswith("<|im_start|>assistant\n")
    assert _view(config, minimind, CHATML)["asked"] == "<|im_start|>assistant\n"
    assert found["text"] == minimind.chat_template


@pytest.mark.parametrize(
    ("template", "flaw"),
    [
        (CHATML.replace("<|im_end|>", ""), "learns no end token"),
        ("{{ bos_token }}{{ bos_token }}" + CHATML, "begins with two start tokens"),
        (CHATML.replace("in messages", "in messages if m.role != 'system'"), "has a system message that"),
        (CHATML.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>{% endif"), "goes on otherwise than"),
    ],
)
def test_what_a_template_does_wrong_is_told_of_the_row(
    write: Write, make_config: Config, minimind: Any, template: str, flaw: str
) -> None:
    config = make_config(write([CHAT]))
    assert not _view(config, minimind, CHATML)["flaws"]
    (told,) = _view(config, minimind, template)["flaws"]
    assert told.startswith(f"This row {flaw}")


def test_a_template_that_cannot_write_the_row_says_why(write: Write, make_config: Config, minimind: Any) -> None:
    config = make_config(write([CHAT, {"messages": [{"role": "user", "content": "x"}]}]))
    assert "is not a valid template" in _view(config, minimind, "{% for %}")["problem"]
    refusing = "{{ raise_exception('no system here') }}"
    assert "no system here" in _view(config, minimind, refusing)["problem"]
    assert not _view(config, minimind, row=1)["problem"]
    with pytest.raises(DataError, match="there is no row 2"):
        _view(config, minimind, row=2)


def test_pairs_are_shown_with_their_better_answer_and_text_has_no_turns(
    write: Write, make_config: Config, minimind: Any
) -> None:
    pair = {"prompt": "one?", "chosen": "good", "rejected": "bad"}
    found = _view(make_config(write([pair], "pairs.jsonl"), method="dpo"), minimind)
    assert [(turn["role"], _said(turn, trained=True)) for turn in found["turns"]][-2:] == [
        ("user", ""),
        ("assistant", "good<|im_end|>"),
    ]
    text = _view(make_config(write([{"text": "a page"}], "text.jsonl"), method="pretrain"), minimind)
    assert "no chat template writes it" in text["problem"]
