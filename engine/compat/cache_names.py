"""The cache of keys, values and states under the names that releases of transformers pass it by.

From transformers 5.24 on models, layers, attention and masks call `cache` what was `past_key_values` before, in Mamba's models
`cache_params`. The old names still reach a whole model, with a warning; a hook or a `forward` of ours sees what the model passes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.masking_utils import create_causal_mask

NAMES = "cache", "past_key_values", "cache_params"
"""All names that a layer may know it by."""

CACHE = NAMES[0] if NAMES[0] in inspect.signature(create_causal_mask).parameters else NAMES[1]
"""The name by which the installed release passes keys and values; a test fails by name where layers have another."""


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, under whichever name; None where it has none."""
    return next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
