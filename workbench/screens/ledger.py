"""A config of another tool was opened: what became of each of its keys, and one key that takes it over as a new config."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.screen import Screen

from engine.bridge.ledger import Ledger
from engine.errors import visible
from engine.session.draft import Draft
from workbench.actions import bindings
from workbench.panels.bars import KeyLine, TitleBar
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, paragraph

_STYLES = {"unsupported": "bad", "changed": "warn", "mapped": "good", "needless": "dim"}


class Page(Scrolled):
    """The ledger, the gravest rows first, with the reason below each."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def lines(self, width: int) -> list[Line]:
        """The summary, then every row under its heading."""
        ledger = self._ledger
        drawn: list[Line] = [*paragraph(clean(ledger.summary()), width, "bold"), []]
        drawn += paragraph(
            f"t takes it over as a new config; {clean(ledger.source)} itself stays as it is.", width, "dim"
        )
        for heading, rows in ledger.by_outcome():
            drawn += [[], [(heading, "bold")]]
            for key, there, here, row in ledger.grouped(rows):
                change = f" -> {here}" if here else ""
                drawn += paragraph(clean(f"{key}: {there}{change}"), width, _STYLES[row.outcome], "  ")
                drawn += paragraph(clean(row.reason), width, "dim", "    ") if row.reason else []
        return drawn


class LedgerScreen(Screen[None]):
    """What became of every key of the file."""

    NAME = "ledger"
    BINDINGS = bindings("ledger")

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._taken = False

    def compose(self) -> ComposeResult:
        """Title, page, keys."""
        yield TitleBar()
        yield Page(self._ledger)
        yield KeyLine("ledger")

    def on_mount(self) -> None:
        """Name the file."""
        self.query_one(TitleBar).show(visible(self._ledger.source), False, f"a config of {self._ledger.title}", "")
        self.query_one(Page).focus()

    def action_take_over(self) -> None:
        """Make it the config of this window, not saved yet, and open the form on it; once, then it is gone on with."""
        if not self._taken:
            draft = Draft()
            draft.replace_text(self._ledger.text())
            self.app.draft = draft  # type: ignore[attr-defined]
            self._taken = True
        self.app.action_build()  # type: ignore[attr-defined]
