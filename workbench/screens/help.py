"""The keys of a screen, from the table of actions, and what every place has in common."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen

from workbench.actions import actions
from workbench.panels.bars import KeyLine, TitleBar
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, paragraph

MOVING = (
    ("arrows, hjkl", "Move. Left goes to the steps, Right back to the form"),
    ("Tab, Shift+Tab", "Move between the parts of the screen"),
    ("Enter", "Edit, choose or open what is in focus"),
    ("Esc", "Leave editing; then go back"),
)


class Page(Scrolled):
    """Two columns: key and meaning."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._screen_name = name

    def lines(self, width: int) -> list[Line]:
        """The screen's own keys, then moving, then what works everywhere."""
        own = [(a.name, a.help) for a in actions(self._screen_name) if a.name and a.help]
        everywhere = [(a.name, a.help) for a in actions("everywhere") if a.name]
        drawn: list[Line] = []
        for title, rows in (("On this screen", own), ("Moving", MOVING), ("Everywhere", everywhere)):
            if not rows:
                continue
            drawn += [[], [(title, "bold")]] if drawn else [[(title, "bold")]]
            for key, words in rows:
                for index, part in enumerate(paragraph(words, width - 19)):
                    drawn.append([(f"  {key if index == 0 else '':<16} ", "accent"), *part])
        drawn += [
            [],
            *paragraph(
                "Letters act only while nothing is being typed. Every action is in the palette, Ctrl+P.", width, "dim"
            ),
        ]
        return drawn


class HelpScreen(Screen[None]):
    """What the keys do."""

    NAME = "help"
    BINDINGS = [Binding("escape,q,question_mark", "back", show=False)]

    def __init__(self, name: str) -> None:
        super().__init__()
        self._of = name

    def compose(self) -> ComposeResult:
        """Title, page, keys."""
        yield TitleBar()
        yield Page(self._of)
        line = KeyLine("help")
        line.use([("↑↓", "scroll"), ("q", "back")])
        yield line

    def on_mount(self) -> None:
        """Say of which screen."""
        self.query_one(TitleBar).show("keys", False, self._of, "")
        self.query_one(Page).focus()

    def action_back(self) -> None:
        """Back to where help was asked."""
        self.dismiss()
