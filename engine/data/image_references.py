"""Images of a row as references: the path of a file, or the bytes themselves as a data URI.

A reference is text, so prepared rows keep it and pixels are read when a batch is made. Paths stay below their base folder:
none climbs out of it, by its words or by a link. Libraries are needed for none of this.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import re
import stat
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.parts import FormatError, kind_of
from engine.errors import visible
from engine.run.inside import READ_WITHIN

DATA = "data:"
_EMBEDDED = re.compile(r"data:[\w.+/-]*(;[\w.+=-]*)*;base64,", re.ASCII)
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_SIGNATURES = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkq", "TU0A", "Qk")
"""How the base64 of a PNG, JPEG, GIF, WebP, TIFF or BMP begins."""
_PLAIN = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*", re.ASCII)


@dataclass(frozen=True)
class ImageFolder:
    """Where the images of a source are looked for."""

    path: str | None
    """The folder that relative paths begin at; None where a source has none."""
    only: bool = False
    """Whether no path may lead out of it, absolute ones included: a folder that the config names."""

    def reference(self, value: Any) -> str:
        """The reference of an image as a row gives it. Raises `FormatError` saying why there is none."""
        if isinstance(value, Mapping):
            value = _inside(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return embedded(bytes(value))
        if not isinstance(value, str) or not value.strip():
            raise FormatError(f"an image must be a path, bytes, base64 or a data URI; got {kind_of(value)}")
        if value.startswith(DATA):
            head = _EMBEDDED.match(value)
            return embedded(_decoded(value[head.end() :] if head else ""))
        if value.startswith(_SIGNATURES) and _PLAIN.fullmatch(value):
            return embedded(_decoded(value))
        if value.startswith("file://"):
            value = value.removeprefix("file://")
        elif _REMOTE.match(value):
            raise FormatError(
                f"{visible(value)[:200]}: images are read from files, not from a server", "Download it first."
            )
        return self._file(value)

    def _file(self, name: str) -> str:
        shown = visible(name)[:300]
        if self.path is None and not os.path.isabs(name):
            raise FormatError(
                f"{shown}: there is no folder that this path begins at", "Name it with data.image_base_dir."
            )
        base = os.path.abspath(self.path or os.sep)
        place = os.path.normpath(os.path.join(base, name))
        bound = self.only or not os.path.isabs(name)
        if "\0" in name or (bound and not _within(place, base)):
            raise FormatError(f"{shown}: the path leads out of {visible(base)}", "Images lie below their folder.")
        try:
            real = os.path.realpath(place, strict=True)
            status = os.stat(real)
        except OSError as problem:
            raise FormatError(f"{shown}: {_lacking(problem)}", _way_out(self, base, place)) from None
        if bound and not _within(real, os.path.realpath(base)):
            raise FormatError(f"{shown}: a link leads out of {visible(base)}", "Images lie below their folder.")
        if (within := os.environ.get(READ_WITHIN)) and not any(_within(real, each) for each in json.loads(within)):
            raise FormatError(f"{shown}: the path leads out of the folders that may be read", "Images lie below them.")
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{shown}: is no plain file, so it holds no image")
        if not status.st_size:
            raise FormatError(f"{shown}: the file is empty (0 bytes)")
        return place


def folder_of(source: str, base_dir: str | None) -> ImageFolder:
    """Where the images of a source are: below `data.image_base_dir`, else beside its file."""
    if base_dir is not None:
        return ImageFolder(base_dir, only=True)
    place = Path(source)
    if place.is_dir():
        return ImageFolder(str(place.absolute()))
    return ImageFolder(str(place.absolute().parent) if place.is_file() else None)


def references(images: Sequence[Any], folder: ImageFolder) -> list[str]:
    """The references of a row's images. Raises `FormatError` naming the first that has none."""
    found = []
    for number, image in enumerate(images, 1):
        try:
            found.append(folder.reference(image))
        except FormatError as problem:
            at = f"image {number} of {len(images)}: " if len(images) > 1 else ""
            raise FormatError(f"{at}{problem.message}", problem.hint) from None
    return found


def embedded(content: bytes, kind: str = "") -> str:
    """The bytes of an image as a reference; `kind` is its media type."""
    if not content:
        raise FormatError("the image is empty (0 bytes)")
    return f"{DATA}{kind};base64,{base64.b64encode(content).decode()}"


def content_of(reference: str) -> bytes | None:
    """The bytes that a reference holds itself; None for the path of a file."""
    return base64.b64decode(reference.partition(",")[2]) if reference.startswith(DATA) else None


def stamp_image(reference: str) -> list[int] | None:
    """Size in bytes and date of an image's file; None for one that is in its row, or gone."""
    try:
        status = None if reference.startswith(DATA) else os.stat(reference)
    except OSError:
        return None
    return None if status is None else [status.st_size, status.st_mtime_ns]


def changed_images(stamps: Mapping[str, list[int]]) -> bool:
    """Whether a file of these is gone or another than it was."""
    return any(stamp_image(reference) != stamp for reference, stamp in stamps.items())


def short(reference: str) -> str:
    """A reference as people read it: its path, or how many bytes it holds."""
    content = content_of(reference)
    return visible(reference) if content is None else f"an image of {len(content):,} bytes in the row"


def _inside(value: Mapping[str, Any]) -> Any:
    """What an object says of an image: its bytes before its path, as in Parquet files of `datasets`."""
    for name in ("bytes", "base64", "path", "url", "image", "file_name"):
        if value.get(name):
            found = value[name]
            return _decoded(found) if name == "base64" and isinstance(found, str) else found
    raise FormatError(f"an image must have bytes or a path; got {kind_of(dict(value))}")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise FormatError("the image is no whole base64") from None


def _within(place: str, base: str) -> bool:
    return place == base or place.startswith(base.rstrip(os.sep) + os.sep)


def _lacking(problem: OSError) -> str:
    if problem.errno == errno.ELOOP:
        return "is a loop of links"
    return "there is no such file" if problem.errno == errno.ENOENT else f"cannot be read ({problem.strerror})"


def _way_out(folder: ImageFolder, base: str, wanted: str) -> str:
    same = unicodedata.normalize("NFC", wanted)
    for form in ("NFC", "NFD"):
        if (other := unicodedata.normalize(form, same)) != wanted and os.path.exists(other):
            return f"A file of this name is there in another form of Unicode ({form}): write the path in that form."
    place = f"Relative paths begin at {visible(base)}"
    return f"{place}, by data.image_base_dir." if folder.only else f"{place}; data.image_base_dir names another folder."
