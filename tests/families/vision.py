"""Families that see, beside those of `tests.engine.seeing`: folders as hubs have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.seeing import (
    MROPE,
    PATCHES,
    QWEN,
    SMALL,
    TEXT,
    VISION_MARKS,
    _family,
    _ids,
    _text,
    _with_marks,
    template,
)  # fmt: skip

GLM_MARKS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
TURNED = {**MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
TOWER = {**PATCHES, "num_heads": 2, "out_hidden_size": 32}


def qwen3_vl_moe(tokenizer: Path, target: Path) -> Path:
    """Qwen3-VL's mixture."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    loaded = _with_marks(tokenizer, VISION_MARKS)
    config = Qwen3VLMoeConfig(
        vision_config={**TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        text_config={**_text(loaded), **EXPERTS, "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        **_ids(loaded, VISION_MARKS),
    )  # fmt: skip
    return _family(Qwen3VLMoeForConditionalGeneration, config, "Qwen3VL", "Qwen2VL", loaded, target, QWEN)


def qwen3_5(tokenizer: Path, target: Path) -> Path:
    """Qwen3.5 with its tower: every other layer has linear attention."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    loaded = _with_marks(tokenizer, VISION_MARKS)
    rope = {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    config = Qwen3_5Config(
        vision_config={**TOWER, "num_position_embeddings": 64},
        text_config={**_text(loaded), **LINEAR, "rope_parameters": rope},
        **_ids(loaded, VISION_MARKS),
    )
    return _family(Qwen3_5ForConditionalGeneration, config, "Qwen3VL", "Qwen2VL", loaded, target, QWEN)


def glm46v(tokenizer: Path, target: Path) -> Path:
    """GLM-4.6V-Flash: GLM-4.1V's parts with a processor of its own."""
    from transformers import Glm46VConfig, Glm46VForConditionalGeneration

    loaded = _with_marks(tokenizer, GLM_MARKS)
    config = Glm46VConfig(
        vision_config={**TOWER, "image_size": 64, "model_type": "glm4v_vision"},
        text_config={**_text(loaded), "rope_parameters": TURNED, "model_type": "glm4v_text"},
        **_ids(loaded, GLM_MARKS),
    )
    shown = "<|begin_of_image|><|image|><|end_of_image|>"
    return _family(Glm46VForConditionalGeneration, config, "Glm46V", "Glm46V", loaded, target, shown)


def glm4v_moe(tokenizer: Path, target: Path) -> Path:
    """GLM-4.5V, GLM-4.6V: the tower before GLM-4.5's mixture."""
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    loaded = _with_marks(tokenizer, GLM_MARKS)
    config = Glm4vMoeConfig(
        vision_config={**TOWER, "image_size": 64},
        text_config={**_text(loaded), **ROUTED, "rope_parameters": TURNED},
        **_ids(loaded, GLM_MARKS),
    )
    shown = "<|begin_of_image|><|image|><|end_of_image|>"
    return _family(Glm4vMoeForConditionalGeneration, config, "Glm4v", "Glm4v", loaded, target, shown)


PIXTRAL_MARKS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
PIXTRAL_TOWER = {**SMALL, "image_size": 64, "patch_size": 8, "head_dim": 16, "model_type": "pixtral"}


def _pixtral(kind: Any, config: Any, loaded: Any, target: Path, **settings: Any) -> Path:
    images = {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}
    return _family(kind, config, "Pixtral", "Pixtral", loaded, target, "[IMG]", images, {"patch_size": 8, **settings})


def pixtral(tokenizer: Path, target: Path) -> Path:
    """Pixtral 12B, by LLaVA's class as on the hub."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    loaded = _with_marks(tokenizer, PIXTRAL_MARKS)
    text = {**_text(loaded), "model_type": "mistral"}
    more = {
        "image_token_index": loaded.image_token_id,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    config = LlavaConfig(vision_config=PIXTRAL_TOWER, text_config=text, **more)
    return _pixtral(LlavaForConditionalGeneration, config, loaded, target)


def mistral3(tokenizer: Path, target: Path) -> Path:
    """Mistral Small 3.1 and 3.2, Ministral 3: Pixtral's tower, four patches a token."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    loaded = _with_marks(tokenizer, PIXTRAL_MARKS)
    text = {**_text(loaded), "model_type": "mistral"}
    more = {"image_token_index": loaded.image_token_id, "spatial_merge_size": 2, "vision_feature_layer": -1}
    config = Mistral3Config(vision_config=PIXTRAL_TOWER, text_config=text, **more)
    return _pixtral(Mistral3ForConditionalGeneration, config, loaded, target, spatial_merge_size=2)


def lfm2_vl(tokenizer: Path, target: Path) -> Path:
    """LFM2-VL: SigLIP 2 before LFM2. Its image processor has no form on Pillow, so its settings are written as they are."""
    import json

    import torch
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    marks = {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
    loaded = _with_marks(tokenizer, marks)
    text = {
        **TEXT,
        "model_type": "lfm2",
        "vocab_size": len(loaded),
        "layer_types": ["conv", "full_attention"],
        "block_ff_dim": 64,
    }
    config = Lfm2VlConfig(
        vision_config={**SMALL, "num_patches": 64, "patch_size": 8, "vision_use_head": False, "model_type": "siglip2_vision_model"},
        text_config=text, image_token_id=loaded.image_token_id, projector_hidden_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    Lfm2VlForConditionalGeneration(config).save_pretrained(target)
    loaded.save_pretrained(target)
    images = {
        "image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 8, "min_image_tokens": 4, "max_image_tokens": 16,
        "max_num_patches": 64, "do_image_splitting": False,
    }  # fmt: skip
    (target / "preprocessor_config.json").write_text(json.dumps(images))
    (target / "chat_template.jinja").write_text(template("<image>"))
    (target / "processor_config.json").write_text(json.dumps({"processor_class": "Lfm2VlProcessor"}))
    return target


def gemma4(tokenizer: Path, target: Path) -> Path:
    """Gemma 4 with its tower, without the one that hears."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    marks = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    loaded = _with_marks(tokenizer, marks)
    text = {
        **TEXT, "vocab_size": len(loaded), "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    }  # fmt: skip
    config = Gemma4Config(
        vision_config={**SMALL, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2, "position_embedding_size": 64},
        text_config=text, audio_config=None, image_token_id=loaded.image_token_id, boi_token_id=loaded.boi_token_id,
        eoi_token_id=loaded.eoi_token_id, video_token_id=None, audio_token_id=None,
    )  # fmt: skip
    images = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    return _family(Gemma4ForConditionalGeneration, config, "Gemma4", "Gemma4", loaded, target, "<|image|>", images)


FAMILIES = {
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5_vl": qwen3_5,
    "glm46v": glm46v,
    "glm4v_moe": glm4v_moe,
    "pixtral": pixtral,
    "mistral3": mistral3,
    "lfm2_vl": lfm2_vl,
    "gemma4_vl": gemma4,
}
