"""Prepared rows as an Arrow file: appended row by row, and mapped into memory without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.data.prepared_rows import BATCH, Row


class ArrowFile:
    """Rows appended to an Arrow stream that `datasets` maps without copying. Types are fixed by our own columns."""

    def __init__(self, path: Path, types: Mapping[str, str] | None = None) -> None:
        """`types` names the Arrow types of columns that are not lists of token ids."""
        self._path, self._types = path, types or {}
        self._rows: list[Row] = []
        self._writer: Any = None
        self._schema: Any = None

    def __enter__(self) -> ArrowFile:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._flush()
                if self._writer is not None:
                    self._writer.close()
        finally:
            self._file.close()

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as arrow

        if not self._rows:
            return
        if self._writer is None:
            kinds = {"row": arrow.int64(), "images": arrow.list_(arrow.string()), "rows": arrow.list_(arrow.int64())}
            own = {"floats": arrow.list_(arrow.float32())}
            kinds |= {name: own.get(kind) or getattr(arrow, kind)() for name, kind in self._types.items()}
            names = list(dict.fromkeys(name for row in self._rows for name in row))
            self._schema = arrow.schema([(name, kinds.get(name, arrow.list_(arrow.int32()))) for name in names])
            self._writer = arrow.ipc.new_stream(self._file, self._schema)
        columns = {name: [row.get(name) for row in self._rows] for name in self._schema.names}
        self._writer.write_table(arrow.table(columns, schema=self._schema))
        self._rows.clear()


def open_rows(path: Path) -> Any:
    """The rows of an Arrow file as a data set, mapped."""
    from datasets import Dataset

    return Dataset.from_file(str(path))


def sizes_of(dataset: Any) -> list[int]:
    """How many tokens each row has."""
    import pyarrow.compute as compute

    return compute.list_value_length(dataset.data.column("input_ids")).to_pylist()
