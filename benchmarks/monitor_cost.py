"""What the monitor costs while it watches: CPU share, memory and bytes to the terminal, on a run of a million lines.

python benchmarks/monitor_cost.py [--lines 1000000] [--seconds 30] [--keep FOLDER] [--check]
                                  [--results FILE --commit HASH]

The app runs in a pseudo-terminal of 80x24 while another process appends metrics to the run (five steps a second). CPU
is the time of the app's process after the whole curve was read, over wall time; memory is what it holds at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _device import processor
from _figures import Results, result_options
from _terminal import Terminal
from monitor_open import make

from engine.run import store
from engine.run.events import EventWriter
from engine.run.process import identity

OPEN = (
    "import sys; from workbench.screens import monitor; monitor.LOOK_SECONDS = float(sys.argv[2]); "
    "from workbench.cli.app import open_app; sys.exit(open_app(run=sys.argv[1]))"
)
STEPS_A_SECOND = 5
WARM_SECONDS = 5.0


def alive(run: store.RunFolder) -> None:
    """The run as one that goes on, with this process as its supervisor and worker."""
    who = identity(os.getpid())
    assert who is not None
    run.update_json(
        state="running", segment=0, supervisor_pid=who.pid, supervisor_start=who.start, worker_pid=who.pid,
        worker_start=who.start, boot_id=who.boot, host=who.host,
    )  # fmt: skip


def watch(run: store.RunFolder, seconds: float, hertz: float, first: int) -> tuple[dict[str, float], int]:
    """One measurement; gives the figures and the step it ended at."""
    step = first
    terminal = Terminal([sys.executable, "-c", OPEN, str(run.path), str(1 / hertz)])
    process = psutil.Process(terminal.pid)
    figures: dict[str, float] = {}
    begun: float | None = None
    due = time.perf_counter()
    opened, read = time.perf_counter(), 0.0
    with EventWriter(run, segment=0) as writer:
        while True:
            terminal.pump(0.02)
            now = time.perf_counter()
            if now >= due:
                step += 1
                due += 1 / STEPS_A_SECOND
                values = {"loss": 0.1 + 0.01 * (step % 7), "grad_norm": 1.0 + 0.1 * (step % 5)}
                writer.write("metrics", step=step, epoch=2.0, **values, learning_rate=1e-4, tokens_per_second=9812.0)
            loading = any("engine.run.index" in child.cmdline() for child in _children(process))
            if begun is None and now - opened > WARM_SECONDS and not loading:
                read = now - opened
                begun, used, bytes_before = now, _cpu(process), len(terminal.seen)
            if begun is not None and now - begun >= seconds:
                figures = {
                    "cpu_percent": 100 * (_cpu(process) - used) / (now - begun),
                    "rss_mib": process.memory_info().rss / 2**20,
                    "kib_a_second": (len(terminal.seen) - bytes_before) / 1024 / (now - begun),
                    "whole_curve_within_s": read,
                }
                break
    terminal.close()
    return figures, step


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--check", action="store_true")
    result_options(parser)
    options = parser.parse_args()
    os.environ.pop("SSH_CONNECTION", None)
    results, late = Results(options, processor()), False
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        run = next(store.runs_in(root), None) or make(root, options.lines)
        _reopen(run)
        alive(run)
        step = options.lines
        for hertz, budget in ((2.0, 10.0), (4.0, 15.0)):
            figures, step = watch(run, options.seconds, hertz, step)
            for name, value in figures.items():
                limit = {"cpu_percent": budget, "rss_mib": 100.0}.get(name)
                late |= limit is not None and value > limit
                print(f"{hertz:g} Hz  {name:21} {value:8.2f}" + (f"   budget {limit:g}" if limit else ""))
            shape = f"{options.lines} lines, {hertz:g} Hz; {figures['cpu_percent']:.1f} % of a core"
            results.add("monitor_cost", shape, peak_mib=figures["rss_mib"])
    return 1 if options.check and late else 0


def _reopen(run: store.RunFolder) -> None:
    """Take the final event away, so that the run goes on."""
    with open(run.events, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        tail = file.read()
        last = tail[:-1].rfind(b"\n") + 1
        if b'"kind":"finished"' in tail[last:]:
            file.truncate(size - len(tail) + last)
    (run.index / "view.bin").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
