"""Prepared rows written to a file that others read: the very ids and labels that training sees, a row a line or in Parquet.

Rows of language methods have `input_ids` and `labels` (-100 where nothing is learned), which TRL's SFTTrainer takes as they
are, and packs that are kept apart also `seq_lengths`; pairs have `prompt_ids`, `chosen_ids` and `rejected_ids`.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from engine.config.tree import RunConfig
from engine.data.cache_entries import Progress
from engine.data.prepare import prepare
from engine.data.prepared_rows import BATCH
from engine.errors import DataError, WorkbenchError, visible

_OURS = ("row", "rows", "documents")
"""Columns of prepared rows that teach nothing."""


def export_rows(
    config: RunConfig, processing_class: Any, split: str, place: Path, on_progress: Progress | None = None
) -> dict[str, Any]:
    """Write the prepared rows of a split to `place`, all or nothing: `path`, `rows`, `columns`, `bytes` and the `warnings`
    that say what was left out. Raises `WorkbenchError`."""
    prepared = prepare(config, processing_class, split, on_progress)
    dataset = prepared.dataset
    if "images" in dataset.column_names:
        raise DataError(
            f"data.{split}: rows with images cannot be exported, as their images are read while training",
            "Export rows without images.",
            path="",
        )
    dataset = dataset.remove_columns([name for name in _OURS if name in dataset.column_names])
    try:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".tmp")
        os.close(handle)
        try:
            _write(dataset, Path(name), place.suffix.lower(), on_progress)
            os.replace(name, place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as problem:
        raise WorkbenchError(
            f"{visible(str(place))} cannot be written ({problem.strerror or problem}).", "Name another file."
        ) from None
    return {
        "path": str(place),
        "rows": len(dataset),
        "columns": list(dataset.column_names),
        "bytes": place.stat().st_size,
        "warnings": list(prepared.warnings),
    }


def _write(dataset: Any, place: Path, suffix: str, on_progress: Progress | None) -> None:
    import pyarrow.parquet

    table = dataset.data.table
    if suffix == ".parquet":
        with pyarrow.parquet.ParquetWriter(place, table.schema.remove_metadata()) as file:
            for batch in table.to_batches(BATCH):
                file.write_batch(batch.replace_schema_metadata(None))
        return
    done = 0
    with place.open("w", encoding="utf-8") as lines:
        for batch in table.to_batches(BATCH):
            lines.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
            done += len(batch)
            if on_progress is not None:
                on_progress("writing", done, len(dataset))
