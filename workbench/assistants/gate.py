"""What leaves a server passes here: no secret, no character that hides or reorders text, no number that JSON does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from engine.errors import visible, without_secrets


def safe(text: str) -> str:
    """A text as it may leave."""
    return visible(without_secrets(text), lines=True)


def clean(value: Any) -> Any:
    """Plain data with each text in it as it may leave."""
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def as_text(value: Any) -> str:
    """Plain data as JSON."""
    return to_json(clean(value), fallback=str).decode()
