"""Tiny models that see, built from configs over minimind's tokenizer with their real processor classes on Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}


def template(image: str, line: str = "\\n") -> str:
    """A chat template that writes `image` at the place of each, and `line` behind each turn."""
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['role'] == 'assistant' -%}{%- generation -%}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}"
        "{%- else -%}{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>' -}}{%- endgeneration -%}"
        "{%- elif message['content'] is string -%}{{- message['content'] + '<|im_end|>' -}}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'image' -%}{{- '" + image + "' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
        "{%- endfor -%}{{- '<|im_end|>' -}}{%- endif -%}{{- '" + line + "' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def idefics3(tokenizer: Path, target: Path) -> Path:
    """Idefics3: tiles of 32 pixels with a small copy of the whole, four tokens each."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
        AutoTokenizer.from_pretrained(tokenizer),
        image_seq_len=4,
        chat_template=template("<image>"),
    )
    config = Idefics3Config(
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(processor.tokenizer)},
        scale_factor=2,
        image_token_id=processor.image_token_id,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return _saved(Idefics3ForConditionalGeneration(config), processor, target)


def gemma3(tokenizer: Path, target: Path) -> Path:
    """Gemma 3: every image at one size, four tokens between two marks."""
    import torch
    from transformers import (
        AutoTokenizer,
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
    )

    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    loaded = AutoTokenizer.from_pretrained(tokenizer, extra_special_tokens=marks)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = Gemma3Processor(images, loaded, chat_template=template("<start_of_image>"), image_seq_length=4)
    config = Gemma3Config(
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        text_config={**TEXT, "vocab_size": len(loaded), "sliding_window": 64},
        mm_tokens_per_image=4,
        image_token_index=loaded.image_token_id,
        boi_token_index=loaded.boi_token_id,
        eoi_token_index=loaded.eoi_token_id,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    # Made of zeros, it would show the tower to nobody.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.05)
    return _saved(model, processor, target)


def _saved(model: Any, processor: Any, target: Path) -> Path:
    model.save_pretrained(target)
    processor.save_pretrained(target)
    return target


BUILDERS = {"idefics3": idefics3, "gemma3": gemma3}
