"""A million rows: the most memory that preparing them takes, how soon the next run has them, how long packing takes.

    python benchmarks/million_rows.py [--rows 1000000] [--chats] [--rounds 5] [--results FILE --commit HASH]

Rows are texts of some twenty tokens, which the built-in tokenizer reads (`--chats`: a question and an answer through its
chat template, a tenth as fast). `preparing` runs in a process of its own, whose peak of resident memory is kept together
with the one of its largest child. A `warm start` is a new process that asks for the same rows and reads the first and the
last: from "nothing of the data open" to both, imports not counted. `packing` is of the rows' lengths alone, by `best_fit`.
CPU seconds stand beside, which a busy machine tells apart from its clock; kept is the clock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _device import processor
from _figures import Results, result_options

MOST_MIB, START, PACK = 1536, 1.0, 1.7
"""The goals: memory of preparing, seconds of a warm start and of packing, for 1,000,000 rows."""


def write(file: Path, count: int, *, chats: bool) -> None:
    """So many rows, no two alike."""
    with file.open("w") as out:
        for number in range(count):
            if chats:
                turns = [("user", f"What is {number} and 2?"), ("assistant", str(number + 2))]
                row: dict[str, Any] = {"messages": [{"role": role, "content": text} for role, text in turns]}
            else:
                row = {"text": f"Row {number}: the day after is {number * 7919 % 28 + 1} of month {number % 12 + 1}."}
            out.write(json.dumps(row) + "\n")


def config(file: Path, cache: Path, *, chats: bool) -> Any:
    """What data reads of a config."""
    from engine.config.data import Data, DataSource
    from engine.config.model import Model

    return SimpleNamespace(
        method=SimpleNamespace(kind="sft" if chats else "pretrain"),
        model=Model(name="builtin/tiny"),
        data=Data(train=[DataSource(path=str(file))], dataset_prepared_path=str(cache), max_length=4096),
        run=SimpleNamespace(seed=1),
    )


def prepared(settings: Any) -> tuple[float, float, float]:
    """Seconds until first and last row are read, CPU seconds of that, and the peak of this process's memory with its largest
    child's, in MiB."""
    import datasets  # noqa: F401 - what a run has imported by then
    from transformers import AutoTokenizer

    from engine.builtin import tiny
    from engine.data.prepare import prepare

    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    began, busy = time.perf_counter(), time.process_time()
    rows = prepare(settings, tokenizer).dataset
    assert len(rows[0]["input_ids"]) > 0 < len(rows[len(rows) - 1]["input_ids"])
    took, busy = time.perf_counter() - began, time.process_time() - busy
    most = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return took, busy, most / 1024


def apart(work: Callable[..., Any], *given: Any) -> Any:
    """What a new process makes of it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, given)


def packing(count: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of packing so many lengths into sequences of 2,048 tokens."""
    from engine.data.packing import best_fit

    draw = random.Random(0)
    lengths = [min(2048, int(draw.lognormvariate(5.3, 0.9)) + 1) for _ in range(count)]
    began, busy = time.perf_counter(), time.process_time()
    packs = best_fit(lengths, 2048)
    took = time.perf_counter() - began, time.process_time() - busy
    assert sum(map(len, packs)) == count
    return took


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--chats", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="warm starts and packings")
    result_options(parser)
    given = parser.parse_args()
    results, kind = Results(given, processor()), "chats" if given.chats else "texts"
    shape = f"{given.rows} {kind}"
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.jsonl"
        write(file, given.rows, chats=given.chats)
        settings = config(file, Path(name) / "cache", chats=given.chats)
        took, busy, most = apart(prepared, settings)
        print(
            f"preparing {shape}: {took:.1f} s ({busy:.1f} of CPU), {most:.0f} MiB at the peak (goal {MOST_MIB})",
            flush=True,
        )
        results.add("million rows", f"preparing {shape}", ms=[1000 * took], peak_mib=most)
        said(results, f"warm start, {shape}", [apart(prepared, settings)[:2] for _ in range(given.rounds)], START)
    said(results, f"packing {given.rows} lengths", [packing(given.rows) for _ in range(given.rounds)], PACK)


def said(results: Results, what: str, took: list[tuple[float, float]], goal: float) -> None:
    """Prints and keeps the medians of the clock and of CPU seconds."""
    clock, busy = (statistics.median(each) for each in zip(*took, strict=True))
    print(f"{what}: {clock:.3f} s ({busy:.3f} of CPU; goal {goal})", flush=True)
    results.add("million rows", what, ms=[1000 * each for each, _ in took])


if __name__ == "__main__":
    main()
