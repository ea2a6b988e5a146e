"""The colours as terminals of 256 and of 16 colours show them; a session over SSH inside tmux usually has the former."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from rich.color import Color, ColorSystem
from textual.css import stylesheet

from engine.session.draft import Draft
from workbench.app import WorkbenchApp
from workbench.panels.drawn import STYLES
from workbench.panels.form import Form
from workbench.theme import THEMES

GROUNDS = ("background", "wb-field", "wb-cursor")


def shown(colour: str) -> tuple[int, int, int]:
    return tuple(Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT).get_truecolor())


@pytest.mark.parametrize("theme", THEMES[:2], ids=lambda theme: theme.name)
def test_grounds_stay_grey_and_apart_in_256_colours(theme):
    grounds = [shown({"background": theme.background, **theme.variables}[name]) for name in GROUNDS]
    assert all(max(ground) == min(ground) for ground in grounds), grounds
    steps = [abs(after[0] - before[0]) for before, after in itertools.pairwise(grounds)]
    assert min(steps) >= 8, grounds  # one step of the terminal's own greys


# The colours of the Linux console and of xterm, as they come: a palette of 16 is the terminal's own.
CONSOLE = [
    (0, 0, 0), (170, 0, 0), (0, 170, 0), (170, 85, 0), (0, 0, 170), (170, 0, 170), (0, 170, 170), (170, 170, 170),
    (85, 85, 85), (255, 85, 85), (85, 255, 85), (255, 255, 85), (85, 85, 255), (255, 85, 255), (85, 255, 255),
    (255, 255, 255),
]  # fmt: skip
XTERM = [
    (0, 0, 0), (205, 0, 0), (0, 205, 0), (205, 205, 0), (0, 0, 238), (205, 0, 205), (0, 205, 205), (229, 229, 229),
    (127, 127, 127), (255, 0, 0), (0, 255, 0), (255, 255, 0), (92, 92, 255), (255, 0, 255), (0, 255, 255),
    (255, 255, 255),
]  # fmt: skip


def light_of(colour: tuple[int, int, int]) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize("way", ["dark", "light"])
async def test_every_word_on_the_cursors_row_can_be_read_in_16_colours(way, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM")
    monkeypatch.setenv("WORKBENCH_THEME", way)
    app = WorkbenchApp(draft=Draft.new("demo"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await pilot.pause()
        form = app.screen.query_one(Form)
        styles = {*STYLES} - {"cursor", "place"}
        form.lines = lambda width: [[(name, name) for name in sorted(styles)]]
        form._starts = [0]
        form.redraw()
        segments = [segment for segment in form.render_line(0) if segment.text.strip() in styles]
        assert len(segments) >= 5
        for segment in segments:
            written, ground = segment.style.color.number, segment.style.bgcolor.number
            for palette in (CONSOLE, XTERM):
                dim, bright = sorted((light_of(palette[written]), light_of(palette[ground])))
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, segment


async def test_style_sheets_are_read_once_at_the_start_and_again_for_other_colours(monkeypatch):
    read = Counter()
    usual = stylesheet.parse

    def parse(scope, css, where, **more):
        read[scope, css, where, more["tie_breaker"]] += 1
        return usual(scope, css, where, **more)

    monkeypatch.setattr(stylesheet, "parse", parse)
    app = WorkbenchApp(draft=Draft.new("demo"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert set(read.values()) == {1}
        before = app.screen.styles.background
        app.action_shade()
        await pilot.pause()
        assert app.screen.styles.background != before
        assert max(read.values()) == 2
