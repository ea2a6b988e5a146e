"""Tiny models that see, built from configs over minimind's tokenizer with their real processor classes on Pillow."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
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
        vision_config={**SMALL, "image_size": 32, "patch_size": 8, "vision_use_head": False},
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


def qwen2_5_vl(
    tokenizer: Path, target: Path, *, text: dict[str, Any] | None = None, tower: dict[str, Any] | None = None
) -> Path:
    """Qwen2.5-VL: images keep their shape, a token for four patches of 8 pixels, positions in three directions. `text` and
    `tower` are other sizes."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    loaded = _with_marks(tokenizer, VISION_MARKS)
    config = Qwen2_5_VLConfig(
        vision_config={
            **PATCHES,
            "num_heads": 2,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 32,
            **(tower or {}),
        },
        text_config={**_text(loaded), "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3]}, **(text or {})},
        **_ids(loaded, VISION_MARKS),
    )
    return _family(Qwen2_5_VLForConditionalGeneration, config, "Qwen2_5_VL", "Qwen2VL", loaded, target, QWEN)


def qwen3_vl(tokenizer: Path, target: Path) -> Path:
    """Qwen3-VL: as Qwen2.5-VL, and what the tower's first layer saw is added to the language model's."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    loaded = _with_marks(tokenizer, VISION_MARKS)
    config = Qwen3VLConfig(
        vision_config={**PATCHES, "num_heads": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0], "out_hidden_size": 32},
        text_config={**_text(loaded), "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        **_ids(loaded, VISION_MARKS),
    )  # fmt: skip
    return _family(Qwen3VLForConditionalGeneration, config, "Qwen3VL", "Qwen2VL", loaded, target, QWEN)


def glm4v(tokenizer: Path, target: Path) -> Path:
    """GLM-4V: images keep their shape, and are an image's by the marks around them."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    marks = {
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
        "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    }
    loaded = _with_marks(tokenizer, marks)
    config = Glm4vConfig(
        vision_config={**PATCHES, "num_heads": 2, "image_size": 64, "out_hidden_size": 32},
        text_config={
            **_text(loaded),
            "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0},
        },
        **_ids(loaded, marks),
    )
    shown = "<|begin_of_image|><|image|><|end_of_image|>"
    return _family(Glm4vForConditionalGeneration, config, "Glm4v", "Glm4v", loaded, target, shown)


def internvl(tokenizer: Path, target: Path) -> Path:
    """InternVL: tiles of 32 pixels with a small copy of the whole, four tokens each."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    marks = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    loaded = _with_marks(tokenizer, marks)
    config = InternVLConfig(
        vision_config={**SMALL, "image_size": [32, 32], "patch_size": [8, 8]},
        text_config={"model_type": "qwen2", **_text(loaded)},
        image_token_id=loaded.context_image_token_id,
        image_seq_length=4,
    )
    images = {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4}
    more = {"image_seq_length": 4}
    return _family(
        InternVLForConditionalGeneration, config, "InternVL", "GotOcr2", loaded, target, "<IMG_CONTEXT>", images, more
    )


def smolvlm(tokenizer: Path, target: Path) -> Path:
    """SmolVLM: as Idefics3."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    marks = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
    }
    loaded = _with_marks(tokenizer, marks)
    loaded.add_tokens([f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)], special_tokens=True)
    config = SmolVLMConfig(
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        text_config={"model_type": "llama", **_text(loaded)},
        scale_factor=2,
        image_token_id=loaded.image_token_id,
        pad_token_id=0,
    )
    images = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    more = {"image_seq_len": 4}
    return _family(
        SmolVLMForConditionalGeneration, config, "SmolVLM", "SmolVLM", loaded, target, "<image>", images, more
    )


VISION_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
PATCHES = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "patch_size": 8}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def _with_marks(tokenizer: Path, marks: dict[str, str]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, extra_special_tokens=marks)


def _text(tokenizer: Any) -> dict[str, Any]:
    return {**TEXT, "vocab_size": len(tokenizer)}


def _ids(tokenizer: Any, marks: dict[str, str]) -> dict[str, int]:
    return {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}


def _family(
    kind: Any, config: Any, processor: str, reader: str, tokenizer: Any, target: Path, shown: str,
    images: dict[str, Any] | None = None, settings: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A folder as hubs have it, for a model whose processor class reads videos too."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    shape = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 8192}}
    getattr(transformers, f"{reader}ImageProcessorPil")(**(shape if images is None else images)).save_pretrained(target)
    (target / "processor_config.json").write_text(
        json.dumps({"processor_class": f"{processor}Processor"} | (settings or {}))
    )
    of_videos = {"video_processor_type": f"{processor.replace('2_5_', '2')}VideoProcessor", "fps": 2}
    (target / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    (target / "chat_template.jinja").write_text(template(shown))
    return target


def real_processor(folder: Path) -> Any:
    """The processor of a saved family as transformers makes it on Pillow, also where torchvision is installed, with a stand-in
    where it asks for one of videos."""
    import sys
    from unittest import mock

    import transformers
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # at the top 5.17 may have a stand-in
    from transformers.processing_utils import ProcessorMixin

    found = json.loads((folder / "processor_config.json").read_text())
    kind = getattr(transformers, found["processor_class"])
    if "video_processor" not in kind.get_attributes():
        processor = transformers.AutoProcessor.from_pretrained(folder, backend="pil")
        processor.tokenizer.backend = "tokenizers"  # it took Pillow's word for its own, and would mark no answers
        return processor
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    more = {name: value for name, value in found.items() if name.startswith("image_seq")}
    with (
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
        mock.patch.dict(vars(sys.modules[kind.__module__]), num2words=str),
    ):
        return kind(
            images,
            tokenizer,
            SimpleNamespace(model_input_names=[], num_frames=None, fps=None),
            chat_template=(folder / "chat_template.jinja").read_text(),
            **more,
        )


def _saved(model: Any, processor: Any, target: Path) -> Path:
    model.save_pretrained(target)
    processor.save_pretrained(target)
    return target


BUILDERS = {"idefics3": idefics3, "gemma3": gemma3}
WITH_VIDEOS = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "internvl": internvl,
    "glm4v": glm4v,
    "smolvlm": smolvlm,
}
"""Families whose processor class asks for a processor of videos."""
FAMILIES = BUILDERS | WITH_VIDEOS
