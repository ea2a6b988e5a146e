"""A config of another tool in a notebook: what became of each of its keys, and the button that takes it over."""

from __future__ import annotations

from typing import Any

from engine.bridge.ledger import Ledger
from engine.session.draft import Draft
from widgets.protocol import Part, shown, verb


class LedgerPart(Part):
    """Shows the ledger of the file that was opened, where it was another tool's, and makes it the draft when asked."""

    def __init__(self, draft: Draft, ledger: Ledger | None) -> None:
        self._draft, self._ledger = draft, ledger
        self._taken = False

    @verb
    def ledger(self) -> dict[str, Any]:
        """Every row under its heading; nothing for a config of ours, and once it was taken over nothing to take."""
        ledger = self._ledger
        if ledger is None:
            return {"there": False}
        groups = [
            {
                "heading": shown(heading),
                "rows": [
                    {
                        "text": shown(f"{key}: {there}{f' -> {here}' if here else ''}", 400),
                        "outcome": row.outcome,
                        "reason": shown(row.reason),
                    }
                    for key, there, here, row in ledger.grouped(rows)
                ],
            }
            for heading, rows in ledger.by_outcome()
        ]
        title = shown(f"{ledger.source}: {ledger.summary()}")
        return {"there": True, "title": title, "groups": groups, "taken": self._taken}

    @verb
    def take_over(self) -> dict[str, Any]:
        """Make the config of the ledger the draft, as a change that can be undone."""
        if self._ledger is not None and not self._taken:
            self._draft.replace_text(self._ledger.text())
            self._taken = True
        return {"taken": self._taken}

    def summary(self) -> str:
        return shown(self._ledger.summary()) if self._ledger is not None else ""
