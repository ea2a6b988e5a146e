"""What `workbench evaluate` measured of a run: which checkpoint is meant, and the file in the run's folder that keeps it.

`evaluations.jsonl` has one line for each evaluation, appended whole. Standard library only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.errors import RunBusy, UsageError, WorkbenchError, redact, visible
from engine.run import checkpoint, devices, inside, launch
from engine.run.curves import format_metric, ordered, titled
from engine.run.index import open_view
from engine.run.spawn import ALL_TOKENS, for_rewards
from engine.run.store import RunFolder, called
from engine.run.task import Task

COMMAND = (sys.executable, "-P", "-m", "engine.evaluate")
FILE = "evaluations.jsonl"
NAMED = 4
"""Numbers of an evaluation that a sentence names."""
MOST = 1 << 24
NOT_MEASURED = ("_runtime", "_per_second", "_preparation_time", "eval_num_tokens")
"""Ends of names that trainers log beside what they measure."""


INSTALL = "`pip install -U lm-eval` brings it."


def has_harness() -> bool:
    """Whether lm-evaluation-harness is installed."""
    return importlib.util.find_spec("lm_eval") is not None


def tasks_of(named: Sequence[str], place: str = "--tasks") -> list[Path]:
    """The files of tasks of lm-evaluation-harness; `place` is where they are named. Raises UsageError for one that is none,
    WorkbenchError without the harness."""
    files = [Path(path).expanduser().absolute() for path in named]
    for file in files:
        if file.suffix not in (".yaml", ".yml") or not os.path.isfile(file) or not os.access(file, os.R_OK):
            raise UsageError(
                f"{place}: must be a task's YAML file that can be read; got {visible(redact(str(file)))}.",
                "Its rows lie on this machine, named in it as dataset_path and dataset_kwargs.data_files.",
            )
    if files and not has_harness():
        raise WorkbenchError(f"{place}: needs lm-evaluation-harness, which is not installed.", INSTALL)
    return files


class Evaluation(Task):
    """One evaluation in a process of its own."""

    what = "evaluation"
    cancelled = "Cancelled: nothing was kept."

    def __init__(
        self,
        run: RunFolder,
        step: int,
        *,
        base: bool = False,
        data: str | None = None,
        tasks: Sequence[Path] = (),
        device: str = "auto",
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`base` measures the model as training began with it, too; `data` is a file, by its whole path, or built-in rows in the
        place of the run's own held-out ones; `tasks` are files of lm-evaluation-harness, by which it is measured instead;
        `device` is `auto` or `cpu`."""
        asked = {"run": str(run.path), "step": step, "base": base, "data": data}
        asked["tasks"] = [str(task) for task in tasks]
        super().__init__(asked, command, _placed(run, device), (*ALL_TOKENS, *for_rewards(os.environ)))
        self._folder = run

    def measure(self, report: Callable[[dict[str, Any]], None]) -> tuple[dict[str, Any], Path]:
        """Measure, and keep the record beside the run; the file that holds it. Raises as `run`, and where it cannot be kept."""
        record = {"t": round(time.time(), 3), **self.run(report)}
        return record, keep(self._folder, record)


def _placed(run: RunFolder, device: str) -> dict[str, str]:
    """The variables that say where it computes: on a GPU that no run of the same folder has, where there is one."""
    if device not in ("auto", "cpu"):
        raise UsageError(f"--device: must be auto or cpu; got {visible(device)[:40]}.")
    taken = {name for names in launch.devices_of_live(run.path.parent).values() for name in names}
    choice = devices.choose("auto", taken) if device == "auto" else devices.Choice((), 1)
    return {"CUDA_VISIBLE_DEVICES": ",".join(choice.visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def step_of(run: RunFolder, wanted: str | None) -> int:
    """The step of the checkpoint that is meant: a number, `best`, or the newest whole one.

    Raises WorkbenchError for a run that is at work, one without that checkpoint, and one that knows no best one.
    """
    name = visible(run.id)
    run.refuse_flaws()
    launch.settle(run)
    if launch.at_work(run):
        raise RunBusy(
            f"run {name} is still {run.state}, and its checkpoints may go meanwhile.",
            f"It measures held-out rows as it goes: `workbench watch {called(run)}`; or wait until it has ended.",
        )
    if wanted is None:
        newest, skipped = checkpoint.newest_valid(run, hashes=False)
        if newest is None:
            why = f"none of its checkpoints is whole ({skipped[0][0].name}: {skipped[0][1]})" if skipped else (
                "it has no checkpoint, so there is nothing to measure"
            )  # fmt: skip
            raise WorkbenchError(f"run {name}: {why}.", checkpoint.way_to_one(run))
        return checkpoint.step_of(newest) or 0
    if wanted == "best":
        return _best_step(run)
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 18):
        raise UsageError(f"--checkpoint: must be a step or best; got {visible(wanted)[:40]}.", _those_of(run))
    step = int(wanted)
    if reason := checkpoint.problem_with(run.checkpoints / f"checkpoint-{step}"):
        raise UsageError(f"--checkpoint: run {name} has no whole checkpoint {step}: it {reason}.", _those_of(run))
    return step


def _best_step(run: RunFolder) -> int:
    with open_view(run) as watch:
        watch.read_completely()
        best = watch.view.best
    if best is None:
        raise UsageError(
            f"--checkpoint: run {visible(run.id)} knows no best one, since no rows were held out while it trained.",
            _those_of(run),
        )
    step = int(best["step"])
    if reason := checkpoint.problem_with(run.checkpoints / f"checkpoint-{step}"):
        raise UsageError(
            f"--checkpoint: the best step of run {visible(run.id)} was {step}, and its checkpoint {reason}.",
            _those_of(run),
        )
    return step


def complete_steps(run: RunFolder) -> list[int]:
    """The steps of its whole checkpoints, in order."""
    return sorted(checkpoint.step_of(path) or 0 for path in checkpoint.newest_first(run) if checkpoint.is_valid(path))


def _those_of(run: RunFolder) -> str:
    steps = complete_steps(run)
    return f"Its whole ones: {', '.join(map(str, steps))}." if steps else "It has none that is whole."


def keep(run: RunFolder, record: dict[str, Any]) -> Path:
    """Append what was measured; the file. Raises WorkbenchError where it cannot be written."""
    path = run.path / FILE
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    try:
        handle = inside.open_file(run, path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            before = os.fstat(handle).st_size
            if os.write(handle, line) < len(line):
                os.ftruncate(handle, before)
                raise OSError(28, "No space left on device")
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as problem:
        raise WorkbenchError(f"{visible(str(path))}: cannot be written: {problem.strerror or problem}.") from problem
    return path


def records_of(run: RunFolder) -> list[dict[str, Any]]:
    """What was measured so far, the oldest first; lines that are none of ours are passed over."""
    try:
        text = inside.read(run, run.path / FILE, MOST).decode("utf-8", "replace")
    except (OSError, WorkbenchError):
        return []
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("metrics"), dict):
            records.append(record)
    return records


def summary(record: dict[str, Any]) -> str:
    """One evaluation in a sentence: the checkpoint, its most telling numbers, and beside them those before training where they were
    measured."""
    names = ordered(str(record.get("method")), list(record["metrics"]))
    names, more = names[:NAMED], len(names) - NAMED
    base = record.get("base") if isinstance(record.get("base"), dict) else None
    parts = []
    for name in names:
        beside = f" ({_value(name, base.get(name))} before training)" if base else ""
        parts.append(f"{titled(name).removeprefix('held-out ')} {_value(name, record['metrics'][name])}{beside}")
    if more > 0:
        parts.append(f"{more} more in {FILE}")
    rows = record.get("rows")
    of = f", {rows:,} row{'' if rows == 1 else 's'} of" if type(rows) is int else ","
    return visible(redact(f"{record.get('checkpoint')}{of} {record.get('data')}: {', '.join(parts)}"))


def _value(name: str, value: Any) -> str:
    return format_metric(name, value) if isinstance(value, (int, float)) else "not finite"
