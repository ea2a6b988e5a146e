"""The first rows of a source as a person wants to see them: what they are, why we think so, what they hold.

Made to be called from threads; bad input is part of the answer. Columnar files are left to the inspector, because reading
them would import numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.files import place_of, scheme_of
from engine.config.kinds import BUILTIN_ROWS
from engine.errors import WorkbenchError, visible

SHOWN_ROWS = 3
CLIP = 600
SMALL = 1 << 16  # bytes of a row that is parsed for looking; a larger one is shown as it stands
COLUMNAR = (".parquet", ".arrow")


@dataclass(frozen=True)
class SourcePreview:
    """A first look at one source: what it is, why we think so, and its first rows as they stand."""

    path: str
    format: str = ""
    why: str = ""
    problems: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    used: tuple[tuple[str, str], ...] = ()
    """(part, column)"""
    rows: tuple[str, ...] = ()
    count: int | None = None
    later: bool = False
    """True where only the inspector can say more."""


def first_rows_of(source: Mapping[str, Any], base: Path, seed: int = 0) -> SourcePreview:
    """The first rows of a source and the format they have; `seed` is the run's, which the built-in rows hang on."""
    path = place_of(str(source.get("path") or ""), base)
    if path in BUILTIN_ROWS:
        return _preview_generated(path, source, seed)
    if scheme_of(path):
        return SourcePreview(
            path, problems=("not on this machine; it is fetched when its rows are shown or counted",), later=True
        )
    local = Path(path)
    if not local.exists():
        remote = not path.startswith(("/", ".", "~")) and path.count("/") == 1
        words = "not on this machine; the hub is asked at launch" if remote else f"{visible(path)}: no such file"
        return SourcePreview(path, problems=(words,), later=remote)
    if not _readable_here(local):
        return SourcePreview(path, later=True)
    from engine.data.detect import detect
    from engine.data.parts import columns_of
    from engine.data.rows import open_rows

    try:
        rows = open_rows(path)
        try:
            detection = detect(
                rows,
                columns_of(source.get("columns"), source.get("properties"), source.get("roles")),
                source.get("format") or None,
            )
            texts = []
            for index in range(SHOWN_ROWS):
                try:
                    texts.append(condensed(rows[index]) if rows.size(index) < SMALL else rows.text(index, CLIP))
                except (IndexError, WorkbenchError):
                    break
            rows.wait(0.5)
            return SourcePreview(
                path,
                detection.format or "",
                detection.why,
                tuple(detection.problems),
                tuple(map(str, detection.example or ())),
                tuple(detection.columns.items()),
                tuple(texts),
                rows.length,
            )
        finally:
            rows.close()
    except (WorkbenchError, OSError) as problem:
        return SourcePreview(path, problems=(str(problem),))


def _readable_here(place: Path) -> bool:
    """Whether no library is needed to read a source: a text file, or a folder of images with rows of text."""
    from engine.data.image_folder import is_image_folder, metadata_of

    if place.is_dir():
        return is_image_folder(place) and (metadata_of(place) or place).suffix not in COLUMNAR
    return place.suffix.lower() not in COLUMNAR


def condensed(row: Mapping[str, Any]) -> str:
    """A row without the punctuation of its format: `messages: user · What day is it? · assistant · 2021-03-03`."""
    return "  ".join(f"{column}: {' · '.join(_leaves(value))}" for column, value in row.items())[:CLIP]


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value[:50]:
            yield from _leaves(item)
    elif value is not None:
        yield str(value)


def _preview_generated(path: str, source: Mapping[str, Any], seed: int) -> SourcePreview:
    from engine.builtin import GENERATED

    split, known = str(source.get("split") or "train"), GENERATED[path]
    try:
        rows = known.of(source, split, seed, SHOWN_ROWS)
    except (ValueError, WorkbenchError) as problem:
        return SourcePreview(path, problems=(str(problem),))
    texts = tuple(condensed(row) for row in rows)
    return SourcePreview(
        path, known.format, known.about, (), known.columns, (), texts, known.total(split, source.get("rows"))
    )
