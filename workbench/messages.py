"""What the parts of the app tell each other: few messages, each a fact that already happened."""

from __future__ import annotations

from typing import Any

from textual.message import Message


class FieldChosen(Message):
    """Another row of the form is in focus; `path` is the setting's, or nothing."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self.path = path


class EditWanted(Message):
    """The person pressed Enter on a row."""

    def __init__(self, row: Any) -> None:
        super().__init__()
        self.row = row


class FactsArrived(Message):
    """Something new is known of the machine, the model or the data."""

    def __init__(self, what: str, facts: Any) -> None:
        super().__init__()
        self.what = what
        self.facts = facts
