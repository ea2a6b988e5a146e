"""Whether loader processes keep a step on images fed, what they need for it, and what memory the batches that wait take.

    python benchmarks/image_loading.py [--step 400] [--steps 20] [--workers 0 1 2] [--factors 1 2 4] [--pairs 10]
                                       [--results FILE --commit HASH]

Batches of 8 JPEGs of 1,152 x 896 pixels, one a row, are read, resized and cut into patches by Qwen2.5-VL's own image processor
and our collator (`engine.data.collate`), as torch's loader runs it for a trainer with these settings. A step is a sleep of
400 ms, as a host waits for a card (which makes numbers of the bytes that loader processes send). In interleaved pairs: the CPU
seconds that a loader process takes for a batch, with transformers' own arithmetic and with ours. For each number of processes:
the mean time of a step, and the share of it that waited for data. With two processes and a factor of batches ahead each: the
shared memory (`/dev/shm`) that the batches take which wait, once all are made that may be, beside the processes' own memory
(`Pss`). Whatever else uses shared memory meanwhile is counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _device import processor as device
from _figures import Results, result_options
from torch.utils.data import DataLoader
from vision_step import MARKS, write_processor

BATCH, SIZE = 8, (1152, 896)
FED = 1.05
"""A step that is fed takes so many times its own length at most."""


def pictures(folder: Path, count: int) -> list[str]:
    """So many photographs, or what a decoder takes for such: smooth shapes with noise above them."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    paths = []
    for number in range(count):
        coarse = torch.randint(0, 256, (14, 18, 3), dtype=torch.uint8, generator=generator).numpy()
        image = Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)
        noise = torch.randint(0, 256, (SIZE[1], SIZE[0], 3), dtype=torch.uint8, generator=generator).numpy()
        paths.append(str(folder / f"{number}.jpg"))
        Image.blend(image, Image.fromarray(noise), 0.06).save(paths[-1], quality=90)
    return paths


def collator(folder: Path, frugal: bool = True) -> tuple[Any, list[int]]:
    """Our collator with Qwen2.5-VL's processor, and the tokens of a row with one picture."""
    import transformers

    from engine.builtin import tiny
    from engine.config.data import Data
    from engine.data.collate import LanguageCollator
    from engine.data.vision import ImageBatch, ImageTokens
    from engine.models.processors import load_processor

    transformers.AutoTokenizer.from_pretrained(tiny.folder(), extra_special_tokens=MARKS).save_pretrained(folder)
    write_processor(folder, 14)
    config: Any = SimpleNamespace(data=Data())
    made = load_processor(config, str(folder), folder, None)
    tokens = ImageTokens(made).resized(str(folder / "0.jpg")).tokens
    ids = made.tokenizer(f"What is it? {tokens} Noise.", add_special_tokens=False)["input_ids"]
    images = ImageBatch(made)
    if not frugal:
        images.processor, images._frugal.patches = made, None
    return LanguageCollator(made.tokenizer.pad_token_id, images=images), ids


class Rows(torch.utils.data.Dataset[Any]):
    """Prepared rows: tokens, and the path of a picture."""

    def __init__(self, paths: list[str], ids: list[int], count: int) -> None:
        self.paths, self.ids, self.count = paths, ids, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.ids, "labels": self.ids, "images": [self.paths[row % len(self.paths)]]}


def loader(rows: Rows, collate: Any, workers: int, factor: int = 2) -> DataLoader[Any]:
    """As transformers makes it of `data.dataloader_num_workers` and `data.dataloader_prefetch_factor`."""
    return DataLoader(rows, BATCH, collate_fn=collate, num_workers=workers, prefetch_factor=factor if workers else None)


def steps(batches: Any, count: int, step: float) -> tuple[list[float], float]:
    """Seconds of each step, and the share of all that waited for a batch."""
    taken, times, waited = iter(batches), [], 0.0
    for _ in range(4):
        next(taken)  # processes begin, and the first batches are made
    for _ in range(count):
        began = time.perf_counter()
        next(taken)
        waited += time.perf_counter() - began
        time.sleep(step)
        times.append(time.perf_counter() - began)
    return times, waited / sum(times)


def cpu(rows: Rows, collate: Any, batches: int = 4) -> float:
    """CPU seconds that a loader process takes for a batch, its beginning left out."""
    taken = iter(loader(rows, collate, 1, 1))
    process = taken._workers[0].pid
    next(taken)  # while the second is made
    next(taken)
    before = _busy(process)
    for _ in range(batches):
        next(taken)
    return (_busy(process) - before) / batches


def _busy(process: int) -> float:
    """CPU seconds that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def held(rows: Rows, collate: Any, workers: int, factor: int) -> tuple[float, float, float]:
    """MiB of the batches that wait once all are made that may be, of the loader's processes, and of one batch."""
    empty = _shared()
    batches = loader(rows, collate, workers, factor)
    taken = iter(batches)
    first = next(taken)
    made = sum(getattr(each, "flat", each).nbytes for each in first.values()) / 2**20
    del first
    before, still = -1.0, 0
    while still < 5:  # nothing is made any more
        time.sleep(1.0)
        now = _shared() - empty
        still = still + 1 if abs(now - before) < 1 else 0
        before = now
    return before, sum(_pss(each.pid) for each in taken._workers), made


def _shared() -> float:
    """MiB of shared memory in use on this machine."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize / 2**20


def _pss(process: int) -> float:
    """MiB of a process, pages that several share counted in parts."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no Pss of process {process}")


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=400, help="milliseconds")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--factors", type=int, nargs="*", default=[1, 2, 4])
    result_options(parser)
    given = parser.parse_args()
    results = Results(given, device(), "torch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = pictures(folder, 16)
        collate, ids = collator(folder)
        rows = Rows(paths, ids, 100_000)
        busy = time.process_time()
        collate([rows[place] for place in range(BATCH)])
        busy = time.process_time() - busy
        print(f"a batch of {BATCH} pictures of {SIZE[0]} x {SIZE[1]}: {1000 * busy:.0f} ms of CPU", flush=True)
        plain = collator(folder, frugal=False)[0]
        pairs = [(cpu(rows, plain), cpu(rows, collate)) for _ in range(given.pairs)]
        for name, times in zip(("transformers' arithmetic", "ours"), zip(*pairs, strict=True), strict=True):
            print(f"a loader process, {name}: {statistics.median(times):.3f} s of CPU a batch", flush=True)
            results.add("image loading", "CPU of a loader process, a batch", name, ms=[1000 * each for each in times])
        for workers in given.workers:
            times, waited = steps(loader(rows, collate, workers), given.steps, given.step / 1000)
            middle = 1000 * statistics.median(times)
            said = "fed" if middle <= FED * given.step else "not fed"
            load = os.getloadavg()[0]
            print(
                f"{workers} processes: a step takes {middle:.0f} ms, {waited:.1%} waiting ({said}; load {load:.1f})",
                flush=True,
            )
            shape = (
                f"step of {given.step:.0f} ms, {BATCH} pictures of 1 MP; {busy:.2f} s of CPU a batch; load {load:.0f}"
            )
            results.add("image loading", shape, f"{workers} loader processes", ms=[1000 * each for each in times])
        for factor in given.factors:
            waits, own, made = held(rows, collate, 2, factor)
            print(
                f"2 processes, {factor} ahead each: {waits:.0f} MiB wait beside {own:.0f} of the processes; a batch is {made:.0f}",
                flush=True,
            )
            shape = f"shared memory of 2 loader processes; a batch is {made:.0f} MiB"
            results.add("image loading", shape, f"{factor} batches ahead each", peak_mib=waits)


if __name__ == "__main__":
    main()
