"""A prompt alone as ids: what an answer can follow."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from engine.data.prepare import prepare


def test_a_prompt_leaves_out_the_end_that_its_tokenizer_adds(
    write: Callable[..., Path], make_config: Callable[..., Any], gpt2: Any
) -> None:
    closing = deepcopy(gpt2)
    end = (closing.eos_token, closing.eos_token_id)
    closing.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    assert closing("Two and two")["input_ids"] == [*gpt2("Two and two")["input_ids"], end[1]]
    path = write([{"prompt": "Two and two", "answer": "4"}, {"prompt": "Three", "answer": "3"}])
    found = prepare(make_config(path, method="grpo"), closing).dataset
    assert [row["prompt_ids"] for row in found] == [gpt2(text)["input_ids"] for text in ("Two and two", "Three")]
