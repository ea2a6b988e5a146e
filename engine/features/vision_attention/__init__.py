"""Images and windows of a vision tower attend in one call instead of one after the other, in every run that sees."""

from __future__ import annotations

SETTING = None
AFTER = ("attention_backend",)
SERVED = frozenset({
    "Glm4vMoeVisionAttention", "Glm4vVisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLMoeVisionAttention",
    "Qwen3VLVisionAttention", "VisionAttention",
})  # fmt: skip
"""Attention of transformers' vision towers that takes bounds of images or windows (`cu_seqlens`)."""
