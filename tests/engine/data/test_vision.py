"""A vision-language model built from a config walks the data API once: pictures stay references until the batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.collate import collator_for
from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.data.preview import preview
from engine.errors import DataError

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def processor(shared_data: Path) -> Any:
    from transformers import AutoTokenizer, CLIPImageProcessorPil, LlavaProcessor

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers/minimind")
    images = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<|image_pad|>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def model(processor: Any) -> Any:
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**small, image_size=56, patch_size=14),
        text_config=LlamaConfig(**small, vocab_size=len(processor.tokenizer)),
        image_token_index=processor.image_token_id,
    )
    return LlavaForConditionalGeneration(config)


def _rows(shared_data: Path) -> list[dict[str, Any]]:
    folder = shared_data / "scikit-image"
    lines = (folder / "chat_image_text.jsonl").read_text("utf-8").splitlines()[:3]
    rows = [json.loads(line) for line in lines]
    return [{**row, "images": [str(folder / image) for image in row["images"]]} for row in rows]


def test_pictures_walk_from_references_to_a_loss(
    shared_data: Path, write: Callable[..., Path], make_config: Callable[..., Any], processor: Any, model: Any
) -> None:
    rows = _rows(shared_data)
    config = make_config(write(rows))
    prepared = prepare(config, processor)
    assert [row["images"] for row in prepared.dataset] == [row["images"] for row in rows]
    token = processor.image_token_id
    for row, source in zip(prepared.dataset, rows, strict=True):
        spots = [place for place, each in enumerate(row["input_ids"]) if each == token]
        assert len(spots) == 16
        assert all(row["labels"][place] == IGNORED for place in spots)
        answer = next(message["content"] for message in source["messages"] if message["role"] == "assistant")
        trained = processor.tokenizer.decode([label for label in row["labels"] if label != IGNORED])
        assert trained == answer + "<|im_end|>"
    batch = collator_for(config, processor)(list(prepared.dataset))
    assert tuple(batch["pixel_values"].shape) == (3, 3, 56, 56)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() > 0

    shown = preview(config, processor, {"kind": "index", "index": 1})["rows"][0]
    assert shown["images"] == rows[1]["images"]
    assert len(shown["parts"]["input"]) == len(prepared.dataset[1]["input_ids"])


def test_a_missing_picture_and_a_missing_place_are_named(
    shared_data: Path, write: Callable[..., Path], make_config: Callable[..., Any], processor: Any, minimind: Any
) -> None:
    rows = _rows(shared_data)
    gone = {**rows[1], "images": ["/nowhere/cat.png"]}
    with pytest.raises(DataError, match=r"rows\.jsonl:2: row 1: /nowhere/cat\.png: no picture can be read"):
        prepare(make_config(write([rows[0], gone])), processor)
    twice = {**rows[0], "images": rows[0]["images"] * 2}
    with pytest.raises(DataError, match="the text has 1 places for pictures and the row names 2"):
        prepare(make_config(write([twice])), processor)
    with pytest.raises(DataError, match="this model has no processor for them"):
        prepare(make_config(write(rows), model={"chat_template": str(write(TEMPLATE, "vl.jinja"))}), minimind)
