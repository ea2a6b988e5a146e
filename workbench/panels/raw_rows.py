"""Rows as they stand in their files, without any tokenizer: there before the first token is.

Owns the sources of a config opened for looking: `text(number)` counts over all sources as training does and never
waits for an index. Columnar files are left to the inspector, because reading them would load numpy into the app.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from engine.config.files import place_of
from engine.config.kinds import BUILTIN_ROWS
from engine.errors import WorkbenchError
from workbench.panels.paint import Line, clean, cut, paragraph

if TYPE_CHECKING:
    from engine.data.rows import Rows

CLIP = 20_000
GENERATED = 200  # rows of a generated source that are made for looking
COLUMNAR = (".parquet", ".arrow")
_EMBEDDED = re.compile(r"(data:image/[\w.+-]*;base64,)([A-Za-z0-9+/=]{64,})")


class RawRows:
    """The sources of one split. Opening may read the head of each file: make it in a thread."""

    def __init__(self, sources: list[Any], base: Path, seed: int = 0, *, most: int = GENERATED) -> None:
        self.problem = ""
        self._most = most
        self._rows: list[Rows | list[Any] | None] = []
        self._limits: list[int | None] = []
        for source in sources:
            if isinstance(source, Mapping):
                self._rows.append(self._open(source, base, seed))
                limit = source.get("rows")
                self._limits.append(limit if isinstance(limit, int) else None)

    def _open(self, source: Mapping[str, Any], base: Path, seed: int) -> Rows | list[Any] | None:
        path = place_of(str(source.get("path") or ""), base)
        if path in BUILTIN_ROWS:
            from engine.builtin import GENERATED

            split: Any = source.get("split") or "train"
            known = split in ("train", "eval")
            return list(GENERATED[path].of(source, split, seed, self._most)) if known else None
        local = Path(path)
        if local.is_dir() or local.suffix.lower() in COLUMNAR or not local.exists():
            return None
        from engine.data.rows import open_rows

        try:
            return open_rows(path)
        except WorkbenchError as problem:
            self.problem = self.problem or problem.message
            return None

    def known(self) -> int:
        """Rows that can be shown now, from the first on."""
        total = 0
        for rows, limit in zip(self._rows, self._limits, strict=True):
            if rows is None:
                break
            have = len(rows) if isinstance(rows, list) else rows.known()
            have = have if limit is None else min(have, limit)
            total += have
            if not isinstance(rows, list) and rows.length is None and have != limit:
                break
        return total

    def wait(self, number: int, seconds: float) -> None:
        """Give the indexes so much time to reach a row; for threads."""
        end = time.monotonic() + seconds
        for rows in self._rows:
            while rows is not None and not isinstance(rows, list) and rows.length is None and self.known() <= number:
                if time.monotonic() > end:
                    return
                time.sleep(0.01)

    def row(self, number: int) -> Any:
        """A row as an object where it is small, else its beginning as text; None where it cannot be shown now."""
        for rows, limit in zip(self._rows, self._limits, strict=True):
            if rows is None:
                return None
            have = len(rows) if isinstance(rows, list) else rows.known()
            have = have if limit is None else min(have, limit)
            if number < have:
                return self._read(rows, number)
            if not isinstance(rows, list) and rows.length is None and have != limit:
                return None
            number -= have
        return None

    @staticmethod
    def _read(rows: Rows | list[Any], number: int) -> Any:
        if isinstance(rows, list):
            return rows[number]
        if rows.size(number) > CLIP:
            return rows.text(number, CLIP) + " …"
        try:
            return rows[number]
        except WorkbenchError as problem:
            return f"{problem.message}\n{rows.text(number, 2000)}"

    def close(self) -> None:
        """Let go of the files."""
        for rows in self._rows:
            if rows is not None and not isinstance(rows, list):
                rows.close()


def raw_lines(row: Any, width: int) -> list[Line]:
    """A raw row for a person: a chat by its turns, other columns by name, anything else as text."""
    if not isinstance(row, Mapping):
        return _block("", row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str), width)
    blocks: list[tuple[str, str]] = []
    for name, value in row.items():
        turns = (
            value if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value) else None
        )
        if turns and all(_spoken(turn) for turn in turns):
            blocks += [_spoken(turn) or ("", "") for turn in turns]
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            blocks.append((str(name), text))
    gutter = min(18, max((cell_len(clean(label)) for label, _ in blocks), default=0) + 2)
    return [line for label, text in blocks for line in _block(label, text, width, gutter)]


def _spoken(turn: Mapping[str, Any]) -> tuple[str, str] | None:
    """Role and text of a turn in the two usual forms."""
    role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if role is None or (len(turn) > 2 and ("role" not in turn or turn.keys() - {"role", "content"})):
        return None
    return str(role), text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _block(label: str, text: str, width: int, gutter: int = 0) -> list[Line]:
    """A label at the left and the text beside it, its own line breaks kept."""
    room = max(8, width - gutter)
    head = cut(clean(label), gutter - 1)
    head += " " * (gutter - cell_len(head))
    drawn: list[Line] = []
    for part in _EMBEDDED.sub(_its_size, text)[:CLIP].split("\n"):
        for line in paragraph(clean(part), room, "value") or [[]]:
            drawn.append([(head if not drawn else " " * gutter, "dim"), *line])
    return drawn


def _its_size(image: re.Match[str]) -> str:
    """An image that stands in the row, without its bytes: they would push the words of the row off the screen."""
    return f"{image[1]}… ({len(image[2]) * 3 // 4:,} bytes)"
