"""One part of an export, whatever its form: written beside its place, compared, named."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError
from engine.export import modelfile, mxfp4_of_gguf, record
from engine.export.folder import Model, bytes_of, write_adapter, write_model, write_packed
from engine.export.parity import Parity
from engine.export.places import K_QUANTS, MXFP4, placed
from engine.run import checkpoint
from engine.run.store import called

Report = Callable[[str, int, int], None]


def make(model: Model, form: str, place: Path, request: dict[str, Any], report: Report) -> dict[str, Any]:
    """Writes one form to its place and says what was compared. Raises WorkbenchError where it cannot be made."""
    if form in ("adapter", "packed") and not model.source.adapted:
        raise WorkbenchError(
            f"{model.source.checkpoint.name}: holds all weights of the model and no adapter.",
            f"Take the model along: `workbench export {called(model.source.run)} --to safetensors`.",
        )
    if form == "gguf":
        from engine.export.to_gguf import refuse_early

        refuse_early(request["quant"])
    with placed(place, _bytes(model, form, request)) as part:
        if form == "modelfile":
            found = _modelfile(model, part, request)
        elif form == "gguf":
            found = _gguf(model, place, part, request, report)
        elif form == "packed":
            found = write_packed(model, part, report)
        elif form == "adapter":
            found = write_adapter(model, part, report, per_expert=request.get("per_expert", False))
        else:
            found = write_model(model, part, report)
        if part.is_dir():
            record.write(part, model.source, form, found.as_json(), report, place)
    if not place.is_dir():
        record.write(place, model.source, form, found.as_json(), report, place)
    return {
        "form": form,
        "path": str(place),
        "bytes": checkpoint.size_of(place) if place.is_dir() else place.stat().st_size,
        "ok": True,
        "parity": found.as_json(),
    }


def _bytes(model: Model, form: str, request: dict[str, Any]) -> int:
    """Room that a part needs while it is made: a GGUF of an adapter also that of the merged folder, a K-quant that of the 16
    bits it is made from, one in F32 twice that of 16 bits; where each expert has its own adapter, what gate and up share is there
    twice."""
    if form == "modelfile":
        return 1 << 20
    whole = bytes_of(model, form if form in ("adapter", "packed") else "safetensors")
    if form == "gguf":
        return (3 if request["quant"] in (*K_QUANTS, "F32") else 2) * whole
    return 2 * whole if form == "adapter" and request.get("per_expert", False) else whole


def _gguf(model: Model, place: Path, part: Path, request: dict[str, Any], report: Report) -> Parity:
    """Out of the merged folder, which is compared by its logits first; one that this export made already is taken."""
    from transformers import AutoConfig

    from engine.export.to_gguf import architecture, write

    architecture(AutoConfig.from_pretrained(model.whole).get_text_config())
    if request["quant"] == MXFP4:
        mxfp4_of_gguf.refuse_unserved(model)
    made = Path(request["places"].get("safetensors", ""))
    if model.merged is not None and made == model.merged:
        return write(model, made, part, request["quant"], report)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.part-", dir=place.parent) as room:
        folder = Path(room) / "merged"
        write_model(model, folder, report)
        return write(model, folder, part, request["quant"], report)


def _modelfile(model: Model, part: Path, request: dict[str, Any]) -> Parity:
    """Beside the GGUF of this export, or the folder. Raises WorkbenchError where there is neither."""
    known = [Path(request["places"][form]) for form in ("gguf", "safetensors") if form in request["places"]]
    weights = next((path for path in known if path.exists()), None)
    if weights is None:
        raise WorkbenchError(
            "modelfile: names weights beside it, and this export made none.", "Export with --to gguf --to modelfile."
        )
    turns, start = modelfile.turns_of(model.tokenizer, dict(model.config.model.chat_template_kwargs))
    stops = [str(each) for each in model.tokenizer.convert_ids_to_tokens(model.stops)]
    part.write_text(modelfile.text(turns, start, weights.name, stops), "utf-8")
    return Parity("the turns of the template", len(modelfile.CONVERSATIONS) + ("system" in turns), 0, stops)
