"""The states of a config that is edited: undo, redo, the text of each, and whether it is the saved one.

A state is a text and the mapping it is to say; both are never changed, so that undo is a step back in a list. The text
of the present state is spliced from the last text a person wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.edit import rewrite


@dataclass(frozen=True, slots=True)
class State:
    """A text as a person wrote it, what it says, and what it shall say now."""

    source: str
    written: Mapping[str, Any]
    mapping: Mapping[str, Any]

    def text(self) -> str:
        """The file that says it: comments and order kept, byte-identical while nothing was changed."""
        return rewrite(self.source, self.written, self.mapping)


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

    def change(self, mapping: Mapping[str, Any]) -> bool:
        """From now on it says this; nothing is done for the very same mapping."""
        if mapping is self.now.mapping:
            return False
        return self._push(State(self.now.source, self.now.written, mapping))

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
