"""All findings as a list: Enter jumps to the setting, `f` applies the fix of the one in focus."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from engine.config.findings import RANK, Finding
from workbench.panels.bars import SIGNS
from workbench.panels.paint import clean
from workbench.screens.dialog import Dialog


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """The gravest first, otherwise as found."""
    return sorted(findings, key=lambda finding: RANK[finding.severity])


class FindingsScreen(Dialog[tuple[str, Finding]]):
    """Gives ("go", finding) or ("fix", finding)."""

    BINDINGS = [
        Binding("q", "nothing", show=False),
        Binding("f", "fix", show=False),
        Binding("j", "cursor(1)", show=False),
        Binding("k", "cursor(-1)", show=False),
    ]

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__()
        self._findings = in_order(findings)

    def compose(self) -> ComposeResult:
        """The list, or the good news."""
        with Vertical(id="box"):
            count = len(self._findings)
            title = "Nothing to mend." if not count else f"{count} finding{'s' if count > 1 else ''}"
            yield Static(title, id="title", markup=False)
            yield OptionList(
                *(Option(self._finding_content(finding)) for finding in self._findings), compact=True, markup=False
            )
            keys = ["enter go there"] * bool(count) + ["f apply its fix"] * any(known.fix for known in self._findings)
            yield Static("   ".join([*keys, "esc back"]), classes="note", markup=False)

    @staticmethod
    def _finding_content(finding: Finding) -> Content:
        sign, style = SIGNS[finding.severity]
        parts: list[str | tuple[str, str]] = [(f"{sign} ", style), clean(finding.message)]
        if finding.fix:
            parts += ["\n  ", ("f ", "bold $accent"), (clean(finding.fix.label), "$wb-dim")]
        return Content.assemble(*parts)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Jump."""
        self.dismiss(("go", self._findings[event.option_index]))

    def action_fix(self) -> None:
        """Apply the fix of the finding in focus."""
        at = self.query_one(OptionList).highlighted
        if at is not None and self._findings[at].fix is not None:
            self.dismiss(("fix", self._findings[at]))
