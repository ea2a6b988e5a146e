"""From the launch of the built-in demo to its first step: with the worker that waited while the review was read, and without one.

    python benchmarks/demo_first_step.py [PAIRS] [--check] [--results FILE --commit HASH]

Each round launches the demo as the app does, in turns: `warm` once its waiting worker has the libraries, `cold` with none. A session
of its own stands for the window. The demo's rows are prepared beforehand, as the app has done while it counted them. The end is
the moment that the run itself notes for its first step's numbers. Of `cold` the seconds that importing took are told apart,
by the run's own phases. `--check` fails where a warm first step comes after more than 5 s, or a cold one more than 2 s after what the imports took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _device import processor
from _figures import Results, result_options

from engine.run.store import RunFolder
from engine.run.warm import SWITCH
from engine.session.build import BuildSession
from engine.session.draft import Draft

WARM, BEYOND_IMPORTS = 5.0, 2.0
"""Seconds that are allowed until the first step: with a worker that waits, and without one beside what the imports take."""
LIBRARIES = "Loading the libraries"


@dataclass(frozen=True)
class Launch:
    """One launch."""

    seconds: float
    """Until the first step."""
    imports: float
    """Of them the seconds in which libraries were imported."""
    processor: float
    """Seconds of a processor that the worker took from the launch to its first step or soon after; of a cold one, all."""


def events_of(run: RunFolder) -> list[dict[str, object]]:
    """What it has told so far, whole lines alone."""
    text = run.events.read_text("utf-8") if run.events.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def until(true: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Wait for it. Raises SystemExit where it does not come about."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)


def _taken(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def launched(room: Path, waiting: bool, steps: int = 2) -> Launch:
    """Launch the demo, cut to so few steps, and take its times."""
    draft = Draft.new("demo")
    draft.set("optim.max_steps", steps)
    session = BuildSession(draft, lambda do, **asked: None, runs=room / "runs")
    try:
        before = 0.0
        if waiting:
            session.warm_up("review")
            until(lambda: session.warm.ready, "the worker that waits")
            before = _taken(session.warm._pid)
        start, begun = session.launch(), time.time()
        run = start()
        until(lambda: any(each["kind"] in ("metrics", "failed") for each in events_of(run)), "the first step")
        taken = _taken(int(run.read_json()["worker_pid"])) - before
        until(lambda: run.state not in ("starting", "running", "queued"), "the end of the run")
    finally:
        session.close()
    told = events_of(run)
    if failed := [each for each in told if each["kind"] == "failed"]:
        raise SystemExit(f"the run failed: {failed[0]['message']}")
    first = next(float(str(each["t"])) for each in told if each["kind"] == "metrics")
    phases = [(str(each["name"]), float(str(each["t"]))) for each in told if each["kind"] == "phase"]
    ends = [moment for _, moment in phases[1:]] + [first]
    imports = sum(end - moment for (name, moment), end in zip(phases, ends, strict=True) if name == LIBRARIES)
    return Launch(first - begun, imports, taken)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    result_options(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        room = Path(place)
        os.environ.update({SWITCH: "1", "WORKBENCH_CACHE": str(room / "cache")})
        launched(room, waiting=False)  # prepares the rows, and compiles what was never imported
        found: dict[bool, list[Launch]] = {True: [], False: []}
        for number in range(given.pairs):
            for waiting in (True, False) if number % 2 else (False, True):
                found[waiting].append(launched(room, waiting))
    results = Results(given, processor(), "torch")
    for waiting, name in ((True, "warm"), (False, "cold")):
        times, imports, taken = (
            statistics.median(column)
            for column in zip(*((each.seconds, each.imports, each.processor) for each in found[waiting]), strict=True)
        )
        print(
            f"{name}: first step {times:.2f} s after the launch, {imports:.2f} s of them imports; {taken:.2f} s of a "
            f"processor (medians of {given.pairs})"
        )
        shape = f"{name}; {given.pairs} rounds; imports {imports:.2f} s; {taken:.2f} s of a processor"
        results.add("demo_first_step", shape, ms=[1000 * each.seconds for each in found[waiting]])
    beyond = statistics.median(each.seconds - each.imports for each in found[False])
    warm = statistics.median(each.seconds for each in found[True])
    if given.check and (warm > WARM or beyond > BEYOND_IMPORTS):
        raise SystemExit(
            f"warm {warm:.2f} s ({WARM:.0f} allowed), cold {beyond:.2f} s beyond the imports ({BEYOND_IMPORTS:.0f})"
        )


if __name__ == "__main__":
    sys.exit(main())
