"""One step, measured: the longest rows of the data go through the real trainer, and what that took is told.

Two steps are made, because optimizer states and the reused blocks of the allocator exist only after the first; peaks are
those of both, the time is the second's. Where several steps are trained on the answers of one sampling, so many follow the
first, and the time is their mean: one of them samples. Gradients are kept over two batches where the run keeps them over
more. Nothing of it is saved. The worker hangs `Measuring` into its own trainer; this module knows no method.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy


class Measuring(TrainerCallback):
    """Chooses the rows, then reads the clock and the peak of memory while they are trained.

    The peak is the card's as torch reserved it, beside what of that was handed out; on a CPU both are this process's
    resident pages. `rows_per_step` is what one optimizer step takes; `together` are as many prompts as one sampling may
    take, which is more than a step's where `method.steps_per_generation` says so. `steps` are made at least, and a sampling
    serves `cycle` of them.
    """

    def __init__(self, dataset: Any, rows_per_step: int, together: int = 0, steps: int = 2, cycle: int = 1) -> None:
        widths = _widths(dataset)
        order = sorted(range(len(widths)), key=lambda row: (-widths[row], row))
        first = _longest_per_label(dataset, order)
        chosen = [*first, *(row for row in order if row not in first)]
        taken = [chosen[place % len(chosen)] for place in range(max(rows_per_step, len(first)))]
        self.dataset = dataset.select(taken * max(steps, -(-together // len(taken))))
        self._measured = {
            "rows": rows_per_step,
            "tokens": sum(widths[row] for row in taken[:rows_per_step]),
            "longest": max(widths[row] for row in taken),
        }
        self._begun = 0.0
        self._cycle = cycle
        self._seconds: list[float] = []
        self._memory_before = self._memory_peak = self._memory_allocated = 0

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        # transformers saves after the last step, however far off `save_steps` is.
        args.save_strategy = SaveStrategy.NO
        self._memory_before = _reset_peak()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = _now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._seconds.append(_now() - self._begun)
        # A kernel counts pages in batches on each core, so that a peak can be told a little late.
        self._memory_peak = max(_peak(), self._memory_before)
        self._memory_allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._memory_peak

    def result(self) -> dict[str, Any]:
        """The payload of the event `rehearsed`: bytes, seconds of one step as rehearsed, and what went through it."""
        return {
            "memory_peak": self._memory_peak,
            "memory_before": self._memory_before,
            "memory_allocated": self._memory_allocated,
            "seconds": round(self._of_a_step(), 4),
            **self._measured,
        }

    def _of_a_step(self) -> float:
        """Mean seconds of the steps after the first. Where a sampling serves more of them than were made, the first, which
        samples and is slower for being the first, stands for the one that would."""
        first, *others = self._seconds or [0.0]
        mean = sum(others) / len(others) if others else first
        return mean if len(others) >= self._cycle else mean + max(0.0, first - mean) / self._cycle


def _longest_per_label(dataset: Any, order: list[int]) -> list[int]:
    """The longest row of each verdict, where rows have one: good is told from bad only where both are there."""
    verdicts = [name for name, feature in dataset.features.items() if getattr(feature, "dtype", "") == "bool"]
    if not verdicts:
        return []
    values = dataset[verdicts[0]][:]
    return [next(row for row in order if values[row] is wanted) for wanted in (True, False) if wanted in values]


def _widths(dataset: Any) -> list[int]:
    """Tokens of each row's longest sequence: its one column of ids, or the prompt with its longest answer. Rows that are
    not tokens yet are measured by their text."""
    names = [name for name in dataset.column_names if name.endswith("_ids")]
    if not names:
        return [len(str(row)) for row in dataset]
    table = dataset.with_format("arrow")[:]
    lengths = {name: pc.fill_null(pc.list_value_length(table[name]), 0).to_pylist() for name in names}
    prompts = lengths.pop("prompt_ids", None)
    longest = [max(row) for row in zip(*lengths.values(), strict=True)] if lengths else [0] * len(dataset)
    return longest if prompts is None else [sum(row) for row in zip(prompts, longest, strict=True)]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def _reset_peak() -> int:
    """Forget peaks of preparing and loading; bytes in use now."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_reserved())
    # Where the system has no such file, the peak is that of the whole process so far.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak() -> int:
    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else _status("VmHWM")


def _status(name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    import resource

    # Elsewhere only the peak of the process is told, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
