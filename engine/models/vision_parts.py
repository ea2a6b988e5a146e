"""The parts of a model that see: the vision tower, and the projector from it to the language model.

`model.train_vision` says which of them learn; weights of the others are frozen and no adapter is put beside their layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config.tree import RunConfig
from engine.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PROJECTORS = ("connector", "multi_modal_projector", "merger", "patch_merger", "projector", "aligner", "embed_vision")
"""Names of the module between the vision tower and the language model, in transformers."""


@dataclass(frozen=True)
class VisionParts:
    """Paths of the modules that see; none for a model of text."""

    tower: str = ""
    projectors: tuple[str, ...] = ()

    def part_of(self, name: str) -> str:
        """The part that a module or weight belongs to: projector, tower, or nothing of both."""
        if any(_below(name, path) for path in self.projectors):
            return "projector"
        return "tower" if self.tower and _below(name, self.tower) else ""

    def frozen(self, name: str, trained: str) -> bool:
        """Whether a weight or layer of this name does not learn with this `train_vision`."""
        part = self.part_of(name)
        return (part == "tower" and trained != "all") or (part == "projector" and trained == "none")


def vision_parts(model: PreTrainedModel) -> VisionParts:
    """The parts of a model that see."""
    if not hasattr(model.config, "vision_config"):
        return VisionParts()
    tower = model.get_encoder(modality="image")
    paths = {id(module): path for path, module in model.named_modules()}
    found = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in PROJECTORS]
    return VisionParts(paths.get(id(tower), ""), tuple(found))


def frozen_paths(model: PreTrainedModel) -> list[str]:
    """The paths of the parts that see, where nothing of them learns."""
    parts = vision_parts(model)
    paths = [path for path in (parts.tower, *parts.projectors) if path]
    learns = any(weight.requires_grad for path in paths for weight in model.get_submodule(path).parameters())
    return [] if learns else paths


def refuse_without_vision(config: RunConfig, parts: VisionParts) -> None:
    """Raises ModelError where parts are to be frozen that the model has not."""
    if config.model.train_vision == "all" or parts.tower:
        return
    raise ModelError(
        f"model.train_vision: {config.model.train_vision} asks for a model with a vision tower, and this one has none.",
        "Leave it out.",
    )


def freeze_vision(config: RunConfig, model: torch.nn.Module, parts: VisionParts) -> None:
    """Freeze the weights that `model.train_vision` leaves out. Raises ModelError where nothing is left to learn."""
    trained = config.model.train_vision
    for name, weight in model.named_parameters():
        if parts.frozen(name, trained):
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ModelError(
            f"model.train_vision: {trained} freezes every weight that adapter.unfrozen_parameters names.",
            "Name weights of the language model too, or train the vision tower.",
        )


def without_vision(model: torch.nn.Module, parts: VisionParts, trained: str) -> str | None:
    """The expression of all modules that no adapter is put beside, as PEFT's `exclude_modules`; None where there are none."""
    names = [name for name, _ in model.named_modules() if name and parts.frozen(name, trained)]
    return "|".join(map(re.escape, names)) or None


def _below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
