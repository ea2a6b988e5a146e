"""Tokens of one row as training sees them: trained ones coloured, underlined and bordered, special ones framed.

It lays out what the engine's preview answered and knows nothing of templates or masks. A pair stands side by side with
its first difference marked; of a very long part the head and the tail are laid out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip

from engine.data.gather_facts import outcome
from engine.errors import visible
from engine.session.rows import documents_of, image_text, reward_text
from workbench.panels.drawn import STYLES, Drawn, Scrolled
from workbench.panels.glyphs import ascii_only
from workbench.panels.images import INK, LEAST_ROWS, SIXEL, Images
from workbench.panels.paint import Line, Part, clean, paragraph, side_by_side
from workbench.panels.raw_rows import raw_lines

HEAD, TAIL = 6000, 2000  # tokens laid out of one part
GUTTER = 12
KINDS = ("trained", "special", "trained-special", "edge", "differs", "band")
Tokens = Sequence[Mapping[str, Any]]
_SPECIAL = re.compile(r"<[^<>\s]{2,}>|\[[A-Z_]{2,}\]|</?s>|<\|.*\|>")


class TokenView(Scrolled):
    """One row: its tokens once they are there, the row as it stands in its file until then or when asked."""

    COMPONENT_CLASSES = Drawn.COMPONENT_CLASSES | {f"drawn--{kind}" for kind in KINDS}
    DEFAULT_CSS = """
    TokenView { height: 1fr; padding: 0 1; }
    TokenView .drawn--trained { color: $success; text-style: underline; }
    TokenView .drawn--trained-special { color: $success; text-style: underline; }
    TokenView .drawn--special { color: $wb-hint; }
    TokenView .drawn--edge { color: $success; text-style: bold; }
    TokenView .drawn--differs { color: $warning; text-style: bold reverse; }
    TokenView .drawn--band { color: $accent; text-style: reverse; }
    """
    row: Mapping[str, Any] | None = None
    raw: Any = None
    raw_first = False
    ids = False
    problem = ""
    note = ""
    pictures = True

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._images = Images(self._to_terminal)

    def _to_terminal(self, data: str) -> None:
        if (driver := self.app._driver) is not None:
            driver.write(data)

    def on_unmount(self) -> None:
        """The terminal forgets the pictures of a panel that is gone."""
        self._images.forget()

    def turn(self, what: str) -> str:
        """Token `ids`, `pictures`, or the row as it stands in its file (`raw_first`), on or off; why not, where it has none."""
        if what == "pictures" and not (self.row or {}).get("images"):
            return "this row has no images"
        if what == "raw_first":
            if self.raw is None:
                return "the row's file cannot be read from here; only its tokens are known"
            self.to_top()
        setattr(self, what, not getattr(self, what))
        self.redraw()
        return ""

    def style_of(self, name: str) -> Style:
        """A picture's cells have colours of their own."""
        if not name.startswith(INK):
            return super().style_of(name)
        return Style.null() if name.startswith(SIXEL) else Style.parse(name.removeprefix(INK))

    def render_lines(self, crop: Region) -> list[Strip]:
        """A line of a sixel picture gets its piece of it when all else is drawn."""
        drawn = super().render_lines(crop)
        if crop.x:
            return drawn
        made, first, left = self.rendered_lines, crop.y + self.top, self.styles.gutter.left
        return [
            self._images.over(made[at], strip, left) if at < len(made) else strip
            for at, strip in enumerate(drawn, first)
        ]

    def _picture(self, image: Mapping[str, Any], width: int) -> list[Line]:
        return self._images.lines(image, width, max(LEAST_ROWS, self.size.height // 2)) if self.pictures else []

    def lines(self, width: int) -> list[Line]:
        """What there is, the most telling first."""
        drawn: list[Line] = []
        if self.problem:
            drawn = [[("The tokens cannot be shown.", "bad")], *paragraph(clean(self.problem), width, "value"), []]
        elif self.row is not None and not self.raw_first:
            return lines_of_row(self.row, width, self.ids, self._picture)
        if self.raw is not None:
            drawn.append([("The row as it stands in its file." if self.raw_first else self.note, "faint")])
            drawn += [[], *raw_lines(self.raw, width)]
        elif self.note and not self.problem:
            drawn.append([(self.note, "faint")])
        return drawn


def lines_of_row(
    row: Mapping[str, Any],
    width: int,
    ids: bool = False,
    picture: Callable[[Mapping[str, Any], int], list[Line]] | None = None,
) -> list[Line]:
    """All lines of a row of the preview: why it is left out, its images as `picture` draws them, then its parts."""
    drawn: list[Line] = []
    if row.get("error"):
        drawn += paragraph(clean(row["error"]), width, "bad")
        drawn += paragraph(clean(row.get("clipped", "")), width, "dim")
    if words := outcome(row):
        drawn += paragraph(words, width, "warn")
    if drawn:
        drawn.append([])
    for image in row.get("images") or []:
        drawn += paragraph(clean(f"image {image_text(image)}"), width, "dim")
        drawn += picture(image, width) if picture is not None else []
    borders = documents_of(row)
    if borders:
        apart = "no token sees another row" if row.get("separate") else "tokens see the rows before them"
        drawn += [[(f"A pack of {len(borders)} rows; {apart}.", "dim")], []]
    parts = row.get("parts") or {}
    pair = "chosen" in parts and "rejected" in parts
    for name, tokens in parts.items():
        if pair and name in ("chosen", "rejected"):
            continue
        label = "" if name == "input" else name
        drawn += _part(label, tokens, row.get("turns") or [], width, ids, borders if name == "input" else {})
    if given := reward_text(row):
        drawn += [[], [("What rewards are given beside the answer:", "dim")]]
        drawn += [line for words in given for line in paragraph(clean(words), width, "value", "  ")]
    if pair:
        drawn += [[], *lay_out_pair(parts["chosen"], parts["rejected"], width, ids)]
    return drawn


def _part(
    label: str, tokens: Tokens, turns: Sequence[Mapping[str, Any]], width: int, ids: bool, borders: dict[int, str]
) -> list[Line]:
    """A part with the role of each turn, or its own name, at the left."""
    room = max(8, width - GUTTER)
    spans = [(int(turn["start"]), int(turn["end"]), str(turn["role"])) for turn in turns] if not label else []
    if not spans or borders or len(tokens) > HEAD + TAIL:
        laid = lay_out(tokens, room if label else width, ids, borders=borders)
        return _with_gutter(label, laid) if label else laid
    drawn: list[Line] = []
    before = False
    for start, end, role in _without_gaps(spans, len(tokens)):
        drawn += _with_gutter(role, lay_out(tokens[start:end], room, ids, trained_before=before))
        before = bool(end and tokens[end - 1].get("trained"))
    return drawn


def _without_gaps(spans: list[tuple[int, int, str]], size: int) -> Iterator[tuple[int, int, str]]:
    """The turns without gaps: what stands between two turns belongs to the one before."""
    for place, (start, _, role) in enumerate(spans):
        after = spans[place + 1][0] if place + 1 < len(spans) else size
        first = 0 if place == 0 else start
        if after > first:
            yield first, after, role


def _with_gutter(label: str, laid: list[Line]) -> list[Line]:
    head = f"{clean(label)[: GUTTER - 1]:{GUTTER}}"
    return [[(head if place == 0 else " " * GUTTER, "dim"), *line] for place, line in enumerate(laid or [[]])]


def lay_out_pair(chosen: Tokens, rejected: Tokens, width: int, ids: bool = False) -> list[Line]:
    """Two answers in two columns; the first token in which they differ is marked in both."""
    differs = first_difference(chosen, rejected)
    half = max(8, (width - 3) // 2)
    left, right = lay_out(chosen, half, ids, mark=differs), lay_out(rejected, half, ids, mark=differs)
    bar = " | " if ascii_only() else " │ "
    heads = f"chosen, {len(chosen):,} tokens", f"rejected, {len(rejected):,} tokens"
    drawn: list[Line] = [[(f"{heads[0][:half]:{half}}", "good"), (bar, "faint"), (heads[1], "bad")]]
    drawn += side_by_side([left, right], half, (bar, "faint"))
    if differs is not None:
        drawn += [[], [(f"They differ from token {differs + 1:,} on.", "dim")]]
    return drawn


def first_difference(one: Tokens, other: Tokens) -> int | None:
    """The position of the first token in which two parts differ; None when they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.get("id") != b.get("id"):
            return index
    return min(len(one), len(other)) if len(one) != len(other) else None


def lay_out(
    tokens: Tokens,
    width: int,
    ids: bool = False,
    *,
    mark: int | None = None,
    borders: Mapping[int, str] | None = None,
    trained_before: bool = False,
) -> list[Line]:
    """Tokens as lines of at most `width` cells. A line break in a token ends its line; `mark` is shown reversed."""
    sheet = _Sheet(max(4, width), ids)
    for index, token in _shown(tokens):
        if token is None:
            sheet.note(f"… {index:,} tokens not shown …")
            continue
        if borders and index in borders:
            sheet.band(borders[index])
        trained = bool(token.get("trained"))
        if trained and not trained_before:
            sheet.edge(0)
        sheet.token(token, "differs" if index == mark else _kind(token))
        after = tokens[index + 1] if index + 1 < len(tokens) else {}
        if trained and not after.get("trained"):
            sheet.edge(1)
        trained_before = trained
    return sheet.lines()


def _shown(tokens: Tokens) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """(position, token) of the head and the tail; (count, None) for what is left out between."""
    if len(tokens) <= HEAD + TAIL:
        yield from enumerate(tokens)
        return
    yield from enumerate(tokens[:HEAD])
    yield len(tokens) - HEAD - TAIL, None
    yield from enumerate(tokens[-TAIL:], len(tokens) - TAIL)


def _kind(token: Mapping[str, Any]) -> str:
    special = is_special(token)
    if token.get("trained"):
        return "trained-special" if special else "trained"
    return "special" if special else "value"


def is_special(token: Mapping[str, Any]) -> bool:
    """As the engine says; where it does not say, the forms that tokenizers use: <|...|>, <...>, [...]."""
    if "special" in token:
        return bool(token["special"])
    return _SPECIAL.fullmatch(str(token.get("text", ""))) is not None


class _Sheet:
    """Lines being filled with tokens; with ids every line is two. Under each piece stands its id, or nothing."""

    def __init__(self, width: int, ids: bool) -> None:
        self.width, self.ids = width, ids
        self._lines: list[list[tuple[str, str, str]]] = [[]]
        self._used = 0
        plain = ascii_only()
        self._break = "\\n" if plain else "⏎"
        self._frame = ("<", ">") if plain else ("‹", "›")
        self._edges = ("[", "]") if plain else ("▌", "▐")

    def token(self, token: Mapping[str, Any], kind: str) -> None:
        """One token: its text with what is invisible made visible."""
        text = str(token.get("text", ""))
        number = str(token.get("id", "")) if self.ids else ""
        if is_special(token):
            self._put(f"{self._frame[0]}{visible(text[1:-1])}{self._frame[1]}", kind, number)
            return
        *ended, last = text.split("\n")
        for piece in ended:
            self._put(visible(piece.replace("\t", "→")) + self._break, kind, number)
            number = ""
            self._new_line()
        if last or number:
            self._put(visible(last.replace("\t", "→")), kind, number)

    def edge(self, side: int) -> None:
        """Where a trained stretch begins or ends; it hangs on the token, never on a line of its own."""
        if self.ids:
            return
        if side and not self._lines[-1] and len(self._lines) > 1:
            # The stretch ended with a line break: the border stays at the end of that line.
            self._lines[-2].append((self._edges[1], "edge", ""))
            return
        self._put(self._edges[side], "edge", "")

    def note(self, words: str) -> None:
        """A line about what is not shown."""
        self._fresh_line()
        self._lines[-1].append((words[: self.width], "faint", ""))
        self._new_line()

    def band(self, words: str) -> None:
        """The border of a packed document, over the whole width."""
        self._fresh_line()
        self._lines[-1].append((f" {words} "[: self.width].ljust(self.width), "band", ""))
        self._new_line()

    def lines(self) -> list[Line]:
        """What was filled, the ids under their tokens."""
        filled = self._lines if self._lines[-1] or len(self._lines) == 1 else self._lines[:-1]
        drawn: list[Line] = []
        for line in filled:
            if not self.ids:
                drawn += _folded([(text, kind) for text, kind, _ in line], self.width)
                continue
            drawn.append([(text, kind) for text, kind, _ in line])
            if any(under for _, _, under in line):
                drawn.append([_under(text, under) for text, _, under in line])
        return drawn

    def _put(self, text: str, kind: str, under: str) -> None:
        if not self.ids:
            self._lines[-1].append((text, kind, under))
            return
        text += " " * max(0, len(under) - cell_len(text))
        if self._used and self._used + cell_len(text) + 1 > self.width:
            self._new_line()
        while text:
            piece = _head(text, self.width - self._used)
            if not piece:
                self._new_line()
                continue
            self._lines[-1].append((piece, kind, under))
            self._used += cell_len(piece)
            text, under = text[len(piece) :], ""
        if self._used < self.width:
            self._lines[-1].append((" ", "", ""))
            self._used += 1

    def _fresh_line(self) -> None:
        if self._lines[-1]:
            self._new_line()

    def _new_line(self) -> None:
        self._lines.append([])
        self._used = 0


_WORDS = re.compile(r"[^ ]* |[^ ]+")


def _folded(line: Sequence[Part], width: int) -> list[Line]:
    """One line of tokens in lines of at most `width` cells, broken behind spaces and beside special tokens, for a word may be
    several tokens; a word that is wider than a line is broken where the line ends."""
    word, words, before = list[Part](), list[list[Part]](), ""
    for text, kind in line:
        if word and _may_break(before, kind, text):
            words.append(word)
            word = []
        before = kind
        for piece in _WORDS.findall(text):
            word.append((piece, kind))
            if piece.endswith(" "):
                words.append(word)
                word = []
    lines: list[list[Part]] = [[]]
    used = 0
    for parts in [*words, word]:
        bare = cell_len("".join(text for text, _ in parts).rstrip(" "))
        if used and used + bare > width >= bare:
            lines.append([])
            used = 0
        for text, kind in parts:
            while text:
                piece = _head(text, width - used)
                if not piece:
                    if text == " " and used:  # a space that a line ends in needs no line of its own
                        break
                    lines.append([])
                    used = 0
                    continue
                lines[-1].append((piece, kind))
                used += cell_len(piece)
                text = text[len(piece) :]
    return [*lines]


def _may_break(before: str, kind: str, text: str) -> bool:
    """Whether a line may end between two pieces without a space: before a trained stretch and beside special tokens, while what
    ends a stretch or a line hangs on the token before it."""
    if kind == "edge":
        return text in ("▌", "[")
    return before != "edge" and ("special" in kind or ("special" in before and text not in ("⏎", "\\n")))


def _under(text: str, under: str) -> Part:
    return under + " " * max(0, cell_len(text) - len(under)), "faint"


def _head(text: str, room: int) -> str:
    """As many characters as fit into `room` cells."""
    if room <= 0:
        return ""
    if cell_len(text) <= room:
        return text
    cells = 0
    for index, character in enumerate(text):
        cells += cell_len(character)
        if cells > room:
            return text[:index]
    return text


assert not set(KINDS) & set(STYLES)
