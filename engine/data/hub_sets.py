"""Data sets of the hub as the files they are made of, read by parts where they lie; `engine.data.hub_fetch` fetches them first.

Which commit a name means is asked once and kept in the run's folder (`engine.hub.COMMITS`), so that a run that goes on reads
the rows it began with, whatever the name has come to mean. `datasets` says which files make a split, `HfFileSystem` reads
parts of them with range requests, its own retries among them; no file is fetched before rows of it are needed, and then no
more than the part they stand in.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from engine.config.files import COMPRESSIONS, DATA_SUFFIXES, scheme_of
from engine.data.hub_entries import is_fetched
from engine.data.mapped import RowPlaces, Rows
from engine.data.parsing import Row
from engine.data.remote import first_line
from engine.data.rows import LineRows
from engine.errors import DataError, visible
from engine.hub import COMMIT, commit_of, reaching_hub, transport_error

BLOCK = 4 << 20
"""Bytes of a file of lines that are asked for at once."""
KEPT = 2
"""Blocks of a file that are kept while it is open."""
PIECE = 64 << 10
"""Bytes that are asked for first where a row's border is looked for outside of the block that is read."""
MANY = 256
"""Files of a data set up to which each is asked how many rows it has."""
TOGETHER = 16
"""Files that are asked for at once."""
LINES = (".jsonl", ".ndjson", ".json")
TEXTS = (".txt", ".text")
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
        and not path.lower().endswith(DATA_SUFFIXES)
        and path.count("/") <= 1
        and not local.is_absolute()
        and not local.exists()
    )


def is_part(split: str | None) -> bool:
    """Whether a split is written as a part of one, or a sum of several: `train[:10%]`, `train+test`."""
    return split is not None and ("[" in split or "+" in split)


@contextlib.contextmanager
def raises_data_error(name: str) -> Iterator[None]:
    """Ask for a data set inside; what the libraries raise becomes a `DataError`."""
    import datasets

    known = (OSError, ValueError, RuntimeError, ImportError, datasets.exceptions.DatasetsError, transport_error())
    try:
        with reaching_hub(name):
            yield
    except known as problem:
        raise _set_error(name, problem) from None


def builder_of(name: str, subset: str | None, revision: str | None) -> Any:
    """The builder of a data set at its commit. Raises `DataError` where the cache of `datasets` holds another one: where the
    hub does not give the set, `datasets` takes what was written there last, whatever the revision."""
    import datasets

    commit = commit_of(name, revision, kind="dataset")
    builder = datasets.load_dataset_builder(name, subset, revision=commit)
    if revision is not None and not COMMIT.fullmatch(commit or ""):
        raise DataError(
            f"is wanted at revision {visible(revision)}, and without the hub nobody knows which commit that is",
            "Go on where the hub answers, or name a commit that was loaded before as its revision.",
            path=visible(name),
        )
    if commit is not None and builder.hash != commit and COMMIT.fullmatch(commit):
        held = f"commit {visible(builder.hash[:8])}" if COMMIT.fullmatch(builder.hash or "") else "another version"
        raise DataError(
            f"is wanted at commit {commit[:8]}, which the hub does not give; the cache gives {held}",
            "Go on where the hub gives it, or name the commit of the cache as its revision.",
            path=visible(name),
        )
    return builder


def hub_files(name: str, split: str, subset: str | None = None, revision: str | None = None) -> list[HubFile] | None:
    """The files of one split in their order; None where the hub does not answer and all of the set is in the cache of
    `datasets`. Raises `DataError` for a set, a subset or a split that cannot be had."""
    with raises_data_error(name):
        try:
            found = builder_of(name, subset, revision).config.data_files
        except Exception:
            if not is_fetched(name, split, subset, revision):
                raise
            found = None  # what it raised is that there is no hub
        if not found:
            _refuse_without_hub(name)
            return None
        if split not in found:
            raise no_such_split(name, found, split)
        return with_sizes([str(url) for url in found[split]])


def no_such_split(name: str, splits: Iterable[Any], split: str) -> DataError:
    """The error of a split that a data set has not."""
    return DataError(
        f"holds the splits {', '.join(map(str, splits))}; there is no {visible(split)}",
        "Name one of them with split.",
        path=visible(name),
    )


def _refuse_without_hub(name: str) -> None:
    """Raises `DataError` where one of several processes does not reach the hub: those that do would read other shards."""
    from huggingface_hub import constants

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not constants.HF_HUB_OFFLINE:
        raise DataError(
            "the hub does not answer, and other processes of this run may reach it",
            "Try again, or set HF_HUB_OFFLINE=1 for all of them, so that each reads it whole from its cache.",
            path=visible(name),
        )


def read_by_parts(files: Sequence[HubFile]) -> bool:
    """Whether these files can be read by parts: Parquet, lines of JSON, and packed lines."""
    unsure = []
    for file in files:
        last, inner = kind_of(file.url)
        if last == ".json":
            unsure.append(file)
        elif last not in (".parquet", *LINES) and not (last in COMPRESSIONS and inner in (*LINES, *TEXTS)):
            return False
    with ThreadPoolExecutor(TOGETHER) as together:
        return all(together.map(_holds_lines, unsure[:MANY]))


def _holds_lines(file: HubFile) -> bool:
    return RangeFile(file).read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"


def kind_of(url: str) -> tuple[str, str]:
    """The last ending of a file's name, and the one before it."""
    last, inner = ("", "", *(suffix.lower() for suffix in PurePosixPath(url).suffixes))[:-3:-1]
    return last, inner


def rows_by_parts(name: str, split: str, subset: str | None = None, revision: str | None = None) -> Rows | None:
    """The rows of one split by number, each read where it lies; None where its files are not Parquet, whose footers number
    them, or very many, the split is a part of one, or the hub does not answer. Raises `DataError` as `hub_files` does."""
    files = None if is_part(split) else hub_files(name, split, subset, revision)
    if not files or len(files) > MANY or not all(file.url.lower().endswith(".parquet") for file in files):
        return None
    from engine.data.columnar import FarRows

    ranges = {file.url: RangeFile(file) for file in files}
    rows = FarRows(name, ranges)
    if not len(rows):
        raise DataError("the data set holds no rows", "Name another split or subset.", path=visible(name))
    for each in ranges.values():
        each.leave()  # the footers are kept; a file that rows are read of is opened again
    return rows


def with_sizes(urls: list[str]) -> list[HubFile]:
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

    def leave(self) -> None:
        """Let go of the connection's state until a part is asked for."""
        self._file = None

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
    """The bytes of a file on the hub as far as reading lines needs them. What begins in a block has the whole block fetched;
    what runs on behind it, and the border that is looked for with `border`, only a piece, a longer one where that is not
    enough."""

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._pieces: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return self._file.size

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(len(self))
        if start >= stop:
            return b""
        found = bytearray(self._block(start // BLOCK)[start % BLOCK :][: stop - start])
        while start + len(found) < stop:
            left = stop - start - len(found)
            found += self._piece(start + len(found), left)[:left]
        return bytes(found)

    def find(self, wanted: bytes, start: int = 0) -> int:
        """Where this one byte stands from `start` on; -1 where it does not."""
        if start >= len(self):
            return -1
        number, inside = divmod(start, BLOCK)
        place = self._block(number).find(wanted, inside)
        return number * BLOCK + place if place >= 0 else self.border(wanted, (number + 1) * BLOCK)

    def border(self, wanted: bytes, start: int) -> int:
        """As `find`, without fetching the block that `start` lies in."""
        size = PIECE
        while start < len(self):
            piece = self._piece(start, size)
            place = piece.find(wanted)
            if place >= 0:
                return start + place
            start, size = start + len(piece), min(2 * size, BLOCK)
        return -1

    def _piece(self, start: int, size: int) -> bytes:
        """Bytes from `start` on: those that are here, else about so many."""
        number = start // BLOCK
        if number in self._kept:
            return self._kept[number][start % BLOCK :]
        for begin, held in self._pieces.items():
            if begin <= start < begin + len(held):
                return held[start - begin :]
        while len(self._pieces) >= 2 * KEPT:
            self._pieces.popitem(last=False)
        self._pieces[start] = self._file.part(start, min(start + max(size, PIECE), len(self)))
        return self._pieces[start]

    def drop(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self._pieces.clear()

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

    def begins(self, byte: int) -> int:
        if not byte:
            return 0
        found = cast("_Blocks", self._map).border(b"\n", byte - 1)
        return found + 1 if found >= 0 else self.size_in_bytes

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

    def drop(self) -> None:
        cast("_Blocks", self._map).drop()

    def close(self) -> None:
        self._places.close()

    def _find(self) -> Iterator[tuple[int, int]]:
        return self._scan(self._map)
