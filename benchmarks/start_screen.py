"""What the start screen takes until its lines stand: seconds, and seconds of a processor, with a folder of runs and with an empty one.

    python benchmarks/start_screen.py [PAIRS] [--runs 1000] [--beside CHECKOUT] [--results FILE --commit HASH]

Each round starts `workbench` in a terminal of its own over the same folders, in turns, and takes its time once the newest run is
painted (of an empty folder, once the ways to begin are). `--beside` starts another checkout in the same rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from _device import processor
from _figures import Results, ratio, result_options
from _terminal import Terminal

from engine.run.store import create

TEXT = "model:\n  name: builtin/tiny\nmethod:\n  kind: sft\n"
HERE = Path(__file__).resolve().parent.parent


def folder_of(place: Path, runs: int) -> str:
    """A folder of so many runs that have ended; the newest one's name begins with `newest`."""
    place.mkdir()
    for number in range(runs):
        name = "newest" if number == runs - 1 else "dates"
        run = create(place, TEXT, {"name": name, "method": "sft", "model": "builtin/tiny", "created": 1.7e9 + number})
        run.update_json(state="finished", ended=1.7e9 + number + 60)
    return str(place)


def opened(checkout: Path, runs: str, words: bytes, room: Path) -> tuple[float, float]:
    """Seconds until the words are painted (given up after two minutes), and the processor's seconds that the app has taken by then."""
    env = {
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": str(room / checkout.name),
        "XDG_STATE_HOME": str(room / "state"),
    }
    terminal = Terminal([sys.executable, "-m", "workbench", "--runs", runs], env=env)
    try:
        seconds = terminal.wait_for(words, timeout=120) - terminal.started
        fields = Path(f"/proc/{terminal.pid}/stat").read_text().rpartition(")")[2].split()
    finally:
        terminal.close()
    return seconds, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    result_options(parser)
    given = parser.parse_args()
    checkouts = [HERE, *([given.beside.resolve()] if given.beside else [])]
    with tempfile.TemporaryDirectory() as place:
        room = Path(place)
        asked = [(folder_of(room / "many", given.runs), b"newest"), (folder_of(room / "none", 0), b"Guided first run")]
        arms = [(checkout, *each) for checkout in checkouts for each in asked]
        found: list[list[tuple[float, float]]] = [[] for _ in arms]
        for number in range(-1, given.count):
            for at in range(len(arms)) if number % 2 else reversed(range(len(arms))):
                checkout, runs, words = arms[at]
                taken = opened(checkout, runs, words, room)
                if number >= 0:
                    found[at].append(taken)
    results = Results(given, processor())
    for (checkout, runs, _), taken in zip(arms, found, strict=True):
        clock, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
        what = f"{given.runs if runs.endswith('many') else 0:,} runs, {'here' if checkout == HERE else 'beside'}"
        print(f"{what}: {clock:.3f} s, {cpu:.3f} s of a processor (median of {given.count})")
        results.add("start_screen", what, "processor", ms=[1000 * each[1] for each in taken])
    if len(checkouts) > 1:
        for at, name in enumerate(("many runs", "none")):
            pairs = [(mine[1], theirs[1]) for mine, theirs in zip(found[at], found[at + 2], strict=True)]
            middle, low, high = ratio(pairs)
            print(f"{name}: processor's seconds here / beside {middle:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
