"""How long `workbench --help` and `workbench check` take against the bare imports they need, interleaved.

    python benchmarks/cli_start.py [--pairs 20]

Printed: medians of wall and CPU time, and the ratio of the medians with its 95% bootstrap interval. The marks:
`--help` at most 2x `import click`, `check` without --data at most 3x `import pydantic, ruamel.yaml`.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = "model:\n  name: builtin/tiny\nadapter:\n  kind: lora\n  r: 8\ndata:\n  train:\n    - path: rows.jsonl\n"
ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def once(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one process, with compiled modules allowed as in any installation."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def interval(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Ratio of medians and its 95% interval, pairs drawn again 2,000 times."""
    draw = random.Random(0)
    ratios = []
    for _ in range(2000):
        chosen = [draw.randrange(len(ours)) for _ in ours]
        ratios.append(statistics.median(ours[i] for i in chosen) / statistics.median(theirs[i] for i in chosen))
    ratios.sort()
    return statistics.median(ours) / statistics.median(theirs), ratios[50], ratios[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    workbench, python = [sys.executable, "-m", "workbench"], [sys.executable, "-c"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "my.yaml").write_text(CONFIG)
        (folder / "rows.jsonl").write_text(ROW * 100)
        comparisons = {
            "--help": ([*workbench, "--help"], [*python, "import click"], 2.0),
            "check": ([*workbench, "check", "my.yaml"], [*python, "import pydantic, ruamel.yaml"], 3.0),
        }
        for name, (ours, theirs, mark) in comparisons.items():
            once(ours, folder)
            once(theirs, folder)
            times = [(once(ours, folder), once(theirs, folder)) for _ in range(pairs)]
            for index, kind in enumerate(("wall", "CPU")):
                left, right = [pair[0][index] for pair in times], [pair[1][index] for pair in times]
                ratio, low, high = interval(left, right)
                print(
                    f"{name:<8}{kind:<5}{statistics.median(left) * 1000:7.0f} ms against "
                    f"{statistics.median(right) * 1000:5.0f} ms: {ratio:.2f}x [{low:.2f}, {high:.2f}], mark {mark}x"
                )


if __name__ == "__main__":
    main()
