"""Start to a config's review on screen, against a bare Textual app of one label, interleaved.

Counts a frame only when the step rail and the paragraph about model and rows are on it. Also types a key at that very moment
and looks for its effect. Prints the medians, the median ratio and its 95 % interval (bootstrap over pairs), by the clock and by
what the first thread has had of a processor until then, which serves on a busy machine too.
Run in quiet: `python benchmarks/app_start.py [PAIRS] [--results FILE --commit HASH]`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from _device import processor
from _figures import Results, ratio, result_options
from _terminal import Terminal

from engine.config.recipes import recipe

BARE = """
from textual.app import App
from textual.widgets import Label
class Bare(App):
    def compose(self):
        yield Label("one label on screen")
Bare().run()
"""
PAINTED = (b"Launch", b"is trained with", b"builtin/dates", b"builtin/tiny")
MARK = 2.2


class Start(NamedTuple):
    """Seconds until what was waited for is painted, by the clock and of a processor, and whether a key typed then took effect."""

    seconds: float
    processor: float
    kept: bool = True


def bare() -> Start:
    """Until the bare app's label is painted."""
    terminal = Terminal([sys.executable, "-c", BARE])
    seconds = terminal.wait_for(b"one label on screen") - terminal.started
    start = Start(seconds, terminal.processor_seconds())
    terminal.close()
    return start


def ours(folder: str) -> Start:
    """Until rail and review are painted. What the app keeps, as the configs that were opened, lies beside the folder."""
    terminal = Terminal(_argv(folder), env={"XDG_STATE_HOME": str(Path(folder).parent / "state")})
    seconds = terminal.wait_for(*PAINTED) - terminal.started
    processor = terminal.processor_seconds()
    terminal.forget()
    terminal.type(b"4")
    try:
        terminal.wait_for(b"Epochs", timeout=5)
        kept = True
    except TimeoutError:
        kept = False
    terminal.close()
    return Start(seconds, processor, kept)


def _argv(folder: str) -> list[str]:
    file = Path(folder).parent / "demo.yaml"
    file.write_text(recipe("demo").text)
    code = "import pathlib; from workbench.cli.app import open_app; "
    return [sys.executable, "-c", f"{code}open_app(config=pathlib.Path({str(file)!r}), runs_dir={folder!r})"]


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=20)
    result_options(parser)
    given = parser.parse_args()
    count = given.count
    with tempfile.TemporaryDirectory() as folder:
        runs = str(Path(folder) / "runs")
        ours(runs), bare()
        pairs = [(ours(runs), bare()) for _ in range(count)]
    kept = sum(mine.kept for mine, _ in pairs)
    mine, theirs = ([1000 * start.seconds for start in column] for column in zip(*pairs, strict=True))
    share, low, high = ratio([(mine.seconds, theirs.seconds) for mine, theirs in pairs])
    told = f"ratio {share:.2f} [{low:.2f}, {high:.2f}]"
    print(f"ours {statistics.median(mine):.0f} ms, bare {statistics.median(theirs):.0f} ms, {told}")
    of_processor = "ratio {:.2f} [{:.2f}, {:.2f}]".format(
        *ratio([(one.processor, two.processor) for one, two in pairs])
    )
    print(f"of a processor: ours {1000 * statistics.median(one.processor for one, _ in pairs):.0f} ms, {of_processor}")
    print(f"key typed at first paint kept in {kept} of {count}; mark {MARK}")
    results = Results(given, processor())
    results.add("app_start", f"{count} pairs; {told}; key kept {kept} of {count}", ms=mine)
    results.add("app_start", f"{count} pairs", "bare Textual app", ms=theirs)
    return 0 if high <= MARK and kept == count else 1


if __name__ == "__main__":
    sys.exit(main())
