"""How long `workbench --help` and `workbench check` take against bare imports of libraries, interleaved.

    python benchmarks/cli_start.py [--pairs 20] [--results FILE --commit HASH]

Printed: medians of wall and CPU time, and the median ratio with its 95% bootstrap interval. The marks:
`--help` at most 2x `import click`, `check` without --data at most 3x `import pydantic, ruamel.yaml`, which is a measure of the
machine: pydantic was needed when the marks were set.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _device import processor
from _figures import Results, ratio, result_options

CONFIG = "model:\n  name: builtin/tiny\nadapter:\n  kind: lora\n  r: 8\ndata:\n  train:\n    - path: rows.jsonl\n"
ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'

_WORKBENCH, _PYTHON = [sys.executable, "-m", "workbench"], [sys.executable, "-c"]
COMPARED = {
    "--help": ([*_WORKBENCH, "--help"], [*_PYTHON, "import click"], 2.0),
    "check": ([*_WORKBENCH, "check", "my.yaml"], [*_PYTHON, "import pydantic, ruamel.yaml"], 3.0),
}
"""Each command, what it is held against, and how many times that it may take."""


def prepare(folder: Path) -> None:
    """Write the config that is checked, and its rows."""
    (folder / "my.yaml").write_text(CONFIG)
    (folder / "rows.jsonl").write_text(ROW * 100)


def once(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one process, with compiled modules allowed as in any installation."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    result_options(parser)
    given = parser.parse_args()
    pairs = given.pairs
    results = Results(given, processor())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for name, (ours, theirs, mark) in COMPARED.items():
            once(ours, folder)
            once(theirs, folder)
            times = [(once(ours, folder), once(theirs, folder)) for _ in range(pairs)]
            for index, kind in enumerate(("wall", "CPU")):
                left, right = ([1000 * pair[side][index] for pair in times] for side in (0, 1))
                told = "{:.2f}x [{:.2f}, {:.2f}]".format(*ratio(list(zip(left, right, strict=True))))
                print(
                    f"{name:<8}{kind:<5}{statistics.median(left):7.0f} ms against "
                    f"{statistics.median(right):5.0f} ms: {told}, mark {mark}x"
                )
                results.add("cli_start", f"{name}; {kind} time; {pairs} pairs; {told}", ms=left)


if __name__ == "__main__":
    main()
