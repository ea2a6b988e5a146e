"""How a mixture's tokens spread over its experts, as curves, in every run whose model has experts."""

from __future__ import annotations

SETTING = None
AFTER = ("fused_experts",)
"""Heard is what the layer calls in the end."""
