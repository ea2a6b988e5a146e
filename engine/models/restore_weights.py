"""The weights of a checkpoint in a model that stands already, for full weights: by name, or through the model's own loading.

transformers writes some models under other names and in other pieces than it holds them (each expert of a mixture by
itself, where the model has all of a layer in one weight). Its trainer looks a file's names up in the model, passes over
what it does not find and notes it in a log: such weights would go on as the base model's, beside moments of others.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine import model_files
from engine.errors import ModelError


def take_up(model: PreTrainedModel, folder: Path, apart: Collection[torch.Tensor] = ()) -> None:
    """Gives the model the weights in a checkpoint's folder; `apart` are those that are kept elsewhere.

    Where names differ, a second model is loaded on the host for as long as it takes. Raises ModelError for a checkpoint
    that lacks a weight of the model or holds others.
    """
    from safetensors.torch import load_file

    model_files.refuse_what_it_names(folder)
    model_files.stored_weights(folder)
    files, held = sorted(folder.glob("*.safetensors")), model.state_dict()
    missing: list[str] = []
    if _names(files) <= held.keys():
        stored = {name: weight for file in files for name, weight in load_file(file).items()}
    else:
        stored, missing, unknown = as_held(model, folder)
        stored |= dict.fromkeys(unknown, torch.empty(0))
    known = {_place(held[name]) for name in stored if name in held} | {_place(weight) for weight in apart}
    missing += [name for name, weight in held.items() if name not in stored and _place(weight) not in known]
    if wrong := missing or sorted(stored.keys() - held.keys()):
        what = "holds no weight" if missing else "holds a weight that the model lacks:"
        raise ModelError(
            f"{folder.name}: {what} {wrong[0]} ({len(wrong)} in all), so training could not go on as it was.",
            "Start a new run from it as model.name.",
        )
    model.load_state_dict(stored, strict=False)


def as_held(
    model: PreTrainedModel, folder: Path, kind: Any = None
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """The checkpoint's weights by the model's own names, which it lacks, and which are none of the model's; `kind` is the class
    that loads them, the model's own unless given. Norms in float32 beside fewer bits are read whole."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    loader: Any = kind or type(model)
    loaded, info = loader.from_pretrained(
        folder,
        use_safetensors=True,
        output_loading_info=True,
        dtype=kinds.pop() if len(kinds) == 1 else torch.float32,
        attn_implementation="eager",
    )
    return dict(loaded.state_dict()), sorted(info["missing_keys"]), sorted(info["unexpected_keys"])


def _names(files: list[Path]) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    return names


def _place(weight: torch.Tensor) -> tuple[int, int]:
    """Equal for names that are tied."""
    return weight.data_ptr(), weight.numel()
