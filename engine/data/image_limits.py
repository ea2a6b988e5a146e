"""What an image may be, judged by its header alone: the same before launch and when its pixels are read. Standard library only."""

from __future__ import annotations

import struct
import zlib
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
LARGEST = 89_478_485
"""Pixels of the largest image that is read; more is what Pillow warns of as a decompression bomb."""
UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, struct.error, zlib.error)
"""What Pillow raises for a file that is damaged: for a TIFF a TypeError or KeyError too, for a GIF whatever its bytes lead to."""
BOMB = f"has more than {2 * LARGEST:,} pixels, as only a decompression bomb has"
"""What is said of an image that Pillow itself does not open."""


def why_refused(image: Any) -> str:
    """Why an image that Pillow has opened is not read, as the end of a sentence about it; empty where it is."""
    width, height = image.size
    if image.mode == "F":
        return "has fractions for pixels, and which of them is white cannot be told"
    if width * height > LARGEST:
        return f"has {width:,} x {height:,} pixels, more than the {LARGEST:,} that are read"
    if width * height < 2:
        return "is one pixel, which shows nothing"
    # A photo of a phone may bring others beside it in its file (MPO): the first is the photo.
    if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":
        what = "pages" if image.format == "TIFF" else "frames"
        return f"has {frames} {what}, and a model sees one image"
    return ""
