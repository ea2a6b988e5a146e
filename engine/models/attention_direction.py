"""In which direction a model reads: a causal one looks back alone, an encoder such as BERT looks at the whole text.

Known by the flags of its attention modules; a model without such flags is taken as it comes. What would train without
learning anything of use is refused before the first batch: an encoder that is to write sees the very token it shall
guess, and the first token of a causal model has seen nothing of the text that it would stand for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config.tree import RunConfig
from engine.errors import ModelError, redact, visible

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Whether every layer of a text model is causal, so that tokens behind a token cannot change what comes out at it."""
    config = model.config
    if hasattr(config, "vision_config") or config.is_encoder_decoder or not getattr(config, "is_causal", True):
        return False
    own = _flags(model)
    return bool(own) and all(own)


def is_bidirectional(model: PreTrainedModel) -> bool:
    """Whether no layer of a text model is causal."""
    own = _flags(model)
    return bool(own) and not any(own) and not hasattr(model.config, "vision_config")


def refuse_the_wrong_direction(config: RunConfig, model: PreTrainedModel) -> None:
    """Raises ModelError for an encoder that is to write, and for the first token as the vector of a causal model."""
    method = config.method
    if method.head == "vocabulary" and is_bidirectional(model):
        name = visible(redact(config.model.name))
        raise ModelError(
            f"model.name: must be a model that reads from left to right for {method.kind}; got {name} "
            f"({model.config.model_type}), whose tokens see those after them.",
            "Take one that writes, or set method.kind to embedding, reward or prm, which such a model serves.",
        )
    if method.kind == "embedding" and method.pooling == "first" and is_causal_lm(model):
        raise ModelError(
            "method.pooling: must be mean or last for a model that reads from left to right; got first.",
            "Its first token has seen nothing of the text; first is for models such as BERT.",
        )


def _flags(model: PreTrainedModel) -> list[bool]:
    flags = (getattr(module, "is_causal", None) for module in model.modules())
    return [flag for flag in flags if isinstance(flag, bool)]
