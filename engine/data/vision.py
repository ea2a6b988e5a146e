"""Pictures in rows: references until the batch is made, placeholders expanded by the processor, masks kept exact.

A prepared row keeps the references; its ids already hold as many picture tokens as the processor will ask for. Pixels are
read when a batch is collated. Only what the processing class itself offers is used, so any transformers processor fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.data.pretokenized import IGNORED
from engine.data.rows import refuse_special
from engine.errors import DataError, visible


def open_image(reference: Any) -> Any:
    """A picture from its reference: a path. Raises `DataError` when it is not there or is no picture."""
    from PIL import Image

    refuse_special(Path(str(reference)))
    try:
        with Image.open(Path(str(reference))) as image:
            return image.convert("RGB")
    except OSError as problem:
        reason = problem.strerror or "it is no picture"
        raise DataError(f"{visible(str(reference))}: no picture can be read ({reason})") from None


def expand(
    processing_class: Any, text: str, images: Sequence[Any], ids: list[int], labels: list[int]
) -> tuple[list[int], list[int]]:
    """The ids that the processor makes of text and pictures, with the labels carried over; pictures are never learned."""
    processor = getattr(processing_class, "image_processor", None)
    token = getattr(processing_class, "image_token_id", None)
    if processor is None or token is None:
        raise DataError("the rows hold pictures, and this model has no processor for them")
    if ids.count(token) != len(images):
        raise DataError(f"the text has {ids.count(token)} places for pictures and the row names {len(images)}")
    opened = [open_image(image) for image in images]
    full = [
        int(each) for each in processing_class(text=[text], images=opened, add_special_tokens=False)["input_ids"][0]
    ]
    expanded: list[int] = []
    for position, (each, label) in enumerate(zip(ids, labels, strict=True)):
        if each != token:
            expanded.append(label)
            continue
        rest = len(ids) - position - 1
        after = ids[position + 1] if rest else None
        start = len(expanded)
        while len(expanded) < len(full) - rest and full[len(expanded)] != after:
            expanded.append(IGNORED)
        if start == len(expanded):
            raise DataError("the processor makes no token of a picture")
    kept = [each for each, label in zip(full, expanded, strict=False) if label != IGNORED]
    if len(expanded) != len(full) or kept != [label for label in labels if label != IGNORED]:
        raise DataError("the processor rewrites the text around a picture, so its mask cannot be told")
    return full, expanded


def batch_images(processing_class: Any) -> Callable[[list[list[Any]]], dict[str, Any]] | None:
    """What the collator adds for pictures: the image processor's own tensors; nothing for a tokenizer alone."""
    processor = getattr(processing_class, "image_processor", None)
    if processor is None:
        return None

    def load(rows: list[list[Any]]) -> dict[str, Any]:
        opened = [[open_image(reference) for reference in row] for row in rows]
        if not any(opened):
            return {}
        return dict(processor([image for row in opened for image in row], return_tensors="pt"))

    return load
