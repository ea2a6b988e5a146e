"""Reading, all rules, effective values and the estimate after one edit, over every setting of the full schema.

    python benchmarks/read_edit.py [--rounds 40] [--results FILE --commit HASH]

Each round sets every setting of a DPO-with-LoRA config (the largest form) to another value and takes the time until
findings, effective values and estimate are there, as a key press in a form does. Printed: median, p95, p99, worst.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from _device import processor
from _figures import Results, result_options

from engine.config.facts import DataFacts, Facts, SourceFacts
from engine.config.tree import FieldSpec, fields_of
from engine.facts.model_shape import model_facts
from engine.hardware import parse_machine
from engine.planning.auto import effective
from engine.planning.estimate import estimate
from engine.session.draft import Draft

FACTS = Facts(
    machine=parse_machine("1xRTX4090-24GB"),
    model=model_facts("Qwen/Qwen3-0.6B"),
    data=DataFacts(rows=20_000, eval_rows=500, tokens=9_000_000, longest=1900, truncated=40, masked=2, exact=True),
    packages={},
    sources={"rows.jsonl": SourceFacts("rows.jsonl", exists=True, rows=20_000, format="preference")},
)


def values(spec: FieldSpec) -> list[object]:
    """Values worth typing: good ones, the edge, and nonsense."""
    if spec.control == "bool":
        return [True, False]
    if spec.choices:
        return [*spec.choices, "nonsense"]
    if spec.control in ("int", "float"):
        return ["1", "2", "nonsense", -1]
    return ["text", "a, b", ""]


def measure(rounds: int, clock: Callable[[], float] = time.perf_counter) -> tuple[list[float], int]:
    """Milliseconds of each edit, and how many settings were edited in turn."""
    draft = Draft.new("dpo")
    draft.set("data.train.0.path", "rows.jsonl")
    draft.learn(FACTS)
    specs = [spec for spec in fields_of(draft.config) if spec.control != "sources" and spec.name != "kind"]
    times = []
    for number in range(rounds):
        for spec in specs:
            typed = values(spec)
            started = clock()
            draft.set(spec.path, typed[number % len(typed)])
            reading = draft.reading
            effective(reading.config, FACTS)
            estimate(reading.config, FACTS)
            times.append((clock() - started) * 1000)
    return times, len(specs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    result_options(parser)
    given = parser.parse_args()
    times, settings = measure(given.rounds)
    times.sort()
    at = {share: times[int(len(times) * share)] for share in (0.95, 0.99)}
    print(
        f"{len(times)} edits of {settings} settings: median {statistics.median(times):.2f} ms, "
        f"p95 {at[0.95]:.2f} ms, p99 {at[0.99]:.2f} ms, worst {times[-1]:.2f} ms (p99 must be at most 3 ms)"
    )
    shape = f"{len(times)} edits of {settings} settings; p99 {at[0.99]:.2f} ms"
    Results(given, processor()).add("read_edit", shape, ms=times)


if __name__ == "__main__":
    main()
