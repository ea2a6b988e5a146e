"""Picking the columns of a source: a choice for each part, three rows that follow it, and the draft once it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.config.files import place_of
from engine.config.tree import fields
from engine.errors import UsageError, WorkbenchError
from engine.session.collector import Ask, NewestQuestion
from engine.session.draft import Draft

DETECT = "detected"
"""The choice of no format: it is told by the columns."""
NONE = ""
"""The choice of no column for a part."""


class ColumnMap:
    """One source's columns as they are picked. `wake` may come from any thread; then `poll` takes what came."""

    def __init__(self, draft: Draft, ask: Ask, wake: Callable[[], object] = lambda: None, source: int = 0) -> None:
        self.draft, self.source = draft, source
        self.wake = wake
        self._question = NewestQuestion(ask, lambda: self.wake())
        entries = draft.config.data.train
        if not 0 <= source < len(entries) or not entries[source].path:
            raise UsageError(f"{fields.data.train.title}: there is none yet.", "Name a source in the step Data.")
        self.entry = entries[source]
        self.format: str | None = self.entry.format
        self.columns: dict[str, str] = dict(self.entry.columns)
        self._picked: dict[str, str] = {}  # what no answer has told yet
        self.found: Mapping[str, Any] = {}
        """What the newest answer says (`engine.data.column_map.mapped`)."""
        self.problem = ""

    # What can be chosen

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that the method learns from, first that it is told by the columns."""
        return (DETECT, *self.draft.config.method.formats)

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """The parts of the format: `name`, whether it is `needed`, and its `column`."""
        return list(self.found.get("parts", ()))

    @property
    def names(self) -> list[str]:
        """The columns that the first row has."""
        return [str(name) for name, _ in self.found.get("columns", ())]

    def column(self, part: str) -> str:
        """The column of a part as it was picked last, or as the rows are read."""
        told = next((str(each["column"]) for each in self.parts if each["name"] == part), NONE)
        return self._picked.get(part, told)

    @property
    def changed(self) -> bool:
        """Whether something else is chosen than the draft says."""
        return (self.format, self.columns) != (self.entry.format, dict(self.entry.columns))

    # Choosing

    def choose(self, part: str, column: str) -> None:
        """Take this column for a part from now on; with none the part is read as its format does by itself."""
        if column in (NONE, part):
            self.columns.pop(part, None)
        else:
            self.columns[part] = column
        self._picked[part] = column
        self.send()

    def turn(self, part: str, by: int) -> None:
        """The next column for a part, or the one before."""
        choices = (
            self.names if any(each["needed"] for each in self.parts if each["name"] == part) else [NONE, *self.names]
        )
        now = self.column(part)
        if choices:
            place = choices.index(now) if now in choices else -1 if by > 0 else 0
            self.choose(part, choices[(place + by) % len(choices)])

    def choose_format(self, name: str) -> None:
        """Read the rows in this format; columns named for parts that it has not are forgotten."""
        if name not in self.formats:
            raise UsageError(f"{name}: is no format that {self.draft.config.method.kind} learns from.")
        from engine.config.data import PARTS

        self.format = None if name == DETECT else name
        if self.format is not None:
            self.columns = {part: column for part, column in self.columns.items() if part in PARTS[self.format]}
        self.send()

    def turn_format(self, by: int) -> None:
        """The next format, or the one before."""
        choices, now = self.formats, self.format or DETECT
        # A source may name a format that this method does not learn from.
        self.choose_format(choices[((choices.index(now) if now in choices else 0) + by) % len(choices)])

    # Asking

    def send(self) -> None:
        """Ask what the rows say by what is chosen; a newer question takes the place of an older."""
        entry = self.entry
        self._question.send(
            "mapped",
            path=place_of(entry.path, self.draft.base),
            split=entry.split,
            subset=entry.subset,
            revision=entry.revision,
            format=self.format,
            columns=dict(self.columns),
            properties=dict(entry.properties),
            roles=dict(entry.roles),
        )

    @property
    def open(self) -> bool:
        """Whether an answer is still to come."""
        return self._question.open

    def poll(self) -> bool:
        """Take the answer, if there is one."""
        answer = self._question.take()
        if answer is None:
            return False
        if isinstance(answer, WorkbenchError):
            self.problem = answer.full_message
        else:
            self.problem, self.found, self._picked = "", answer, {}
        return True

    def close(self) -> None:
        """Give up what is asked."""
        self._question.cancel()

    # Keeping

    def keep(self) -> bool:
        """Write the choice into the draft; False where it is what the draft says. Raises UsageError where the draft names
        other rows by now."""
        if not self.changed:
            return False
        entries_now = self.draft.config.data.train
        if self.source >= len(entries_now) or entries_now[self.source] != self.entry:
            raise UsageError(
                f"{fields.data.train.title}: source {self.source + 1} was changed meanwhile.", "Pick its columns again."
            )
        written = self.draft.value(fields.data.train.path)
        entries = [
            dict(each) if isinstance(each, Mapping) else {"path": str(each)}
            for each in (written if isinstance(written, list) else [written])
        ]
        entry = entries[self.source]
        picked: dict[str, Any] = {"format": self.format, "columns": dict(self.columns)}
        for name, value in picked.items():
            if value:
                entry[name] = value
            else:
                entry.pop(name, None)
        self.draft.set(fields.data.train.path, entries)
        self.entry = self.draft.config.data.train[self.source]
        return True
