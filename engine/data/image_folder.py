"""A folder of images with captions, as `datasets` calls it an image folder: rows beside the images that they speak of.

Either `metadata.jsonl`, `metadata.csv` or `metadata.parquet` names an image in each row (`file_name`, or `file_names` for
several), or each image has a text file of its name beside it, its caption. Rows get an `images` column; paths stay
relative to the folder, which none may leave. Standard library only, Parquet aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.data.mapped import CountedRows, DerivedRows, Rows
from engine.data.parsing import Row
from engine.errors import DataError, visible

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
"""How the names of images end beside which captions are looked for."""
FILES = ("file_name", "file_names")
CAPTIONS = ("text", "caption")


def metadata_of(folder: Path) -> Path | None:
    """The file of the rows of a folder of images; None where it has none."""
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


def is_image_folder(folder: Path) -> bool:
    """Whether a folder holds images with their captions."""
    if not folder.is_dir():
        return False
    return metadata_of(folder) is not None or any(each.with_suffix(".txt").is_file() for each in _images(folder))


def _images(folder: Path) -> list[Path]:
    return sorted(
        each for each in folder.iterdir() if each.suffix.lower() in SUFFIXES and not each.name.startswith(".")
    )


class MetadataRows(DerivedRows):
    """The rows of a metadata file, the images that they name as `images`; a caption alone becomes a `text`."""

    kind = "imagefolder"

    def __init__(self, folder: Path, rows: Rows) -> None:
        self.path, self._rows = str(folder), rows
        self.note = "a folder of images; " + (rows.note or f"{Path(rows.path).name} says what they show")

    @property
    def length(self) -> int | None:
        return self._rows.length

    @property
    def progress(self) -> float:
        return self._rows.progress

    def wait(self, timeout: float | None = None) -> int | None:
        return self._rows.wait(timeout)

    def __getitem__(self, index: int) -> Row:
        row = dict(self._rows[index])
        named = [column for column in FILES if row.get(column)]
        if not named:
            raise self.error(index, f"column {FILES[0]} is missing or empty: the row names no image")
        files = [each for column in named for each in (row[column] if isinstance(row[column], list) else [row[column]])]
        return _row(files, {name: value for name, value in row.items() if name not in FILES})

    def first(self, count: int) -> list[Row]:
        return [self[index] for index in range(min(count, len(self._rows.first(count))))]

    def known(self) -> int:
        return self._rows.known()


class CaptionRows(CountedRows):
    """Images in the order of their names, each with the text file of its name."""

    kind = "imagefolder"
    note = "a folder of images; text files beside them say what they show"

    def __init__(self, folder: Path) -> None:
        self.path, self._images = str(folder), _images(folder)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Row:
        image = self._images[index]
        caption = image.with_suffix(".txt")
        try:
            text = caption.read_text("utf-8").strip()
        except FileNotFoundError:
            raise self.error(index, f"there is no {visible(caption.name)} beside it", "Each image has one.") from None
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
            raise self.error(index, f"{visible(caption.name)} cannot be read ({reason})") from None
        if not text:
            raise self.error(index, f"{visible(caption.name)} is empty", "A caption says what the image shows.")
        return _row([image.name], {"text": text})

    def named(self, index: int) -> str:
        return visible(self._images[index].name)

    def error(self, index: int, message: str, hint: str = "") -> DataError:
        return DataError(f"row {index}, {self.named(index)}: {message}", hint, path=visible(self.path))


def _row(files: list[Any], others: Mapping[str, Any]) -> Row:
    row = {"images": files, **others}
    if not row.get(CAPTIONS[0]) and isinstance(row.get(CAPTIONS[1]), str):
        row[CAPTIONS[0]] = row.pop(CAPTIONS[1])
    return row
