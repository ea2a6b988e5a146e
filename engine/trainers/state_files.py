"""Files of training state in a checkpoint hold tensors and numbers: a pickle that asks for more is refused by its file's name."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.errors import WorkbenchError, visible


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
