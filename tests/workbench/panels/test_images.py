"""Pictures of images in a terminal: what it gets, read back by decoders of the tests' own, is the image."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from rich.segment import Segment
from textual.strip import Strip

from workbench import terminal
from workbench.panels import images
from workbench.panels.images import Images, SixelStrip, cells_of, half_blocks, sixels

RED, BLUE, GREEN, WHITE = (255, 0, 0), (0, 0, 255), (0, 255, 0), (255, 255, 255)


def picture(width: int, height: int) -> Image.Image:
    """Four fields of one colour each."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height // 2))
    image.paste(GREEN, (0, height // 2, width // 2, height))
    image.paste(WHITE, (width // 2, height // 2, width, height))
    return image


def told(image: Image.Image, **more: Any) -> dict[str, Any]:
    saved = io.BytesIO()
    image.save(saved, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(saved.getvalue()).decode()
    return {"width": image.width, "height": image.height, "thumbnail": uri, **more}


def decoded(data: str) -> dict[tuple[int, int], tuple[int, int, int]]:
    """The pixels that a sixel sequence paints, colours in percent: x and y to red, green, blue."""
    body = re.fullmatch(r"\x1bP0;1q\"1;1;\d+;\d+(.*)\x1b\\", data, re.DOTALL)
    assert body is not None
    palette: dict[int, tuple[int, int, int]] = {}
    pixels, x, top, ink = {}, 0, 0, 0
    for token in re.finditer(r"#(\d+);2;(\d+);(\d+);(\d+)|#(\d+)|!(\d+)(.)|([$-])|([?-~])", body[1]):
        defined, *parts, chosen, times, repeated, move, sign = token.groups()
        if defined is not None:
            red, green, blue = map(int, parts)
            palette[int(defined)] = red, green, blue
        elif chosen is not None:
            ink = int(chosen)
        elif move is not None:
            x, top = 0, top + 6 * (move == "-")
        else:
            bits = ord(repeated or sign) - 63
            run = range(x, x + int(times or 1))
            pixels |= {(at, top + bit): palette[ink] for at in run for bit in range(6) if bits >> bit & 1}
            x = run.stop
    return pixels


def test_half_blocks_have_the_colours_of_the_pixels() -> None:
    lines = half_blocks(picture(4, 4), 4, 2)
    assert [list(line)[1:] for line in lines] == [
        [("▀▀", "ink #ff0000 on #ff0000"), ("▀▀", "ink #0000ff on #0000ff")],
        [("▀▀", "ink #00ff00 on #00ff00"), ("▀▀", "ink #ffffff on #ffffff")],
    ]
    (line,) = half_blocks(picture(2, 2), 2, 1)
    assert list(line)[1:] == [("▀", "ink #ff0000 on #00ff00"), ("▀", "ink #0000ff on #ffffff")]


def test_sixels_paint_every_pixel_once_and_right() -> None:
    rows, high = 3, 16  # 16 is no multiple of six: a piece must not reach into the line below
    pieces = sixels(picture(40, 48), 40, rows, high)
    assert len(pieces) == rows
    whole = picture(40, 48)
    for row, piece in enumerate(pieces):
        pixels = decoded(piece)
        assert set(pixels) == {(x, y) for x in range(40) for y in range(high)}
        for (x, y), percent in pixels.items():
            assert percent == tuple(round(part / 2.55) for part in whole.getpixel((x, row * high + y)))  # type: ignore[union-attr]


def test_a_strip_keeps_its_piece_whole_or_goes_without() -> None:
    console = Console(color_system=None)
    strip = SixelStrip(Strip([Segment("ab" + " " * 6 + "cd")], 10), 2, 8, "<piece>")
    drawn = "ab" + " " * 6 + "\x1b7\x1b[6D<piece>\x1b8cd"
    assert strip.render(console) == drawn
    assert strip.crop(0, 9).render(console) == drawn[:-1]
    assert strip.crop(1).render(console) == drawn[1:]
    assert "piece" not in strip.crop(0, 7).render(console)
    assert "piece" not in strip.crop(3).render(console)
    assert [part.render(console) for part in strip.divide([2, 8, 10])] == ["ab", drawn[2:-2], "cd"]
    assert [part.render(console) for part in strip.divide([5, 10])] == ["ab   ", "   cd"]


@pytest.mark.parametrize("tmux", [False, True])
def test_kitty_gets_the_image_once_and_placeholders_for_its_cells(monkeypatch: pytest.MonkeyPatch, tmux: bool) -> None:
    monkeypatch.setattr(images, "in_tmux", lambda: tmux)
    noise = Image.effect_noise((256, 160), 90).convert("RGB")  # does not compress: more than one command
    image, sent = told(noise), []
    drawing = Images(sent.append, "kitty")
    lines = drawing.lines(image, 80, 8)
    assert drawing.lines(image, 80, 8) is lines
    raw = "".join(sent)
    if tmux:
        raw = "".join(
            part.replace("\x1b\x1b", "\x1b") for part in re.findall(r"\x1bPtmux;(.*?)(?<!\x1b)\x1b\\", raw, re.S)
        )
    commands = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", raw)
    assert len(commands) > 1
    assert all(len(data) <= 4096 for _, data in commands)
    keys = [dict(pair.split("=") for pair in head.split(",")) for head, _ in commands]
    assert [key["m"] for key in keys] == ["1"] * (len(keys) - 1) + ["0"]
    assert "base64," + "".join(data for _, data in commands) in image["thumbnail"]
    columns, rows = int(keys[0]["c"]), int(keys[0]["r"])
    assert {key: keys[0][key] for key in ("a", "U", "f", "q")} == {"a": "T", "U": "1", "f": "100", "q": "2"}
    assert (columns, rows) == (26, 8)  # 256 x 160 pixels in cells of 10 x 20
    for row, line in enumerate(lines):
        _, (text, style) = line
        assert style == f"ink color({keys[0]['i']})"
        cells = re.findall("\U0010eeee(.)(.)", text)
        assert [images.NUMBERS.index(number) for number, _ in cells] == [row] * columns
        assert [images.NUMBERS.index(number) for _, number in cells] == list(range(columns))
    sent.clear()
    drawing.forget()
    assert f"a=d,d=I,i={keys[0]['i']}" in "".join(sent)


def test_size_is_what_the_model_sees_within_the_room() -> None:
    assert cells_of(300, 200, 80, 40) == (30, 10)  # cells of 10 x 20 pixels
    assert cells_of(3000, 2000, 60, 40) == (60, 20)
    assert cells_of(3000, 2000, 80, 10) == (30, 10)
    assert cells_of(20, 20, 80, 40) == (16, 8)  # small ones are enlarged
    assert cells_of(20_000, 1, 80, 40) == (80, 1)
    drawing = Images(lambda data: None, "blocks")
    assert len(drawing.lines(told(picture(64, 64), resized=[200, 400], tiles=1), 80, 40)) == 20
    assert len(drawing.lines(told(picture(64, 64), resized=[512, 512], tiles=13), 80, 40)) == 8  # tiles are no size


@pytest.mark.parametrize(
    ("environ", "shows"),
    [
        ({"TERM": "xterm-256color"}, "blocks"),
        ({"TERM": "xterm"}, "none"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "none"),
        ({"TERM": "xterm-ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "sixel"),
        ({"TERM": "foot"}, "sixel"),
        ({"TERM": "xterm-256color", "KONSOLE_VERSION": "210800"}, "blocks"),
        ({"TERM": "tmux-256color", "TMUX": "/nowhere", "KITTY_WINDOW_ID": "1"}, "blocks"),
        ({"TERM": "xterm", "WORKBENCH_IMAGES": "sixel"}, "sixel"),
    ],
)
def test_what_a_terminal_shows(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str], shows: str) -> None:
    monkeypatch.setattr(terminal, "cell_pixels", lambda: (10, 20))
    monkeypatch.setattr(terminal, "_knows_placeholders", lambda: True)
    monkeypatch.setattr(terminal, "_behind_tmux", lambda: ("xterm-kitty", False))
    assert terminal.shows_images(environ) == shows


def test_sixel_needs_the_size_of_a_cell_and_kitty_its_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "cell_pixels", lambda: None)
    monkeypatch.setattr(terminal, "_knows_placeholders", lambda: False)
    monkeypatch.setattr(terminal, "_behind_tmux", lambda: ("xterm-kitty", True))
    assert terminal.shows_images({"TERM": "foot"}) == "blocks"
    assert terminal.shows_images({"TERM": "xterm-kitty"}) == "blocks"
    assert terminal.shows_images({"TERM": "tmux-256color", "TMUX": "/tmp/tmux"}) == "kitty"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("passes", ["on", "off"])
def test_tmux_itself_tells_the_terminal_behind_it_and_whether_commands_pass(tmp_path: Path, passes: str) -> None:
    answer = tmp_path / "answer"
    ask = f"{sys.executable} -c 'from workbench import terminal; print(*terminal._behind_tmux())' > {answer}.tmp; mv {answer}.tmp {answer}"
    inside = f"tmux set -g allow-passthrough {passes}; {ask}"
    sockets = tempfile.mkdtemp(dir="/tmp")  # the path of a socket must be short
    environ = {name: value for name, value in os.environ.items() if name != "TMUX"}
    environ |= {"TERM": "xterm-256color", "TMUX_TMPDIR": sockets, "PYTHONPATH": os.pathsep.join(sys.path)}
    ours, theirs = pty.openpty()
    tmux = subprocess.Popen(
        ["tmux", "-f", "/dev/null", "new-session", inside], stdin=theirs, stdout=theirs, stderr=theirs, env=environ,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        end = time.monotonic() + 60
        while not answer.exists():
            assert time.monotonic() < end, "tmux never answered"
            with contextlib.suppress(OSError):
                os.read(ours, 1 << 16)
            time.sleep(0.05)
        assert answer.read_text() == f"xterm-256color {passes == 'on'}\n"
    finally:
        subprocess.run(["tmux", "kill-server"], env=environ, capture_output=True, check=False)
        tmux.kill()
        tmux.wait()
        os.close(ours)
        shutil.rmtree(sockets)
