"""Key press to painted frame in the largest form, in a real pseudo-terminal; also while the inspector counts tokens.

Opens the DPO recipe on the Method step with all levels shown, edits a number and types; each key is timed from its
write to the frame that shows the new text. Prints median, p95 and the most. Run in quiet:
`python benchmarks/key_to_paint.py [KEYS] [--results FILE --commit HASH]`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _device import processor
from _figures import Results, result_options
from _terminal import Terminal

from engine.config.recipes import recipe

MARK_MS = 50.0


def measure(keys: int, busy: bool) -> list[float]:
    """Milliseconds of each key."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "my.yaml"
        file.write_text(recipe("demo" if busy else "dpo").text)
        code = (
            "from pathlib import Path\n"
            "from workbench.cli.app import open_app\n"
            f"open_app(config=Path({str(file)!r}), runs_dir={str(Path(folder) / 'runs')!r})"
        )
        terminal = Terminal([sys.executable, "-c", code], columns=120, rows=40)
        terminal.wait_for(b"Launch")
        for key in (b"4", b"a", b"a"):
            terminal.type(key)
            terminal.settle(1.0 if not busy else 0.2, 6.0)
        found = []
        for number in range(keys):
            # moving the cursor redraws form, explanation and finding; typing reads and draws everything anew
            terminal.pump(0.02)
            terminal.forget()
            sent = terminal.type(b"j" if number % 24 < 12 else b"k")
            terminal.wait_for("›".encode(), timeout=5)
            found.append((time.perf_counter() - sent) * 1000)
        for _ in range(30):
            terminal.type(b"k")
        terminal.type(b"jjjj")
        terminal.settle(0.3, 3.0)
        for number in range(keys):
            terminal.forget()
            sent = terminal.type(b"u" if number % 2 else b"U")
            if terminal.pump(1.0):
                found.append((time.perf_counter() - sent) * 1000)
            terminal.settle(0.02, 0.5)
        terminal.close()
    return found


def main() -> int:
    """Measure quiet and busy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="?", type=int, default=200)
    result_options(parser)
    given = parser.parse_args()
    results = Results(given, processor())
    worst = 0.0
    for name, busy in (("quiet", False), ("inspector at work", True)):
        times = sorted(measure(given.keys, busy))
        p95 = times[int(0.95 * len(times))]
        worst = max(worst, p95)
        print(
            f"{name}: median {statistics.median(times):.1f} ms, p95 {p95:.1f} ms, most {times[-1]:.1f} ms, {len(times)} keys"
        )
        results.add("key_to_paint", f"{name}; {len(times)} keys; p95 {p95:.1f} ms", ms=times)
    print(f"mark: p95 at most {MARK_MS:.0f} ms")
    return 0 if worst <= MARK_MS else 1


if __name__ == "__main__":
    sys.exit(main())
