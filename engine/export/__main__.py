"""`python -P -m engine.export`: does one export and tells of it; what is half written goes where it is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import WorkbenchError
from engine.model_files import SHARES
from engine.run.task import Report, Send, described, serve

if TYPE_CHECKING:
    from engine.config.tree import RunConfig
    from engine.export.folder import Model
    from engine.run.store import RunFolder

    Make = Callable[[Model, str, Path, dict[str, Any], Report], dict[str, Any]]


def answer(request: dict[str, Any], send: Send, report: Report) -> dict[str, Any]:
    """Does what is asked; a part that fails leaves the others. Raises WorkbenchError where nothing can be begun."""
    report("Reading the checkpoint", 0, 1)
    from engine.export.places import source
    from engine.run.store import RunFolder, called

    run = RunFolder(request["run"])
    taken = source(run, request["checkpoint"])
    if request["do"] == "merge" and not (taken.adapted or (taken.checkpoint / SHARES).is_dir()):
        raise WorkbenchError(
            f"{taken.checkpoint.name}: holds all weights of the model and no adapter, so there is nothing to merge.",
            f"It is a model as it is: `workbench export {called(run)} --to safetensors` takes it along.",
        )
    report("Loading the libraries", 0, 1)
    from engine.compat import import_warnings

    with import_warnings.dropped():
        from engine.export.folder import Model
        from engine.export.making import make
        from engine.export.shards import put_together
    with put_together(taken, Path(next(iter(request["places"].values())))) as taken:
        parts = _parts(Model(taken, _config(run), report=report), request, make, report, send)
    return {"run": run.id, "checkpoint": taken.checkpoint.name, "parts": parts}


def _parts(model: Model, request: dict[str, Any], make: Make, report: Report, send: Send) -> list[dict[str, Any]]:
    """Each form that is asked for, made; one that fails leaves the others."""
    parts = []
    for form, place in request["places"].items():
        try:
            part = make(model, form, Path(place), request, report)
            if request["do"] == "push":
                from engine.export.push import upload

                part["url"] = upload(Path(place), request["repository"], private=request["private"], report=report)
        except Exception as problem:  # noqa: BLE001 - a part that fails leaves the others
            part = {"form": form, "path": place, "ok": False, "error": described(problem, "export")}
        if part["ok"] and form == "safetensors":
            model.merged = Path(place)
        parts.append(part)
        send(part=part)
    return parts


def _config(run: RunFolder) -> RunConfig:
    """The run's config as it was launched. Raises WorkbenchError with the first error in it."""
    from engine.config.files import parse
    from engine.rules import read

    return read(parse(run.read_config(), path=run.config).mapping).accepted()


if __name__ == "__main__":
    serve(answer, "export")
