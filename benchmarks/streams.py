"""A stream beside the same rows prepared before: how soon a run takes its first step, how fast rows come, how soon a far place.

    python benchmarks/streams.py [--rows 200000] [--far 10000000] [--rounds 5] [--seconds 20] [--loop-alone]
                                 [--results FILE --commit HASH]

Rows are chats of a question and an answer, which the built-in tokenizer reads. `first step` is of real runs of the built-in
model, from the data's preparing to the first step's end, in turn map-style with rows prepared before and streamed with none:
a stream prepares its first rows while the model is loaded. `first row` is from nothing open to the first
row: of rows prepared before (their cache is warm), of a stream whose shards nobody has prepared, and of a stream at row
`--far` of a JSONL file of short texts. `loop` takes rows in batches of 8 with a step of 20 ms of other work between
them, in turn with both kinds, each alone, and prints the median ratio of their times and of this process's CPU seconds; the stream prepares its rows in its
own steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _device import processor
from _figures import Results, ratio, result_options

BATCH, STEP = 8, 0.02


def config(file: Path, cache: Path, *, streaming: bool, kind: str = "sft", steps: int = 1_000_000) -> Any:
    """What data reads of a config."""
    from engine.config.data import Data, DataSource
    from engine.config.model import Model

    data = Data(
        train=[DataSource(path=str(file))], dataset_prepared_path=str(cache), max_length=4096, streaming=streaming
    )
    return SimpleNamespace(
        method=SimpleNamespace(kind=kind),
        model=Model(name="builtin/tiny"),
        data=data,
        run=SimpleNamespace(seed=1),
        optim=SimpleNamespace(max_steps=steps, num_train_epochs=1.0),
    )


def first_step(file: Path, cache: Path, runs: Path, *, streaming: bool) -> float:
    """Seconds of a real run from "Preparing the data" to the end of its first step."""
    from engine.config.files import dump
    from engine.rules import read
    from engine.run.index import open_view
    from engine.run.launch import launch

    data = {"train": [{"path": str(file)}], "streaming": streaming, "dataset_prepared_path": str(cache)}
    told = {
        "version": 1,
        "model": {"name": "builtin/tiny", "dtype": "float32"},
        "adapter": {"kind": "none"},
        "data": data,
    }
    found = read({**told, "optim": {"max_steps": 2}, "run": {"save_steps": 1_000_000}}).config
    run = launch(dump(found), runs_dir=runs, name=cache.name, devices="auto", info={})
    watch = open_view(run)
    while not watch.view.over:
        time.sleep(0.2)
        watch.poll()
    assert watch.view.state == "finished", run.log.read_text()[-2000:]
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    begun = next(each["t"] for each in events if each["kind"] == "phase" and each["name"] == "Preparing the data")
    return float(next(each["t"] for each in events if each["kind"] == "metrics" and "step_seconds" in each) - begun)


def steps(rows: Any, seconds: float) -> tuple[float, float]:
    """Seconds of so many steps of `STEP` as fit into `seconds`, rows read between them: a step's on average, and those of CPU
    that this process spends in it, where a busy machine is waited for in the others."""
    taken, count = iter(rows), int(seconds / STEP)
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(count):
        for _ in range(BATCH):
            next(taken)
        time.sleep(STEP)
    return (time.perf_counter() - began) / count, (time.process_time() - busy) / count


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--far", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--loop-alone", action="store_true", help="measure the loop and nothing else")
    result_options(parser)
    given = parser.parse_args()
    from transformers import AutoTokenizer

    from engine.builtin import tiny
    from engine.data.prepare import prepare
    from engine.data.streaming.stream import open_stream

    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "chats.jsonl"
        with file.open("w") as out:
            for number in range(given.rows):
                said = [("user", f"What is {number} and 2?"), ("assistant", str(number + 2))]
                turns = [{"role": role, "content": text} for role, text in said]
                out.write(json.dumps({"messages": turns}) + "\n")
        ready = config(file, folder / "ready", streaming=False)
        prepare(ready, tokenizer)
        times: dict[str, list[float]] = {"map-style, prepared": [], "stream, nothing prepared": []}
        pace: list[tuple[float, float]] = []
        busy: list[tuple[float, float]] = []
        for round_ in range(given.rounds):
            began = time.perf_counter()
            prepared = prepare(ready, tokenizer)
            prepared.dataset[0]
            times["map-style, prepared"].append(time.perf_counter() - began)
            began = time.perf_counter()
            opened = open_stream(config(file, folder / f"shards-{round_}", streaming=True), tokenizer)
            opened.stream.next_row()
            times["stream, nothing prepared"].append(time.perf_counter() - began)
            # Each alone, first the one and then the other: the stream's producer works in the stream's own steps.
            kinds = [True, False] if round_ % 2 else [False, True]
            taken: dict[bool, tuple[float, float]] = {}
            for streams in kinds:
                rows = opened.stream if streams else (prepared.dataset[place] for place in range(given.rows))
                taken[streams] = steps(rows, given.seconds)
                if streams:
                    opened.stream.close()
            pace.append((taken[True][0], taken[False][0]))
            busy.append((taken[True][1], taken[False][1]))
        real: dict[str, list[float]] = {"map-style, prepared": [], "stream, nothing prepared": []}
        if given.loop_alone:
            return kept(given, {}, {}, pace, busy)
        first_step(file, folder / "runs-ready", folder / "runs", streaming=False)
        for round_ in range(given.rounds):
            real["map-style, prepared"].append(
                first_step(file, folder / "runs-ready", folder / "runs", streaming=False)
            )
            real["stream, nothing prepared"].append(
                first_step(file, folder / f"runs-{round_}", folder / "runs", streaming=True)
            )
        far = folder / "far.jsonl"
        with far.open("w") as out:
            for start in range(0, given.far + 1, 1000):
                out.write("".join(f'{{"text": "row {start + number}"}}\n' for number in range(1000)))
        times["stream, far in"] = [
            far_in(far, folder / f"far-{at}", tokenizer, given.far) for at in range(given.rounds)
        ]
    return kept(given, real, times, pace, busy)


Pairs = list[tuple[float, float]]
"""Seconds of the stream's steps and of the others'."""


def kept(given: argparse.Namespace, real: Any, times: Any, pace: Pairs, busy: Pairs) -> None:
    """Prints and keeps what was measured."""
    results = Results(given, processor())
    for each, found in real.items():
        print(f"{each:<28}{statistics.median(found):8.3f} s to the first step")
        results.add("streams", f"first step, {given.rows} rows", each, ms=[1000 * one for one in found])
    for each, found in times.items():
        shape = f"first row, {given.far if 'far' in each else given.rows} rows"
        print(f"{each:<28}{statistics.median(found):8.3f} s to the first row")
        results.add("streams", shape, each, ms=[1000 * one for one in found])
    for what, pairs in ((f"step of {1000 * STEP:.0f} ms", pace), ("CPU of the training process in it", busy)):
        middle, low, high = ratio(pairs)
        print(f"{what}, stream / map-style: {middle:.4f} [{low:.4f}, {high:.4f}]")
        for each, found in (("stream", [one for one, _ in pairs]), ("map-style", [one for _, one in pairs])):
            results.add("streams", f"{what}; / map-style {middle:.4f}", each, ms=[1000 * one for one in found])


def far_in(file: Path, cache: Path, tokenizer: Any, row: int) -> float:
    """Seconds from nothing open to the row behind place `row` of the first epoch, of which no shard is prepared."""
    from engine.data.streaming.stream import open_stream

    settings = config(file, cache, streaming=True, kind="pretrain")
    began = time.perf_counter()
    stream = open_stream(settings, tokenizer).stream
    shards = stream.walk.lanes[0].counts[0]
    stream.go_to({**stream.walk.state(), "shard": shards - 1, "taken": [[shards - 1, 0]], "row": 0})
    assert stream.next_row() is not None
    took = time.perf_counter() - began
    stream.close()
    return took


if __name__ == "__main__":
    main()
