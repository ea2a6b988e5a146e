"""State beyond model, optimizer and random numbers that a checkpoint must hold: parts that a trainer registers.

A part is anything with `state_dict()` and `load_state_dict(state)`: a buffer of rollouts, a running mean, a schedule. Each
rank saves its own parts to one file beside the weights and takes up the same file again, before the first step. A part
without state in the checkpoint, or state without a part, ends the resume: it would go on as another training.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.errors import WorkbenchError

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Stateful(Protocol):
    """`state_dict` gives tensors, numbers, texts, and lists, tuples and dictionaries of them: nothing that runs code."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Parts:
    """The registered parts of one trainer on one rank."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def add(self, name: str, part: Stateful) -> None:
        """Raises ValueError for a name that is taken or no lower-case word."""
        if not _NAME.fullmatch(name) or name in self._parts:
            raise ValueError(f"{name!r}: a part needs a lower-case name of its own")
        self._parts[name] = part

    def weights(self) -> list[torch.Tensor]:
        """The weights of parts that are modules, which may stand in the model and are not saved with it."""
        return [
            weight for part in self._parts.values() if isinstance(part, torch.nn.Module) for weight in part.parameters()
        ]

    def save(self, folder: Path, rank: int) -> None:
        """Writes `parts-RANK.pt`; without a part, no file."""
        if self._parts:
            torch.save({name: part.state_dict() for name, part in self._parts.items()}, _file(folder, rank))

    def load(self, folder: Path, rank: int) -> None:
        """Takes up what `save` wrote, tensors on the CPU. Raises WorkbenchError where parts and state do not match."""
        file = _file(folder, rank)
        found = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}
        if found.keys() != self._parts.keys():
            missing, unknown = sorted(self._parts.keys() - found.keys()), sorted(found.keys() - self._parts.keys())
            what = f"holds no state of {', '.join(missing)}" if missing else f"holds state of {', '.join(unknown)}"
            raise WorkbenchError(
                f"{folder.name}: {what} for rank {rank}, so training could not go on as it was.",
                "Resume with the method and the number of devices it was made with, or start a new run from its model.",
            )
        for name, part in self._parts.items():
            part.load_state_dict(found[name])

    def load_weights(self, folder: Path, rank: int) -> None:
        """Takes up the weights of the parts that are modules, to measure a checkpoint by and not to go on from it."""
        modules = {name: part for name, part in self._parts.items() if isinstance(part, torch.nn.Module)}
        if modules:
            found = torch.load(_file(folder, rank), map_location="cpu", weights_only=True)
            for name, part in modules.items():
                part.load_state_dict(found[name])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"parts-{rank}.pt"
