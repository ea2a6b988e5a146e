"""Loading a model's files so that every weight that is used comes from them, but for the head that a method adds.

transformers fills what a folder lacks with random numbers, also where it holds a part of another shape, and says so in a
log that nobody reads: a language model from a folder without its head would train from noise. Only a new head of scores
or of verdicts on steps is new, and what lies behind the last hidden state may be, where the method does not read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.config.kinds import Head
from engine.errors import ModelError, visible


def load_strictly(loader: Any, source: str, head: Head, **settings: Any) -> Any:
    """`loader.from_pretrained(source, **settings)`. Raises ModelError naming weights that are missing or do not fit."""
    model, info = loader.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **settings,
    )
    name = visible(source)
    if wrong := [(entry[0], tuple(entry[1]), tuple(entry[2])) for entry in info["mismatched_keys"]]:
        key, stored, wanted = min(wrong)
        raise ModelError(
            f"model.name: {key} in {name} has the shape {_shape(stored)}, and {_shape(wanted)} is wanted"
            f"{_others(wrong)}.",
            "Take the model without that head, such as the one it was made from, or mend its config.json.",
        )
    if missing := sorted(key for key in info["missing_keys"] if not _new(key, head, model.base_model_prefix)):
        raise ModelError(
            f"model.name: {name} holds no {missing[0]}{_others(missing)}, so it would start from random numbers.",
            "Take a folder that holds the whole model: what an embedding or a reward model was saved as has no head that "
            "writes.",
        )
    return model


def _new(key: str, head: Head, backbone: str) -> bool:
    """Whether a missing weight is of the method's new head, or is read by no loss."""
    beside = head in ("score", "steps") and not key.startswith(f"{backbone}.")
    return beside or (head != "vocabulary" and "pooler" in key)


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(str(size) for size in sizes)


def _others(keys: list[Any]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
