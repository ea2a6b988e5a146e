"""What the inspector keeps between questions: processing classes, and opened data with their row indexes."""

from __future__ import annotations

import json
import os
from typing import Any

from engine.config.tree import RunConfig


class Warm:
    """Processing classes and opened data by what they were made from."""

    def __init__(self) -> None:
        self._processing: dict[str, Any] = {}
        self._plans: dict[str, Any] = {}
        self._rows: dict[tuple[str, float, int], Any] = {}

    def processing_class(self, config: RunConfig) -> Any:
        from engine.models.load import load_processing_class

        data = config.data
        images = [data.image_backend, data.min_pixels, data.max_pixels]
        key = json.dumps([config.model.name, config.model.tokenizer, config.model.revision, images], default=str)
        if key not in self._processing:
            self._processing[key] = load_processing_class(config)
        return self._processing[key]

    def plan(self, config: RunConfig, processing_class: Any, split: str) -> Any:
        """The opened data of a config; kept while neither the config nor a file changes, so row indexes stay."""
        from engine.data.preview import shown_plan

        files = [_stamp(source.path) for source in (config.data.train if split == "train" else config.data.eval)]
        key = json.dumps([config.model_dump(), files, split], default=str, sort_keys=True)
        if key not in self._plans:
            while len(self._plans) >= 4:
                old = self._plans.pop(next(iter(self._plans)))
                for source in old.sources:
                    source.rows.close()
            self._plans[key] = shown_plan(config, processing_class, split)
        return self._plans[key]

    def rows(self, path: str, split: str | None, **on_hub: Any) -> Any:
        """The rows of a source, kept while its file does not change; `on_hub` may give a data set's `subset` and `revision`."""
        from engine.data.plan import source_rows

        stamp = (f"{path} {split} {on_hub}", *_stamp(path))
        if stamp not in self._rows:
            while len(self._rows) >= 4:
                self._rows.pop(next(iter(self._rows))).close()
            self._rows[stamp] = source_rows(path, split, source=on_hub, by_parts=True)
        return self._rows[stamp]


def _stamp(path: str) -> tuple[float, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size
