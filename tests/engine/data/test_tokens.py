"""A prompt alone as ids: what an answer can follow; and the ids that are learned of a text."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from engine.data.chat_masks import token_mask
from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.data.tokens import _learned


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


def test_the_ids_that_are_learned_are_those_of_the_mask_of_all_tokens() -> None:
    """Of tokens in any order of a text: some of no characters, some of one character's bytes, with gaps between them."""
    draw = random.Random(0)
    for _ in range(5000):
        offsets: list[tuple[int, int]] = []
        place = 0
        for _ in range(draw.randint(0, 12)):
            kind = draw.random()
            if kind < 0.15:
                offsets.append((place, place))
            elif kind < 0.3 and offsets and offsets[-1][0] < offsets[-1][1]:
                offsets.append(offsets[-1])
            else:
                place += draw.choice((0, 0, 0, 1))
                offsets.append((place, place + draw.randint(1, 3)))
                place = offsets[-1][1]
        borders = sorted(draw.sample(range(30), 2 * draw.randint(0, 3)))
        spans = list(zip(borders[::2], borders[1::2], strict=True))
        ids = list(range(len(offsets)))
        mask = token_mask(offsets, spans)
        assert _learned(ids, offsets, spans) == [each if own else IGNORED for each, own in zip(ids, mask, strict=True)]
