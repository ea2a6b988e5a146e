"""`builtin/tiny-vl`: a small vision-language model made from a config, with its own tokenizer and processor.

Idefics3's architecture with its real processor on Pillow, at the size of `builtin/shapes`: a picture of 32 x 32 pixels is
four tokens, a quarter of it each. Written into the cache as `builtin/tiny` is.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.builtin import shapes, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "builtin/tiny-vl"
SEED = 0
VOCABULARY = 400
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
"""The language model, a Llama; wide first weights for the reason of `builtin/tiny`. The customary rotary periods: a question finds
its shape by what it is, wherever the token of its picture stands."""
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": shapes.SIDE,
    "patch_size": shapes.SIDE // 2,
    "initializer_range": 0.1,
}
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
IMAGE_TOKENS = (VISION["image_size"] // VISION["patch_size"]) ** 2
CHAT_TEMPLATE = tiny.CHAT_TEMPLATE.replace(
    "{%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}",
    "{%- for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}",
)


def folder() -> Path:
    """The model's folder in the cache, made on first use. Raises `ModelError` where the cache cannot be written."""
    recipe = {
        "shape": SHAPE,
        "vision": VISION,
        "seed": SEED,
        "template": CHAT_TEMPLATE,
        "texts": hashlib.sha256("\0".join(_texts()).encode()).hexdigest(),
        "transformers": importlib.metadata.version("transformers"),
    }
    return tiny.cached_folder("tiny-vl", recipe, _write, NAME)


def _write(target: Path) -> None:
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    tokenizer = _tokenizer()
    side = {"longest_edge": shapes.SIDE}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=CHAT_TEMPLATE)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = Idefics3Config(
        vision_config=VISION,
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "tie_word_embeddings": True,
            **SHAPE,
            **ids,
        },
        scale_factor=1,
        image_token_id=tokenizer.vocab[IMAGE],
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        model = Idefics3ForConditionalGeneration(config).float()
    tiny.save_model(model, target, ids)
    processor.save_pretrained(target)


@functools.cache
def _tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE, merged by the words of the questions and answers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = (tiny.PAD, tiny.START, tiny.END, IMAGE, AROUND, WHOLE)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=tiny.PAD,
        eos_token=tiny.END,
        additional_special_tokens=[tiny.START, IMAGE, AROUND, WHOLE],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=SHAPE["max_position_embeddings"],
    )


def _texts() -> Iterator[str]:
    for _ in range(100):
        for shape in shapes.SHAPES:
            yield from (question.format(shape) for question in shapes.QUESTIONS)
        yield from shapes.COLOURS
        yield from (f"{role}\n" for role in ("system", "user", "assistant", "tool"))
