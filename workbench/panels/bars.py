"""The one-line parts of a screen's frame: what this is (top), what was found (above the keys), which keys (bottom)."""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content
from textual.widget import Widget

from engine.config.findings import Finding
from workbench.actions import key_line
from workbench.panels.paint import clean, cut, wrap

SIGNS = {"error": ("✗", "$error"), "warning": ("!", "$warning"), "hint": ("?", "$wb-hint")}
SENTENCE = 4
"""Lines that a sentence to a person may take of the screen, until it has been read."""


class Bar(Widget):
    """One line of content that is drawn again when it changes."""

    DEFAULT_CSS = "Bar { height: 1; }"

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._content = Content("")

    def update(self, content: Content) -> None:
        """Show this line."""
        if content != self._content:
            self._content = content
            self.refresh()

    def render(self) -> Content:
        """The line."""
        return self._content


class TitleBar(Bar):
    """Name of the program and the file at the left, the machine and what runs at the right."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: tuple[str, bool, str, str] = ("", False, "", "")

    def show(self, file: str, dirty: bool, machine: str, running: str) -> None:
        """Draw these four."""
        if (file, dirty, machine, running) != self._parts:
            self._parts = (file, dirty, machine, running)
            self.refresh()

    def render(self) -> Content:
        """Left and right part with the room between."""
        file, dirty, machine, running = self._parts
        right = "   ".join(part for part in (clean(machine), running) if part)
        room = self.size.width - len(right) - 16
        left = Content.assemble(
            (" workbench", "bold $accent"),
            "  ",
            cut(clean(file), max(8, room)),
            (" *" if dirty else "", "bold $warning"),
        )
        space = max(1, self.size.width - left.cell_length - Content(right).cell_length - 1)
        return Content.assemble(left, " " * space, (right, "$wb-dim"))


class KeyLine(Bar):
    """The keys of this screen, from the table of actions; what does not fit is left to `?`."""

    def __init__(self, screen: str) -> None:
        super().__init__()
        self.usual = key_line(screen)
        self._keys = self.usual
        self._here = ""

    def use(self, keys: list[tuple[str, str]], here: str = "") -> None:
        """Other keys for now, as while editing; the word of the page `here` stands out."""
        if (keys, here) != (self._keys, self._here):
            self._keys, self._here = keys, here
            self.refresh()

    def render(self) -> Content:
        """As many as fit; the last ones (help, all) always do."""
        keys = list(self._keys)
        while len(keys) > 3 and sum(len(key) + len(word) + 3 for key, word in keys) > self.size.width:
            keys.pop(-3)
        parts: list[Content | str | tuple[str, str]] = []
        for key, word in keys:
            look = "bold underline $foreground" if word == self._here else "$wb-dim"
            parts += [" ", (key, "bold $accent"), " ", (word, look), " "]
        return Content.assemble(*parts)


class TextBar(Bar):
    """A line of plain text: as many of its parts as fit whole, the first cut where it is too long itself."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id)
        self._text: tuple[tuple[str, ...], str] = ((), "")
        self._wrapped: list[str] = []

    def write(self, *parts: str, style: str = "$wb-dim") -> None:
        """Show this line."""
        if (parts, style) != self._text or self._wrapped:
            self._text, self._wrapped = (parts, style), []
            self.styles.height = None  # as the screen has it
            self.refresh()

    def write_wrapped(self, sentence: str, *, style: str) -> None:
        """Show a sentence in as many lines as it needs, at most `SENTENCE`; the way out stands at its end."""
        room = max(10, self.app.size.width - 2)
        lines = wrap(clean(sentence), room) or [""]
        lines = [*lines[: SENTENCE - 1], cut(" ".join(lines[SENTENCE - 1 :]), room)]
        lines = [line for line in lines if line] or [""]
        if ((sentence,), style, lines) != (*self._text, self._wrapped):
            self._text, self._wrapped = ((sentence,), style), lines
            self.styles.height = len(lines)
            self.refresh()

    def render(self) -> Content:
        """The line, for the window as wide as it is."""
        parts, style = self._text
        if self._wrapped:
            return Content.styled("\n".join(f" {line}" for line in self._wrapped), style)
        room = max(10, self.app.size.width - 2)
        return Content.styled(" " + cut(fitting([clean(part) for part in parts], room), room), style)


def fitting(parts: list[str], width: int) -> str:
    """As many of these parts in a line as fit whole; the first in any case."""
    while len(parts) > 1 and cell_len("   ".join(parts)) > width:
        parts = parts[:-1]
    return "   ".join(parts)


class PassingLine(TextBar):
    """A sentence in passing, until the next key."""

    def show_message(self, words: str, *, bad: bool = False) -> None:
        """Show it."""
        self.write_wrapped(words, style="$error" if bad else "$accent")

    def clear_message(self) -> None:
        """It has been read."""
        self.write("")


class FindingLine(Bar):
    """The finding in view, with its fix if it has one: always two lines, so that nothing moves."""

    DEFAULT_CSS = "FindingLine { height: 2; }"

    def __init__(self) -> None:
        super().__init__()
        self.finding: Finding | None = None
        self._others = 0
        self._keys = True
        self._message: tuple[str, bool] | None = None

    def show_message(self, words: str, *, bad: bool = False) -> None:
        """Say something in passing, in place of the finding, until `clear_message`."""
        self._message = (words, bad)
        self.refresh()

    def clear_message(self) -> None:
        """Back to the finding."""
        if self._message is not None:
            self._message = None
            self.refresh()

    @property
    def message(self) -> str:
        """What is said in passing."""
        return self._message[0] if self._message else ""

    def show(self, finding: Finding | None, others: int = 0, *, keys: bool = True) -> None:
        """Draw this finding and how many others there are, with the key that lists them if it is one now."""
        if (finding, others, keys) != (self.finding, self._others, self._keys):
            self.finding, self._others, self._keys = finding, others, keys
            self.refresh()

    def render(self) -> Content:
        """Sign and sentence; at the end of the second line the fix and how many more there are."""
        finding = self.finding
        if self._message is not None:
            words, bad = self._message
            first, *rest = wrap(clean(words), max(20, self.size.width) - 4)
            second = cut(" ".join(rest), max(20, self.size.width) - 4)
            return Content.assemble((" ✗ ", "$error") if bad else (" · ", "$accent"), first, "\n   ", second)
        if finding is None:
            return Content.styled(" ✓ nothing to mend", "$wb-dim")
        sign, style = SIGNS[finding.severity]
        width = max(20, self.size.width)
        end: list[tuple[str, str]] = []
        if finding.fix:
            end += [("f", "bold $accent"), (" " + cut(clean(finding.fix.label), width // 2), "$foreground")]
        if self._others:
            end += [("   " if end else "", ""), ("!" if self._keys else "", "bold $accent")]
            end += [(" " * self._keys + f"{self._others} more", "$wb-dim")]
        room = sum(cell_len(text) for text, _ in end)
        first, *rest = wrap(clean(finding.message), width - 4)
        second = cut(" ".join(rest), width - 5 - room - (2 if room else 0))
        space = " " * max(1, width - 4 - cell_len(second) - room)
        return Content.assemble((f" {sign} ", style), first, "\n   ", second, space, *end)
