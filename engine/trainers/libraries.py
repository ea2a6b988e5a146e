"""What a run imports before it begins, and the weights that the disk fetches meanwhile. No torch until it is asked for."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.trainers import comet

if TYPE_CHECKING:
    from engine.config.tree import RunConfig

EVERY_RUN = (
    "torch",
    "transformers.trainer",
    "datasets",
    "trl.trainer.base_trainer",
    "engine.trainers.receipt",
    "engine.data.prepare",
    "engine.features.load",
    "engine.features.sequence",
    "engine.rehearse",
    "transformers.models.auto.modeling_auto",
)
"""What every run imports, in pieces of a second or two."""
FOR_CONFIGS = ("engine.rules", "engine.data.gather_facts", "engine.planning.auto", "engine.trainers.arguments")
"""What reads and resolves a config."""


def load_all(config: RunConfig) -> None:
    """Imports what every run needs, and in a process of its own nothing of what this one has no use for."""
    from engine.planning import unused_packages

    fresh = "torch" not in sys.modules
    if fresh:
        unused_packages.withhold(unused_packages.unused(config))
        comet.quiet()
    for name in EVERY_RUN:
        load(name)
    if fresh:
        gc.freeze()  # modules stay: to look among them for garbage takes a third of a second each time


def load(name: str) -> None:
    """Imports one of `EVERY_RUN`. What an import makes is no garbage, so none is looked for meanwhile."""
    from engine.compat import import_scans, import_warnings

    gc.disable()
    try:
        with import_warnings.dropped(), import_scans.kept():
            importlib.import_module(name)
    finally:
        gc.enable()


def read_weights_ahead(config: RunConfig) -> None:
    """The disk fetches the model's files while the libraries are imported, one process a machine asking for it."""
    from engine.facts.model_shape import model_facts
    from engine.model_files import read_ahead

    known = model_facts(config.model.name, config.model.revision)
    if known is not None and known.folder and os.environ.get("LOCAL_RANK", "0") == "0":
        read_ahead(Path(known.folder))
