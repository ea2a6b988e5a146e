"""State beyond model, optimizer and random numbers that a checkpoint must hold: parts that a trainer registers.

A part is anything with `state_dict()` and `load_state_dict(state)`: a buffer of rollouts, a running mean, a schedule. Each
rank saves its own parts to one file beside the weights and takes up the same file again, before the first step. A part
without state in the checkpoint, or state without a part, ends the resume: it would go on as another training. Files of
state hold tensors and numbers: a pickle that asks for more is refused by its file's name.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from engine.errors import WorkbenchError, visible

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Stateful(Protocol):
    """`state_dict` gives tensors, numbers, texts, and lists, tuples and dictionaries of them: nothing that runs code."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@runtime_checkable
class OfOneProcess(Protocol):
    """A part whose state is that of its process alone; any other's is the same on all of them."""

    def load_of_others(self, state: dict[str, Any], /) -> Any:
        """Takes up the state of a process among another number of them."""


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

    def load(self, folder: Path, rank: int, ranks: int = 1) -> None:
        """Takes up what `save` wrote, tensors on the CPU, one of `ranks` processes now. Raises WorkbenchError where parts and state
        do not match."""
        before = sum(1 for _ in folder.glob("parts-*.pt"))
        file = own if (own := _file(folder, rank)).is_file() else _file(folder, 0)
        found = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}
        if found.keys() != self._parts.keys():
            missing, unknown = sorted(self._parts.keys() - found.keys()), sorted(found.keys() - self._parts.keys())
            what = f"holds no state of {', '.join(missing)}" if missing else f"holds state of {', '.join(unknown)}"
            raise WorkbenchError(
                f"{folder.name}: {what} for rank {rank}, so training could not go on as it was.",
                "Resume with the method it was made with, or start a new run from its model.",
            )
        for name, part in self._parts.items():
            if before != ranks and isinstance(part, OfOneProcess):
                part.load_of_others(found[name])
            else:
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


@contextlib.contextmanager
def refusing_pickles(folder: Path) -> Iterator[None]:
    """Load state from a checkpoint's folder inside. torch runs nothing that a pickle asks for, and does not say which file
    it is; raises WorkbenchError that does."""
    try:
        yield
    except pickle.UnpicklingError as problem:
        file, asked = _guilty(folder)
        raise WorkbenchError(
            f"{folder.name}: {visible(file)} is no state of a training: {asked}.",
            "It was changed since it was saved: remove this checkpoint, and the run goes on from the one before.",
        ) from problem


def _guilty(folder: Path) -> tuple[str, str]:
    """The first file that does not load as tensors and numbers, and what it asks for."""
    from transformers.trainer_pt_utils import safe_globals  # numpy's, of which random state is made

    for file in sorted(path for path in folder.iterdir() if path.suffix in (".pt", ".pth", ".bin") and path.is_file()):
        try:
            with safe_globals():
                torch.load(file, map_location="meta", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError):
            with contextlib.suppress(ValueError, RuntimeError, pickle.UnpicklingError, EOFError):
                if asked := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)):
                    return file.name, f"it is a pickle that would run {visible(asked[0])}"
            return file.name, "it is a pickle that may run code"
    return "one of its files", "it is a pickle that may run code"
