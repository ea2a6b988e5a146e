"""Compressed single files (.gz .bz2 .zst .xz): a quick look at the beginning, and unpacking to a scratch file on disk.

A compressed stream has no random access, so it is unpacked once into an unnamed file in the scratch folder (never into
memory) and mapped from there. Unpacking stops before the disk is full. Archives are refused elsewhere, by name.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from engine.config.files import COMPRESSIONS as COMPRESSIONS
from engine.errors import DataError, visible

CHUNK = 1 << 20
KEEP_FREE = 512 << 20


class Unpacked:
    """The unpacked bytes of a compressed file, as an unnamed file that is gone when it is closed."""

    def __init__(self, source: Path, suffix: str) -> None:
        self.source, self._suffix = source, suffix
        self.progress = 0.0

    def wait(self, cancelled: Callable[[], bool]) -> io.BufferedReader:
        """Unpack now, in the calling thread. Raises `DataError` when the stream is broken or the disk fills up."""
        import shutil
        import tempfile

        size = max(self.source.stat().st_size, 1)
        folder = os.environ.get("WORKBENCH_SCRATCH") or tempfile.gettempdir()
        try:
            target = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it outlives this call
        except OSError as problem:
            raise DataError(
                f"is packed and cannot be unpacked into {visible(folder)}: {problem.strerror or problem}",
                "Let WORKBENCH_SCRATCH name a folder that you can write to, or unset it.",
                path=visible(str(self.source)),
            ) from problem
        written = 0
        with self.source.open("rb") as packed, unpacking(packed, self._suffix) as stream:
            while not cancelled():
                chunk = read_unpacked(stream, CHUNK, self.source)
                if not chunk:
                    break
                if written % (64 * CHUNK) < CHUNK and shutil.disk_usage(folder).free < KEEP_FREE:
                    raise DataError(
                        f"unpacking fills the disk of {visible(folder)} (512 MiB are kept free)",
                        "Unpack it elsewhere, or name a roomier folder in WORKBENCH_SCRATCH.",
                        path=visible(str(self.source)),
                    )
                target.write(chunk)
                written += len(chunk)
                self.progress = min(packed.tell() / size, 1.0)
        target.flush()
        target.seek(0)
        return io.BufferedReader(io.FileIO(os.dup(target.fileno())))


def unpacked_head(source: Path, suffix: str, limit: int) -> bytes:
    """The first `limit` unpacked bytes."""
    with source.open("rb") as packed, unpacking(packed, suffix) as stream:
        return read_unpacked(stream, limit, source)


def unpacking(packed: IO[bytes], suffix: str) -> IO[bytes]:
    """The stream's own library is imported here: most data is not compressed, and each look at a file would pay for it."""
    if suffix == ".gz":
        import gzip

        return cast("IO[bytes]", gzip.open(packed))
    if suffix == ".bz2":
        import bz2

        return bz2.open(packed)
    if suffix == ".xz":
        import lzma

        return lzma.LZMAFile(packed)
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(packed, closefd=False)


def read_unpacked(stream: IO[bytes], limit: int, source: Path) -> bytes:
    import lzma
    import zlib

    try:
        return stream.read(limit)
    except (EOFError, OSError, lzma.LZMAError, zlib.error, ValueError) as problem:
        raise _broken(source, problem) from None
    except Exception as problem:  # zstandard's own error type is not importable without it
        if type(problem).__name__ != "ZstdError":
            raise
        raise _broken(source, problem) from None


def _broken(source: Path, problem: Exception) -> DataError:
    message = f"the compressed stream is broken or cut off ({str(problem).lower().rstrip('.')})"
    return DataError(message, "Copy the file again.", path=visible(str(source)))
