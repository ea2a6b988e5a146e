"""The weights of an adapter's folder in a model that has an adapter of that shape: every one of them, or an error that names one.

PEFT reads a folder with `from_pretrained`, which makes the adapter by the folder's own config and passes over what it does not
find. Here the adapter is the one that the run's config describes, made as every other is (`engine.models.adapters`), and its
numbers are copied into it, so that all that holds for an adapter holds for this one: its number format, experts, layers that
PEFT takes for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine import model_files
from engine.config.kinds import reference_of
from engine.config.tree import RunConfig
from engine.errors import ModelError, visible
from engine.run import checkpoint

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

_OTHER = "Name the model that it was trained beside, or another adapter."
_SECOND = ("lora_B", "lora_embedding_B")


@dataclass(frozen=True)
class Begun:
    """What an adapter began as, for the receipt."""

    place: str
    """Its folder, as messages show it."""
    weights: int
    largest: float
    """Of the numbers of its second matrices, by size: 0 in an adapter that has learned nothing."""
    rounded: bool = False
    """Whether its files hold more digits than the run does."""


def load_adapter(adapted: PeftModel, config: RunConfig, folder: Path) -> Begun:
    """Gives the trained weights those of the folder. Raises ModelError where one is lacking, of another shape or not finite."""
    import torch
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    model_files.refuse_what_it_names(folder)
    model_files.refuse_pickled_adapter(folder)
    model_files.header(folder / model_files.ADAPTER_WEIGHTS)
    where = f"adapter.path: {model_files.place(folder)}"
    if checkpoint.has_changed(folder, model_files.ADAPTER_WEIGHTS):
        raise ModelError(
            f"{where}: {model_files.ADAPTER_WEIGHTS} has changed since it was saved.",
            "Its disk or a copy has damaged it: take an earlier checkpoint, or another adapter.",
        )
    held = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    places = get_peft_model_state_dict(adapted, held, save_embedding_layers=False)
    stored = load_file(folder / model_files.ADAPTER_WEIGHTS)
    _refuse_misfits(adapted, config, places, stored, where)
    largest, rounded = 0.0, False
    with torch.no_grad():
        for name, weight in places.items():
            if (value := stored.get(name)) is None:
                continue  # a head that the method adds
            weight.copy_(value)
            rounded |= value.dtype.itemsize > weight.dtype.itemsize
            if any(part in name.split(".") for part in _SECOND) and value.numel():
                largest = max(largest, value.abs().max().item())
    return Begun(model_files.place(folder), sum(name in stored for name in places), largest, rounded)


def _refuse_misfits(
    adapted: PeftModel,
    config: RunConfig,
    places: dict[str, torch.Tensor],
    stored: dict[str, torch.Tensor],
    where: str,
) -> None:
    new_head = (".score.", ".classifier.") if config.method.head in ("score", "steps") else ()
    lacking = sorted(name for name in places if name not in stored and not any(part in f".{name}" for part in new_head))
    if lacking:
        raise ModelError(f"{where} holds no {visible(lacking[0])}{_others(lacking)}, which the model has.", _OTHER)
    if more := sorted(name for name in stored if name not in places and not _of_base(adapted, name, stored[name])):
        raise ModelError(f"{where} holds {visible(more[0])}{_others(more)}, for which the model has no place.", _OTHER)
    for name, weight in places.items():
        if name in stored and stored[name].shape != weight.shape:
            shapes = [" x ".join(map(str, each.shape)) for each in (stored[name], weight)]
            raise ModelError(f"{where}: {visible(name)} is {shapes[0]} numbers, and the model has {shapes[1]}.", _OTHER)

    if broken := sorted(name for name, value in stored.items() if not value.isfinite().all()):
        raise ModelError(
            f"{where}: {visible(broken[0])} holds numbers that are not finite (NaN or infinite).",
            "Nothing can be trained from it: take another adapter, or an earlier checkpoint.",
        )


def _of_base(adapted: PeftModel, name: str, value: torch.Tensor) -> bool:
    """Whether it is a weight of the base as it is: PEFT saves embeddings beside an adapter on them."""
    base = dict(adapted.named_parameters()).get(name)
    return base is not None and base.shape == value.shape and bool(base.to(value.dtype).cpu().equal(value))


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def beginning(config: RunConfig, newest: Path | None, copy: str) -> Path | None:
    """The folder that an adapter begins from, before a checkpoint is restored; None for a new one.

    A run that goes on needs its adapter's first folder no more: what is trained comes back with the checkpoint, and what it is
    held to lies there too, in the folder `copy`. Only one that was held to nothing and is now has to look there again.
    """
    if config.adapter.kind != "lora" or not config.adapter.path:
        return None
    if newest is None:
        return Path(config.adapter.path)
    if ((held_to := newest / copy) / model_files.ADAPTER_WEIGHTS).is_file():
        return held_to
    return Path(config.adapter.path) if reference_of(config.method) == "adapter_copy" else None


def as_begun(config: RunConfig) -> Path | None:
    """The folder of the adapter that training went on from; None where it began a new one. Raises ModelError where the folder is
    no longer there, or is not to be read."""
    folder = beginning(config, None, "")
    if folder is None:
        return None
    if not (folder / model_files.ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"adapter.path: the adapter that training went on from is no longer in {model_files.place(folder)}, so the model as it "
            "began cannot be measured.",
            "Put it back, or leave --base out.",
        )
    model_files.refuse_what_it_names(folder)
    model_files.refuse_pickled_adapter(folder)
    return folder
