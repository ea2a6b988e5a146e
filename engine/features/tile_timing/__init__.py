"""`kernels.kernel_auto_compose`, of the kernels that are on: their tiles are chosen by timing at first use."""

from __future__ import annotations

from engine.config.tree import fields

SETTING = fields.kernels.kernel_auto_compose
AFTER = ("cut_cross_entropy", "fused_experts", "fused_lora", "fused_norm_rope")
"""Timed are kernels that are on by then."""
