"""The files of a source that is streamed: those of a folder of shards, or itself. Standard library only: forms ask it."""

from __future__ import annotations

from pathlib import Path

from engine.config.files import COMPRESSIONS
from engine.data.image_folder import is_image_folder
from engine.errors import DataError, visible

SHARDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""Files that a folder of shards may hold."""


def paths_of(path: str) -> list[str]:
    """The files of a source: those of a folder of shards in the order of their names, or the source itself."""
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        return [path]
    if is_image_folder(folder):
        raise DataError("is a folder of images, which is not streamed", "Leave data.streaming out.", path=visible(path))
    found = sorted(str(file) for file in folder.iterdir() if _is_shard(file))
    if not found:
        raise DataError(f"is a folder without files of rows ({', '.join(SHARDS)})", "Name another.", path=visible(path))
    return found


def _is_shard(file: Path) -> bool:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes = suffixes[:-1]
    return bool(suffixes) and suffixes[-1] in SHARDS and file.is_file() and not file.name.startswith((".", "_"))
