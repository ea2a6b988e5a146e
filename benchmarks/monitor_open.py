"""How fast the monitor opens a run of a million metric lines: first look, whole curve, second opening, memory, stalls.

python benchmarks/monitor_open.py [--lines 1000000] [--keep FOLDER] [--check] [--results FILE --commit HASH]

Each opening is a fresh process. Prints one line per figure with its budget; `--check` exits 1 when one is passed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _device import processor
from _figures import Results, result_options

from engine.run import store
from engine.run.events import EventWriter

NAMES = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "memory_allocated")


def make(root: Path, lines: int) -> store.RunFolder:
    """A run of `lines` metric events of about 240 bytes, with a checkpoint and a sample now and then."""
    run = store.create(root, "version: 1\n", {"name": "long", "method": "sft", "model": "builtin/tiny"})
    run.update_json(state="finished", segment=0)
    numbers = random.Random(1)
    template = (
        '{"v":1,"seq":%d,"t":%.3f,"rank":0,"segment":0,"kind":"metrics","step":%d,"epoch":%.5f,"loss":%.6f,'
        '"grad_norm":%.5f,"learning_rate":%.8f,"tokens_per_second":%.2f,"step_seconds":%.5f,"memory_allocated":%d}\n'
    )
    with EventWriter(run) as writer:
        writer.write(
            "started", method="sft", model="builtin/tiny", max_steps=lines, epochs=3, resumed_from_step=None,
            world_size=1, devices=[], keep_every=1, thin_after=lines,
        )  # fmt: skip
        base, begun = writer.seq + 1, time.time()
    with open(run.events, "a", encoding="ascii") as file:
        seq = base
        for step in range(1, lines + 1):
            loss = 2.5 * math.exp(-step / (lines / 5)) + 0.1 * numbers.random()
            file.write(
                template
                % (
                    seq,
                    begun + step * 0.2,
                    step,
                    3 * step / lines,
                    loss,
                    1 + numbers.random(),
                    1e-4,
                    9812.5,
                    0.2,
                    1 << 34,
                )
            )
            seq += 1
            if step % 1000 == 0:
                path = f"checkpoint-{step}"
                event = {"v": 1, "seq": seq, "t": begun + step * 0.2, "rank": 0, "segment": 0, "kind": "checkpoint"}
                event |= {"step": step, "path": path, "bytes": 1, "seconds": 0.1, "state": "committed"}
                file.write(json.dumps(event, separators=(",", ":")) + "\n")
                seq += 1
    with EventWriter(run, segment=0) as writer:
        writer.write("finished", step=lines, seconds=lines * 0.2)
    return run


def look(path: str) -> None:
    """One opening, as the app does it: open, poll at 2 Hz until the whole curve is there, then read it."""
    from engine.run.index import open_view

    begun, cpu = time.perf_counter(), time.process_time()
    watch = open_view(store.RunFolder(path))
    first = time.perf_counter() - begun
    steps, _, _ = watch.view.series["loss"].points(start=watch.view.step - 9_999)
    assert len(steps) == 10_000, len(steps)
    longest = 0.0
    while watch.loading < 1.0:
        time.sleep(0.1)
        before = time.perf_counter()
        watch.poll()
        longest = max(longest, time.perf_counter() - before)
    whole = time.perf_counter() - begun
    drawn = time.perf_counter()
    curve = watch.view.series["loss"].points(width=160)
    drawn = time.perf_counter() - drawn
    assert len(watch.view.series["loss"]) == watch.view.max_steps, len(watch.view.series["loss"])
    assert len(curve[0]) > 100
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"first_s": first, "whole_s": whole, "longest_poll_ms": 1e3 * longest, "draw_ms": 1e3 * drawn}
    print(json.dumps({**result, "peak_mib": peak, "cpu_s": time.process_time() - cpu}))
    watch.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--check", action="store_true")
    result_options(parser)
    parser.add_argument("--look", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        look(options.look)
        return 0
    results = Results(options, processor())
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        run = next(store.runs_in(root), None) or make(root, options.lines)
        print(f"{run.events.stat().st_size / 1e6:.0f} MB, {options.lines:,} metric lines")
        (run.index / "view.bin").unlink(missing_ok=True)
        late = False
        for name, budgets in (
            ("first opening", {"first_s": 0.5, "longest_poll_ms": 20, "peak_mib": 100}),
            ("second opening", {"whole_s": 1.0, "peak_mib": 100}),
        ):
            said = subprocess.run([sys.executable, __file__, "--look", str(run.path)], capture_output=True, check=True)
            figures = json.loads(said.stdout)
            for key, value in figures.items():
                budget = budgets.get(key)
                late |= budget is not None and value > budget
                print(f"{name:15} {key:16} {value:9.3f}" + (f"   budget {budget}" if budget is not None else ""))
            shape = f"{options.lines} lines; {name}; whole curve after {figures['whole_s']:.3g} s"
            results.add("monitor_open", shape, ms=[1000 * figures["first_s"]], peak_mib=figures["peak_mib"])
    return 1 if options.check and late else 0


if __name__ == "__main__":
    sys.exit(main())
