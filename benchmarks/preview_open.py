"""How long a large file takes to show: raw rows, index, a random row, its tokens; and what a preview costs a CPU run.

    python benchmarks/preview_open.py --rows 1000000 [--results FILE --commit HASH]
    python benchmarks/preview_open.py --beside --model FOLDER     # a training loop with and without a busy preview

The first part runs in fresh processes and prints the median of several. The second interleaves windows of a training
loop on two threads with the preview idle and busy (A B A B ...), where busy means a held key, with tokens asked for as
often as the app does, and prints the ratio of their speeds with a 95% interval.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _device import processor
from _figures import Results, ratio, result_options

KEY_SECONDS = 1 / 30
"""The usual repeat rate of a held key; the app asks for tokens less often (`ASK_SECONDS`), for the newest row wanted."""

OPEN = """
import json, resource, sys, time
began = time.perf_counter()
from engine.data.rows import open_rows
opened = time.perf_counter()
rows = open_rows(sys.argv[1])
first = rows.first(20)
shown = time.perf_counter()
count = len(rows)
indexed = time.perf_counter()
import random
draw, slowest = random.Random(0), 0.0
for _ in range(200):
    before = time.perf_counter()
    rows[draw.randrange(count)]
    slowest = max(slowest, time.perf_counter() - before)
with open("/proc/self/status") as status:
    anonymous = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
print(json.dumps({"imports": opened - began, "first_rows": shown - opened, "index": indexed - shown, "rows": count,
                  "slowest_random_row": slowest, "anonymous_mib": anonymous / 1024, "torch": "torch" in sys.modules}))
"""

TRAIN = """
import sys, time, torch
torch.set_num_threads(2)
layer = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(layer.parameters())
inputs = torch.randn(128, 256)
for line in sys.stdin:
    end, steps = time.perf_counter() + float(line), 0
    while time.perf_counter() < end:
        optimizer.zero_grad()
        (layer(inputs) - inputs).pow(2).mean().backward()
        optimizer.step()
        steps += 1
    print(steps, flush=True)
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--beside", action="store_true")
    options.add_argument("--pairs", type=int, default=20)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--model", default="builtin/tiny")
    result_options(options)
    given = options.parse_args()
    results = Results(given, processor(), *(["torch"] if given.beside else []))
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder) / "rows.jsonl", given.rows)
        print(json.dumps({"file_mb": path.stat().st_size / 1e6}))
        if given.beside:
            found = beside(path, given)
            print(json.dumps(found))
            told = "{speed_with_preview:.3f} [{low:.3f}, {high:.3f}]".format(**found)
            results.add("preview_beside", f"held key, {given.pairs} pairs; speed of a CPU run {told}")
            return
        runs = [json.loads(_python(OPEN, str(path))) for _ in range(given.repeat)]
        found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(json.dumps(found))
        asked = tokens(path, given.model)
        print(json.dumps(asked))
        shape = f"{given.rows} rows"
        results.add("preview_open", f"{shape}; first rows", ms=[1000 * found["first_rows"]])
        results.add("preview_open", f"{shape}; whole index", ms=[1000 * found["index"]])
        results.add("preview_open", f"{shape}; random row, raw", ms=[1000 * found["slowest_random_row"]])
        results.add("preview_open", f"{shape}; random row with tokens", ms=[1000 * asked["random_preview"]])


def write_rows(path: Path, count: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            question = f"What is {number} times {number % 97}? " * (1 + number % 4)
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": str(number * (number % 97))},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def tokens(path: Path, model: str) -> dict[str, Any]:
    """First and later previews of random rows through the inspector."""
    from engine.client import Inspector

    config = {"model": {"name": model}, "method": {"kind": "sft"}, "data": {"train": [{"path": str(path)}]}}
    with Inspector() as inspector:
        times = []
        for seed in range(21):
            before = time.perf_counter()
            inspector.ask("preview", config=config, rows={"kind": "random", "seed": seed}).result(300)
            times.append(time.perf_counter() - before)
    return {"first_preview": times[0], "random_preview": statistics.median(times[1:]), "slowest": max(times[1:])}


def beside(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Speed of a training loop while a person holds the key for the next random rows, relative to its speed alone."""
    from engine.client import Inspector
    from engine.session.rows import ASK_SECONDS

    config = {"model": {"name": given.model}, "method": {"kind": "sft"}, "data": {"train": [{"path": str(path)}]}}
    pairs: list[tuple[float, float]] = []
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None

        def start() -> None:
            run.stdin.write(f"{given.seconds}\n")  # type: ignore[union-attr]
            run.stdin.flush()  # type: ignore[union-attr]

        with Inspector() as inspector:
            inspector.ask("preview", config=config).result(300)
            start()
            run.stdout.readline()
            for pair in range(given.pairs):
                start()
                alone = int(run.stdout.readline())
                start()
                end, seed = time.perf_counter() + given.seconds, 0
                while time.perf_counter() < end:
                    seed += 1
                    wanted = {"kind": "random", "seed": pair * 1000 + seed}
                    asked = time.perf_counter()
                    inspector.ask("preview", config=config, rows=wanted, count=1).result(60)
                    time.sleep(max(0.0, max(KEY_SECONDS, ASK_SECONDS) - (time.perf_counter() - asked)))
                pairs.append((int(run.stdout.readline()), alone))
        run.stdin.close()
    share, low, high = ratio(pairs)
    return {"speed_with_preview": share, "low": low, "high": high, "pairs": len(pairs)}


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
