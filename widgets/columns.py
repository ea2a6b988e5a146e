"""The columns of a source in a notebook: a choice for each part, and three rows that follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from engine.errors import visible
from engine.session.column_map import DETECT, ColumnMap
from engine.session.draft import Draft
from widgets.asking import Asker
from widgets.protocol import Part, shown, verb

Name = Annotated[str, Field(max_length=400)]


class ColumnsPart(Part):
    """Answers what a view of columns asks. `edit` makes a change of the draft."""

    def __init__(
        self, draft: Draft, asker: Asker, edit: Callable[[Callable[[], object]], object] = lambda change: change()
    ) -> None:
        self.draft = draft
        self._asker, self._edit = asker, edit
        self._columns: ColumnMap | None = None

    @verb
    def columns_open(self, *, source: Annotated[int, Field(ge=0, le=1000)] = 0) -> dict[str, Any]:
        """Begin with one source of the draft as it stands."""
        self.close()
        self._columns = ColumnMap(self.draft, self._asker.ask, source=source)
        self._columns.send()
        return self._state()

    @verb
    def columns_choose(self, *, part: Name, column: Name) -> dict[str, Any]:
        """Take a column for a part; none with an empty name."""
        self._opened().choose(part, column)
        return self._state()

    @verb
    def columns_format(self, *, format: Name) -> dict[str, Any]:
        """Read the rows in another format."""
        self._opened().choose_format(format)
        return self._state()

    @verb
    def columns_news(self) -> dict[str, Any]:
        """How it stands."""
        return self._state()

    @verb
    def columns_keep(self) -> dict[str, Any]:
        """Write the choice into the draft."""
        self._edit(self._opened().keep)
        return self._state()

    def _opened(self) -> ColumnMap:
        if self._columns is None:
            self._columns = ColumnMap(self.draft, self._asker.ask)
        return self._columns

    def _state(self) -> dict[str, Any]:
        columns = self._opened()
        columns.poll()
        found = columns.found
        return {
            "done": not columns.open,
            "sources": [visible(each.path) for each in self.draft.config.data.train],
            "source": columns.source,
            "formats": list(columns.formats),
            "format": columns.format or DETECT,
            "title": visible(str(found.get("title", ""))),
            "columns": [[name, visible(str(text))] for name, text in found.get("columns", ())],
            "parts": [{**part, "column": columns.column(str(part["name"]))} for part in columns.parts],
            "rows": [
                {
                    "index": row["index"],
                    "says": [[shown(label, 100), shown(text, 400)] for label, text in row["says"]],
                    "problem": shown(row["problem"], 400),
                }
                for row in found.get("rows", ())
            ],
            "problem": shown(columns.problem or str(found.get("problem") or ""), 600),
            "changed": columns.changed,
        }

    def close(self) -> None:
        if self._columns is not None:
            self._columns.close()
            self._columns = None
