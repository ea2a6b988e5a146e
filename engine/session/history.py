"""The states of a config that is edited: undo, redo, the text of each, and whether it is the saved one.

A state is a text and the mapping it is to say; both are never changed, so that undo is a step back in a list. The text
of the present state is spliced from the last text a person wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.edit import key_renamed, rewrite


@dataclass(frozen=True, slots=True)
class State:
    """A text as a person wrote it, what it says, and what it shall say now."""

    source: str
    written: Mapping[str, Any]
    mapping: Mapping[str, Any]

    def text(self) -> str:
        """The file that says it: comments and order kept, byte-identical while nothing was changed."""
        return rewrite(self.source, self.written, self.mapping)

    def renamed(self, path: list[str], name: str) -> State | None:
        """The same with another name for the key at `path`, on its line; None where its text cannot be changed so."""
        written = _with_name(self.written, path, name)
        source = None if written is None else key_renamed(self.source, path, name, written)
        mapping = _with_name(self.mapping, path, name)
        return None if source is None or written is None or mapping is None else State(source, written, mapping)


class DraftHistory:
    """The present state of a config, those before it, and those that were undone. What changes it says whether it did."""

    def __init__(self, text: str, mapping: Mapping[str, Any], *, saved: bool) -> None:
        self._past = [State(text, mapping, mapping)]
        self._future: list[State] = []
        self._saved = (self._past[-1], text) if saved else None
        self._text: tuple[State, str] | None = None

    @property
    def now(self) -> State:
        """The present state."""
        return self._past[-1]

    def text(self) -> str:
        """Its text; kept until something changes."""
        if self._text is None or self._text[0] is not self.now:
            self._text = (self.now, self.now.text())
        return self._text[1]

    def change(self, mapping: Mapping[str, Any], since: State | None = None) -> bool:
        """From now on it says this, in the text of `since`, else of now; nothing is done for the very same mapping."""
        if mapping is self.now.mapping:
            return False
        since = since or self.now
        return self._push(State(since.source, since.written, mapping))

    def replace(self, text: str, mapping: Mapping[str, Any]) -> bool:
        """From now on it is this text, which says `mapping`; nothing is done for the text that stands."""
        return text != self.text() and self._push(State(text, mapping, mapping))

    def undo(self) -> bool:
        """Step back; False when there is nothing before."""
        if not self.can_undo:
            return False
        self._future.append(self._past.pop())
        return True

    def redo(self) -> bool:
        """Step forward again; False when nothing was undone."""
        if not self.can_redo:
            return False
        self._past.append(self._future.pop())
        return True

    @property
    def can_undo(self) -> bool:
        """Whether there is a change to take back."""
        return len(self._past) > 1

    @property
    def can_redo(self) -> bool:
        """Whether there is a change to make again."""
        return bool(self._future)

    def save(self) -> None:
        """The present state is the one in the file."""
        self._saved = (self.now, self.text())

    @property
    def dirty(self) -> bool:
        """Whether a save would change the file; without one, whether anything was changed."""
        if self._saved is None:
            return self.can_undo
        state, text = self._saved
        return state is not self.now and self.text() != text

    def _push(self, state: State) -> bool:
        self._past.append(state)
        self._future.clear()
        return True


def _with_name(place: Any, path: list[str], name: str) -> Any:
    """`place` with the key at `path` under another name, at its place among the others; None where there is no such key."""
    part, rest = path[0], path[1:]
    if isinstance(place, Mapping) and part in place:
        inner = _with_name(place[part], rest, name) if rest else place[part]
        key = part if rest else name
        return (
            None
            if rest and inner is None
            else {key if k == part else k: inner if k == part else v for k, v in place.items()}
        )
    if isinstance(place, list) and part.isdigit() and int(part) < len(place) and rest:
        inner = _with_name(place[int(part)], rest, name)
        return None if inner is None else [*place[: int(part)], inner, *place[int(part) + 1 :]]
    return None
