"""Start to the first step's fields on screen, against a bare Textual app of one label, interleaved.

Counts a frame only when the step rail and the fields with their values are on it. Also types a key at that very moment
and looks for its effect. Prints the medians, their ratio and the 95 % interval of the ratio (bootstrap).
Run in quiet: `python benchmarks/app_start.py [PAIRS]`.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from pathlib import Path

from _terminal import Terminal

BARE = """
from textual.app import App
from textual.widgets import Label
class Bare(App):
    def compose(self):
        yield Label("one label on screen")
Bare().run()
"""
FIELDS = (b"Launch", b"Learning rate", b"Name of the run", b"builtin/dates", b"builtin/tiny")
MARK = 2.2


def bare() -> float:
    """Seconds until the bare app's label is painted."""
    terminal = Terminal([sys.executable, "-c", BARE])
    seconds = terminal.wait_for(b"one label on screen") - terminal.started
    terminal.close()
    return seconds


def ours(folder: str) -> tuple[float, bool]:
    """Seconds until rail and fields are painted, and whether a key typed at that moment took effect."""
    terminal = Terminal(_argv(folder))
    seconds = terminal.wait_for(*FIELDS) - terminal.started
    terminal.forget()
    terminal.type(b"4")
    try:
        terminal.wait_for(b"Epochs", timeout=5)
        kept = True
    except TimeoutError:
        kept = False
    terminal.close()
    return seconds, kept


def _argv(folder: str) -> list[str]:
    code = f"from workbench.cli.app import open_app; open_app(runs_dir={folder!r})"
    return [sys.executable, "-c", code]


def interval(pairs: list[tuple[float, float]], draws: int = 4000) -> tuple[float, float]:
    """95 % interval of the ratio of medians, by drawing pairs anew."""
    chance = random.Random(0)
    ratios = []
    for _ in range(draws):
        drawn = [chance.choice(pairs) for _ in pairs]
        ratios.append(statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def main() -> int:
    """Measure and judge."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        runs = str(Path(folder) / "runs")
        ours(runs), bare()
        pairs, kept = [], 0
        for _ in range(count):
            seconds, took = ours(runs)
            kept += took
            pairs.append((seconds, bare()))
    low, high = interval(pairs)
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"ours {mine * 1000:.0f} ms, bare {theirs * 1000:.0f} ms, ratio {mine / theirs:.2f} [{low:.2f}, {high:.2f}]")
    print(f"key typed at first paint kept in {kept} of {count}; mark {MARK}")
    return 0 if high <= MARK and kept == count else 1


if __name__ == "__main__":
    sys.exit(main())
