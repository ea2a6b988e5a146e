"""Rows of a data set of the hub that are fetched before they are read: the files of the splits that are asked for, and of Parquet
those alone that hold the first rows, where no more are taken.

Files come through the hub's client into its cache, where `datasets` finds them; what it makes of them is an entry among the
prepared data in the user's cache, whole or absent, listed and removed like them. What `datasets` itself holds whole is taken
from there. Without the hub an entry is found by its commit, or, where nobody knows that, the one used last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.data.cache_entries import NOTE, Held, Progress, locked
from engine.data.hub_entries import about_of, entry_of, folder_of, last_used, note_of, splits_of
from engine.data.hub_sets import (
    HubFile,
    RangeFile,
    builder_of,
    is_part,
    kind_of,
    no_such_split,
    raises_data_error,
    with_sizes,
)
from engine.data.remote import KEEP_FREE
from engine.errors import Cancelled, DataError, redact, visible
from engine.hub import COMMIT, commit_of

if TYPE_CHECKING:
    from engine.data.columnar import SavedRows

TOGETHER = 8
"""Files that are fetched at once."""
_LOOK = 0.1
_UNWRITABLE = {errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
_PLACE = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<commit>[0-9a-f]{40})/(?P<path>.+)")
FETCHING, MAKING = "fetching", "reading what was fetched"


def hub_rows(
    name: str,
    split: str | None,
    subset: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    on_progress: Progress | None = None,
) -> SavedRows:
    """Rows of a data set, those files of it fetched that hold them, or from the cache when offline. `limit`: no more than so many
    of the first rows are taken. `on_progress` hears how many bytes are to be fetched before any is, and may raise `Cancelled`.
    Raises `DataError`."""
    from engine.data.columnar import SavedRows

    wanted, progress = split or "train", on_progress or (lambda what, done, total: None)
    with raises_data_error(name):
        commit = commit_of(name, revision, kind="dataset")
        known = commit if commit is not None and COMMIT.fullmatch(commit) else None
        # A share of a split, or what follows so many rows of it, is not among its first ones.
        limits = (None,) if is_part(wanted) else (None, limit)
        abouts = [about_of(name, subset, known, wanted, most) for most in dict.fromkeys(limits)]
        if known is not None and (found := next(filter(None, map(_held, map(entry_of, abouts))), None)) is not None:
            return _opened(name, found, wanted)
        try:
            builder = builder_of(name, subset, revision)
        except Exception:
            if known is None and (found := _held(last_used(abouts, revision))) is not None:
                return _opened(name, found, wanted)
            raise
        files = builder.config.data_files
        if known is None or not files or (Path(builder.cache_dir) / "dataset_info.json").is_file():
            builder.download_and_prepare()
            return SavedRows(name, builder.as_dataset(split=wanted))
        chosen, about = _needed(name, files, wanted, limit), abouts[0]
        if limit is not None and any(len(each) < len(files[one]) for one, each in chosen.items()):
            about = abouts[-1]
        note = note_of(about, revision)
        return _opened(name, _build_entry(builder, chosen, folder_of(about), note, progress), wanted)


def _needed(name: str, files: Mapping[Any, Any], wanted: str, limit: int | None) -> dict[str, list[HubFile]]:
    """The files to fetch, by their split. Raises `DataError` for a split that the set has not."""
    splits = list(map(str, files)) if "all" in splits_of(wanted) else splits_of(wanted)
    if unknown := next((each for each in splits if each not in files), None):
        raise no_such_split(name, files, unknown)
    chosen = {each: with_sizes([str(url) for url in files[each]]) for each in dict.fromkeys(splits)}
    if limit is None or is_part(wanted):
        return chosen
    return {each: list(_first(some, limit)) for each, some in chosen.items()}


def _first(files: Sequence[HubFile], limit: int) -> Iterator[HubFile]:
    """The files that hold so many of the first rows, where their footers say it, else all."""
    from engine.data.columnar import ParquetRows

    told = all(kind_of(file.url)[0] == ".parquet" for file in files)
    rows = 0
    for file in files:
        if told and rows >= limit:
            return
        yield file
        rows += len(ParquetRows(file.url, RangeFile(file))) if told and file is not files[-1] else 0


# -- fetching ----------------------------------------------------------------------------------------------------------
def _build_entry(
    builder: Any, chosen: Mapping[str, list[HubFile]], folder: Path, note: Mapping[str, Any], on_progress: Progress
) -> _Entry:
    """The entry with the rows of these files. Raises `DataError`, and what `on_progress` does."""
    from huggingface_hub import constants

    files = [file for some in chosen.values() for file in some]
    total, shown = sum(file.size for file in files), visible(str(note["copy"]["hub"]["name"]))
    with _writing(folder.parent, shown), locked(folder, on_progress) as report:
        if (folder / NOTE).is_file():
            return _Entry(folder, Held(folder))
        report(FETCHING, 0, total)
        _require_room(total, (folder.parent, Path(constants.HF_HUB_CACHE)), shown)
        here = _fetch(files, total, report)
        chosen = _with_rows(chosen, here, shown)
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            _prepare(builder, chosen, place / "rows", report)
            (place / "rows" / NOTE).write_text(json.dumps(note), "utf-8")
            os.rename(place / "rows", folder)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return _Entry(folder, Held(folder))  # nobody removes it while its lock is ours


def _with_rows(chosen: Mapping[str, list[HubFile]], here: Mapping[str, str], shown: str) -> dict[str, list[HubFile]]:
    """The files that hold rows: at a Parquet file without any `datasets` ends. Raises `DataError` where none does."""
    from pyarrow import parquet

    def has_rows(file: HubFile) -> bool:
        place = here.get(file.url, "") if kind_of(file.url)[0] == ".parquet" else ""
        return not place or parquet.read_metadata(place).num_rows > 0

    kept = {split: [*filter(has_rows, files)] for split, files in chosen.items()}
    if not any(kept.values()):
        raise DataError("the data set holds no rows", "Name another split or subset.", path=shown)
    return {split: files for split, files in kept.items() if files}


@contextlib.contextmanager
def _writing(store: Path, shown: str) -> Iterator[None]:
    """Write into this folder inside; that it cannot be written, or is full, becomes a `DataError` that says so."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as problem:
        if problem.errno not in _UNWRITABLE:
            raise
        reason = f"cannot be kept in {visible(redact(str(store)))} ({problem.strerror})"
        raise DataError(
            reason, "Free some space there, or let WORKBENCH_CACHE name another folder.", path=shown
        ) from None


def _require_room(total: int, places: Sequence[Path], shown: str) -> None:
    """Raises `DataError` where so many bytes do not fit onto one of these disks."""
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(place).free - total < KEEP_FREE:
            raise DataError(
                f"the {total:,} bytes of its files do not fit onto the disk of {visible(str(place))} (512 MiB are kept free)",
                "Free some space there, or let WORKBENCH_CACHE and HF_HOME name roomier folders.",
                path=shown,
            )


def _fetch(files: Sequence[HubFile], total: int, report: Progress) -> dict[str, str]:
    """Has these files in the hub's cache, and tells where. Raises what its client and `report` do."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    done, stop, here = dict.fromkeys((file.url for file in files), 0), threading.Event(), dict[str, str]()

    def fetch(file: HubFile) -> None:
        class Bar(tqdm):
            """Draws nothing, and tells how far the file is."""

            def __init__(self, *values: Any, **named: Any) -> None:
                super().__init__(*values, **{**named, "disable": True})

            def update(self, n: float | None = 1) -> None:
                if stop.is_set():
                    raise Cancelled("Fetching was given up.")
                done[file.url] += int(n or 0)

        if (place := _PLACE.fullmatch(file.url)) is not None:  # of another address `datasets` fetches it itself
            here[file.url] = hf_hub_download(
                place["name"], place["path"], repo_type="dataset", revision=place["commit"], tqdm_class=Bar
            )
        done[file.url] = file.size

    together = ThreadPoolExecutor(TOGETHER, thread_name_prefix="fetch")
    try:
        _watched(
            [together.submit(fetch, file) for file in files],
            lambda: report(FETCHING, min(sum(done.values()), total), total),
        )
    finally:
        stop.set()
        together.shutdown(wait=False, cancel_futures=True)
    return here


def _prepare(builder: Any, chosen: Mapping[str, list[HubFile]], into: Path, report: Progress) -> None:
    """Has `datasets` make its tables of these files alone in a folder."""
    from datasets.data_files import DataFilesDict, DataFilesList

    # Of this builder, which nobody else has: what the card says of all files does not hold for some.
    urls = {split: [file.url for file in some] for split, some in chosen.items()}
    builder.config.data_files = DataFilesDict(
        {split: DataFilesList(some, [(url,) for url in some]) for split, some in urls.items()}
    )
    about = builder.info
    about.splits = about.download_size = about.dataset_size = about.size_in_bytes = None
    alone = ThreadPoolExecutor(1, thread_name_prefix="prepare")
    try:
        making = alone.submit(builder.download_and_prepare, output_dir=str(into))
        _watched([making], lambda: report(MAKING, 0, 0))
    finally:
        alone.shutdown(wait=False)


def _watched(futures: Sequence[Future[Any]], look: Callable[[], None]) -> None:
    """Waits for these, with a look in between. Raises the first problem, and what `look` does."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, _LOOK, FIRST_EXCEPTION)
        for each in done:
            each.result()
        look()


# -- reading -----------------------------------------------------------------------------------------------------------
class _Entry(NamedTuple):
    """An entry, which nobody removes as long as `held` is there."""

    folder: Path
    held: Held


def _held(folder: Path | None) -> _Entry | None:
    """The entry, if it is still there: another process may have removed it since it was found."""
    if folder is None:
        return None
    try:
        held = Held(folder)
    except FileNotFoundError:
        return None
    return _Entry(folder, held) if (folder / NOTE).is_file() else None


def _opened(name: str, entry: _Entry, wanted: str) -> SavedRows:
    """The rows of an entry, as the expression of a split picks them; it is held as long as they are there."""
    import datasets

    from engine.data.columnar import SavedRows

    folder, held = entry
    splits = [str(each) for each in datasets.DatasetInfo.from_directory(str(folder)).splits or ()]
    tables = {split: _table(folder, split) for split in splits}
    if wanted in tables:
        rows = tables[wanted]
    else:
        wanted = "+".join(splits) if wanted == "all" else wanted
        counts = {split: len(table) for split, table in tables.items()}
        parts = [
            tables[each.splitname].select(
                range(each.from_ or 0, counts[each.splitname] if each.to is None else each.to)
            )
            for each in datasets.ReadInstruction.from_spec(wanted).to_absolute(counts)
        ]
        rows = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    found = SavedRows(name, rows)
    found.held = held
    return found


def _table(folder: Path, split: str) -> Any:
    """The rows of one split, mapped from the files that `datasets` wrote."""
    import datasets

    own = re.compile(rf".*-{re.escape(split)}(-\d+-of-\d+)?\.arrow")
    tables = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.iterdir()) if own.fullmatch(file.name)]
    return tables[0] if len(tables) == 1 else datasets.concatenate_datasets(tables)
