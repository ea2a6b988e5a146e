"""Data sets of the hub: loaded whole by `datasets`, or as the files they are made of, read by parts where they lie.

Which commit a name means is asked once and kept in the run's folder (`engine.hub.COMMITS`), so that a run that goes on reads
the rows it began with, whatever the name has come to mean. `datasets` says which files make a split, `HfFileSystem` reads
parts of them with range requests, its own retries among them; no file is fetched before rows of it are needed, and then no
more than the part they stand in.
"""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from engine.config.files import scheme_of
from engine.data.mapped import RowPlaces, Rows
from engine.data.parsing import Row
from engine.data.remote import first_line
from engine.data.rows import LineRows
from engine.errors import DataError, visible
from engine.hub import commit_of, reaching_hub

if TYPE_CHECKING:
    from engine.data.columnar import SavedRows

BLOCK = 4 << 20
"""Bytes of a file of lines that are asked for at once."""
KEPT = 2
"""Blocks of a file that are kept while it is open."""
_CHOICES = re.compile(r"(?:Available|available configs): \[(.*?)\]", re.DOTALL)


class HubFile(NamedTuple):
    """A file of a data set on the hub."""

    url: str
    """`hf://datasets/NAME@COMMIT/path`."""
    size: int
    """Bytes."""


def is_hub_set(path: str) -> bool:
    """Whether the path of a source is the name of a data set on the hub, as long as nothing here is called so."""
    local = Path(path)
    return (
        not scheme_of(path)
        and not path.startswith("builtin/")
        and not local.suffix
        and path.count("/") <= 1
        and not local.is_absolute()
        and not local.exists()
    )


def hub_rows(name: str, split: str | None, subset: str | None = None, revision: str | None = None) -> SavedRows:
    """A data set from the hub, all of it fetched (or from its local cache when offline). Raises `DataError`."""
    import datasets

    from engine.data.columnar import SavedRows

    try:
        with reaching_hub(name):
            commit = commit_of(name, revision, kind="dataset")
            loaded = datasets.load_dataset(name, subset, split=split or "train", revision=commit)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as problem:
        raise _set_error(name, problem) from None
    return SavedRows(name, loaded)


def hub_files(name: str, split: str, subset: str | None = None, revision: str | None = None) -> list[HubFile] | None:
    """The files of one split in their order; None where the hub does not answer and all of the set is in the cache of
    `datasets`. Raises `DataError` for a set, a subset or a split that cannot be had."""
    import datasets

    try:
        with reaching_hub(name):
            commit = commit_of(name, revision, kind="dataset")
            builder = datasets.load_dataset_builder(name, subset, revision=commit)
            found = builder.config.data_files
            if not found:
                return None
            if split not in found:
                raise DataError(
                    f"holds the splits {', '.join(map(str, found))}; there is no {visible(split)}",
                    "Name one of them with split.",
                    path=visible(name),
                )
            return _with_sizes([str(url) for url in found[split]])
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as problem:
        raise _set_error(name, problem) from None


def rows_by_parts(name: str, split: str, subset: str | None = None, revision: str | None = None) -> Rows | None:
    """The rows of one split by number, each read where it lies; None where its files are not Parquet, whose footers number
    them, or the hub does not answer. Raises `DataError` as `hub_files` does."""
    files = hub_files(name, split, subset, revision)
    if not files or not all(file.url.lower().endswith(".parquet") for file in files):
        return None
    from engine.data.columnar import FarRows

    return FarRows(name, {file.url: RangeFile(file) for file in files})


def _with_sizes(urls: list[str]) -> list[HubFile]:
    """Each file with its size; a folder is listed once."""
    files, sizes = _file_system(), dict[str, int]()
    for folder in dict.fromkeys(url.rpartition("/")[0] for url in urls):
        for entry in files.ls(folder, detail=True):
            sizes[f"hf://{entry['name']}"] = int(entry.get("size") or 0)
    return [HubFile(url, sizes[url] if url in sizes else int(files.info(url)["size"])) for url in urls]


def _set_error(name: str, problem: Exception) -> DataError:
    """What the libraries say of a data set, as one sentence with the way out."""
    if isinstance(problem, DataError):
        return problem
    causes = [problem, *filter(None, (problem.__cause__, problem.__context__))]
    kinds, shown, said = {type(cause).__name__ for cause in causes}, visible(name), str(problem)
    if "GatedRepoError" in kinds or "gated" in said:
        page = f"https://huggingface.co/datasets/{shown}"
        todo = f"Ask for access on {page}, and log in with `hf auth login`."
        return DataError("is a gated data set of the hub, which you may not read", todo, path=shown)
    if "RepositoryNotFoundError" in kinds or "cannot be accessed" in said:
        todo = "Check the path; for a private data set log in with `hf auth login`."
        return DataError("is no local file, and the hub has no such data set that you may read", todo, path=shown)
    if "RevisionNotFoundError" in kinds:
        return DataError("has no such revision on the hub", "Check revision: a branch, a tag or a commit.", path=shown)
    if choices := _CHOICES.search(said):
        names = ", ".join(re.findall(r"['\"]([^'\"]+)['\"]", choices[1]))
        message = f"has the subsets {visible(names)}, and {'no such one' if 'not found' in said else 'none is named'}"
        return DataError(message, "Name one of them with subset.", path=shown)
    reason = first_line(problem)
    message = f"is no local file, and as a data set on the hub it cannot be loaded ({reason})"
    return DataError(message, "Check the path; without a network use a local file.", path=shown)


# -- parts of files ----------------------------------------------------------------------------------------------------
def _file_system() -> Any:
    from huggingface_hub import HfFileSystem, constants

    return HfFileSystem(endpoint=constants.ENDPOINT)


class RangeFile(io.RawIOBase):
    """A file of the hub as one that can be read and sought in; each read is a range request."""

    def __init__(self, file: HubFile) -> None:
        self.url, self.size, self._at = file.url, file.size, 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size is None or size < 0 else min(self._at + size, self.size)
        found = self.part(self._at, stop)
        self._at += len(found)
        return found

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def part(self, start: int, stop: int) -> bytes:
        """These bytes. Raises `DataError` where they cannot be had, once the hub's client has tried six times."""
        if start >= stop:
            return b""
        try:
            if self._file is None:
                # Nothing is read ahead: whoever reads knows how much is needed.
                self._file = _file_system().open(self.url, "rb", cache_type="none", size=self.size)
            self._file.seek(start)
            found = bytes(self._file.read(stop - start))
        except Exception as problem:  # noqa: BLE001 - the client's errors are of several libraries
            raise self._error(problem) from None
        if len(found) != stop - start:
            message = f"{len(found):,} bytes came where {stop - start:,} were asked for"
            raise DataError(message, "See what stands between this machine and the hub.", path=self.shown)
        return found

    @property
    def shown(self) -> str:
        return visible(self.url)

    def _error(self, problem: Exception) -> DataError:
        kinds = {type(problem).__name__, type(problem.__cause__).__name__}
        if "GatedRepoError" in kinds:
            return DataError(
                "is of a gated data set, which you may not read", "Ask for access on its page.", path=self.shown
            )
        if kinds & {"EntryNotFoundError", "RemoteEntryNotFoundError", "RepositoryNotFoundError", "FileNotFoundError"}:
            return DataError("is gone from the hub", "See whether its data set is still there.", path=self.shown)
        message = f"cannot be read from the hub ({first_line(problem)})"
        return DataError(message, "See whether the hub answers, and resume the run.", path=self.shown)


class _Blocks:
    """The bytes of a file on the hub as far as reading lines needs them: by slice, and searched for a line's end."""

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return self._file.size

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(len(self))
        found = []
        while start < stop:
            number, inside = divmod(start, BLOCK)
            piece = self._block(number)[inside : inside + stop - start]
            found.append(piece)
            start += len(piece)
        return b"".join(found)

    def find(self, wanted: bytes, start: int = 0) -> int:
        """Where this one byte stands from `start` on; -1 where it does not."""
        while start < len(self):
            number, inside = divmod(start, BLOCK)
            place = self._block(number).find(wanted, inside)
            if place >= 0:
                return number * BLOCK + place
            start = (number + 1) * BLOCK
        return -1

    def _block(self, number: int) -> bytes:
        if number not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            self._kept[number] = self._file.part(number * BLOCK, min((number + 1) * BLOCK, len(self)))
        self._kept.move_to_end(number)
        return self._kept[number]


class HubLines(LineRows):
    """A file of the hub with an object of JSON a line. Its rows are named by the byte at which they begin: counting lines would
    fetch all before them."""

    def __init__(self, file: HubFile) -> None:
        self.path = file.url
        self._unpacked = None
        self._map = cast("bytes", _Blocks(RangeFile(file)))
        self._places = RowPlaces(self.path, self._find)

    def __getitem__(self, index: int) -> Row:
        start, end = self._places.of(index)
        try:
            return self._parse(bytes(self._map[start:end]), 1, 1)
        except DataError as problem:
            said = re.sub(rf"^{re.escape(visible(self.path))}(:\d+)*: ", "", problem.message)
            raise self.error(index, said, problem.hint) from None

    def error(self, index: int, message: str, hint: str = "") -> DataError:
        return DataError(f"{self.named(index)}: {message}", hint, path=visible(self.path))

    def place(self, index: int) -> tuple[str, int | None]:
        return self.path, None

    def named(self, index: int) -> str:
        return f"the row at byte {index:,}"

    def close(self) -> None:
        self._places.close()

    def _find(self) -> Iterator[tuple[int, int]]:
        return self._scan(self._map)
