"""Rows from Arrow: Parquet files, here or read by parts on the hub, and data sets of `datasets`.

Of a file one row group (Parquet) or a memory-mapped row (Arrow) is in memory at a time; who has several files of the hub open
drops the others' (`ParquetRows.drop`). Scripts in data sets are refused by the
`datasets` library itself since its version 4; nothing here turns that off. Imported only when such a source is opened.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from itertools import accumulate
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

from engine.data.cache_entries import Held
from engine.data.mapped import CountedRows
from engine.data.parsing import Row
from engine.errors import DataError, visible

TOGETHER = 16
"""Footers of files on the hub that are asked for at once."""
FOOTERS = 64 << 20
"""Bytes of footers of files on the hub that are kept, so that a file that is opened again is not asked for its own again."""
_footers: OrderedDict[str, Any] = OrderedDict()
_changing = threading.Lock()


class ArrowRows(CountedRows):
    """Rows of Arrow's tables."""

    _count = 0

    def __len__(self) -> int:
        return self._count

    def error(self, index: int, message: str, hint: str = "") -> DataError:
        return DataError(f"row {index}: {message}", hint, path=visible(self.path))


class ParquetRows(ArrowRows):
    kind = "parquet"

    def __init__(self, path: str, far: RawIOBase | None = None) -> None:
        """`far` reads a file that lies elsewhere by parts: its footer now, and a row group when rows of it are read. It may be one
        of several, and have no rows."""
        self.path = path
        try:
            self._file = parquet.ParquetFile(path, memory_map=True) if far is None else _far_file(path, far)
        except (arrow.ArrowException, OSError) as problem:
            reason = str(problem).splitlines()[0]
            raise DataError(f"not a whole Parquet file ({reason})", path=visible(path)) from None
        groups = range(self._file.metadata.num_row_groups)
        # The number of the row behind each row group.
        self.borders = list(accumulate(self._file.metadata.row_group(group).num_rows for group in groups))
        self._count = self.borders[-1] if self.borders else 0
        if not self._count and far is None:
            raise DataError("the file holds no rows", "Name another, or remove it from its folder.", path=visible(path))
        self._group: tuple[int, Any] = (-1, None)

    def __getitem__(self, index: int) -> Row:
        if not -self._count <= index < self._count:
            raise IndexError(index)
        index %= self._count
        group = bisect_right(self.borders, index)
        if self._group[0] != group:
            try:
                self._group = (group, self._file.read_row_group(group))
            except (arrow.ArrowException, OSError) as problem:
                raise self.error(index, f"the row group cannot be read ({str(problem).splitlines()[0]})") from None
        first = self.borders[group] - self._file.metadata.row_group(group).num_rows
        return self._group[1].slice(index - first, 1).to_pylist()[0]

    def drop(self) -> None:
        """Let go of the row group in memory; it is read again where rows of it are asked for."""
        self._group = (-1, None)


class SavedRows(ArrowRows):
    """A `datasets.Dataset`: from `save_to_disk` (a folder) or already loaded from the hub."""

    kind = "dataset"
    held: Held | None = None
    """The entry of the user's cache that they are mapped from."""

    def __init__(self, path: str, dataset: Any = None, split: str | None = None) -> None:
        import datasets

        self.path = path
        if dataset is None:
            try:
                dataset = datasets.load_from_disk(path)
            except (OSError, ValueError, KeyError, arrow.ArrowException) as problem:
                reason = str(problem).splitlines()[0]
                raise DataError(f"not a data set written by save_to_disk ({reason})", path=visible(path)) from None
        if isinstance(dataset, datasets.DatasetDict):
            split = split or ("train" if "train" in dataset else None)
            if split not in dataset:
                names = ", ".join(dataset)
                raise DataError(f"holds the splits {names}; name one with split", path=visible(path))
            dataset = dataset[split]
        self._dataset, self._count = dataset, len(dataset)
        # Images stay the bytes or paths that they are stored as.
        self._raw = dataset.with_format("arrow") if "Image(" in str(dataset.features) else None
        if not self._count:
            raise DataError("the data set holds no rows", "Name another split or subset.", path=visible(path))

    def __getitem__(self, index: int) -> Row:
        return dict(self._dataset[index]) if self._raw is None else self._raw[index].to_pylist()[0]


class FarRows(ArrowRows):
    """All rows of Parquet files that lie elsewhere, of which one row group is in memory."""

    kind = "dataset"

    def __init__(self, path: str, files: Mapping[str, RawIOBase]) -> None:
        """`files` by their addresses, each of which means one version of its file for ever."""
        self.path, self._files = path, list(files.items())
        self.content = " ".join(files)
        with ThreadPoolExecutor(TOGETHER) as together:
            counts = together.map(lambda file: len(ParquetRows(*file)), self._files)
            self._ends = list(accumulate(counts))
        self._count = self._ends[-1]
        self._open: tuple[int, ParquetRows] | None = None

    def __getitem__(self, index: int) -> Row:
        if not -self._count <= index < self._count:
            raise IndexError(index)
        index %= self._count
        number = bisect_right(self._ends, index)
        if self._open is None or self._open[0] != number:
            self._open = number, ParquetRows(*self._files[number])
        rows = self._open[1]
        return rows[index - self._ends[number] + len(rows)]


def _far_file(url: str, far: RawIOBase) -> Any:
    # The chunks of a row group that lie side by side are one request.
    file = parquet.ParquetFile(far, metadata=_footers.get(url), pre_buffer=True)
    with _changing:
        _footers[url] = file.metadata
        _footers.move_to_end(url)
        while sum(footer.serialized_size for footer in _footers.values()) > FOOTERS:
            _footers.popitem(last=False)
    return file
