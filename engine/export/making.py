"""One part of an export, whatever its form: written beside its place, compared, named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError, visible
from engine.export.folder import Model, bytes_of, write_adapter, write_model
from engine.export.parity import Parity
from engine.export.places import placed
from engine.run import checkpoint

Report = Callable[[str, int, int], None]


def make(model: Model, form: str, place: Path, asked: dict[str, Any], report: Report) -> dict[str, Any]:
    """Writes one form to its place and says what was compared. Raises WorkbenchError where it cannot be made."""
    if form == "adapter" and not model.source.adapted:
        raise WorkbenchError(
            f"{model.source.checkpoint.name}: holds all weights of the model and no adapter.",
            f"Take the model along: `workbench export {visible(model.source.run.id)} --to safetensors`.",
        )
    with placed(place, bytes_of(model, form)) as part:
        found: Parity = {"safetensors": write_model, "adapter": write_adapter}[form](model, part, report)
    return {
        "form": form,
        "path": str(place),
        "bytes": checkpoint.size_of(place) if place.is_dir() else place.stat().st_size,
        "ok": True,
        "parity": found.as_json(),
    }
