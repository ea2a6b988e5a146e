"""Masks that transformers is handed ready-made, so that it does not wait for a card to find out that it needs none.

A backbone with several kinds of layers takes a mapping from kind to mask in the place of `attention_mask`, as generation hands it
(transformers 5.17). Without one it asks the card in every forward pass whether the positions that it has just counted up belong to
several documents, and the host waits there for all that was launched before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

_READY_MADE = "causal_mask_mapping"
"""The variable of a backbone's forward that holds the mapping; a test fails by name when an upgrade changes it."""
_WHOLE = "full_attention"
_CAUSAL_BY_THEMSELVES = "sdpa", "flash_attention"
"""How names of attention begin that is causal where it gets no mask."""


def none_needed(backbone: torch.nn.Module) -> dict[str, None] | None:
    """What to hand this backbone as its mask where attention is causal without one; None where it is to make its own."""
    config: Any = getattr(backbone, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    attention = getattr(config, "_attn_implementation", None) or ""
    code = inspect.unwrap(type(backbone).forward).__code__
    takes = _READY_MADE in code.co_varnames and "dict" in code.co_names
    return {_WHOLE: None} if takes and kinds == {_WHOLE} and attention.startswith(_CAUSAL_BY_THEMSELVES) else None
