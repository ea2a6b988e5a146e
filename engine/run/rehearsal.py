"""A measured rehearsal as a frontend asks for it: the worker in a child process, in a folder that is gone afterwards.

The child is the run's own worker with the run's own config, but for the number of steps; a rehearsal that does not fit
ends as the run would have ended, in one sentence. Results are kept in the cache folder beside the estimate they were
measured against, so that its error is known the next time. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from engine import figures
from engine.config.facts import DataFacts, Facts
from engine.config.files import absolute, as_mapping, dump
from engine.config.method import METHODS
from engine.config.tree import RunConfig, fields
from engine.errors import WorkbenchError, redact, visible
from engine.facts.counts import rehearsed_steps
from engine.planning import memory_model
from engine.planning.auto import choices, resolved
from engine.run import cause, devices, inside, spawn, store
from engine.run.from_config import secrets_of
from engine.run.tail import Tail

LOOK_SECONDS = 0.1
MOST_KEPT = 1 << 18
OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a step of the longest rows took. Bytes, seconds, tokens; `estimated` is the formula's word on the same rows."""

    t: float
    machine: str
    model: str
    method: str
    memory_peak: int
    seconds_per_step: float
    rows: int
    tokens: int
    longest: int
    estimated: int | None = None
    memory_allocated: int | None = None
    """What of the peak was handed out; the rest are fragments of the allocator."""

    @property
    def error(self) -> float | None:
        """By which share the estimate lies above (+) or below (-) what was measured."""
        return self.estimated / self.memory_peak - 1 if self.estimated else None

    def words(self) -> str:
        """The measurement in a sentence or two."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.t))
        text = f"Rehearsed on {day}: {figures.size(self.memory_peak)} at the peak of a step of the longest rows "
        text += f"({self.longest:,} tokens), which took {self.seconds_per_step:.2g} s."
        if self.error is None:
            return text
        return f"{text} The formula gave {figures.size(self.estimated)}, {abs(self.error):.0%} too {self.side}."

    @property
    def side(self) -> str:
        """On which side of the measured bytes the formula lies: `high` or `low`."""
        return "high" if self.error is not None and self.error > 0 else "low"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": round(self.error, 4) if self.error is not None else None}


def rehearse(config: RunConfig, facts: Facts, on_phase: OnPhase | None = None) -> Rehearsal:
    """Measure a step of this config here, and keep the result. Paths in `config` are absolute.

    Raises WorkbenchError with the run's own words where it would not have got through its first steps.
    """
    whole = resolved(config, facts)
    short = _shortened(whole)
    scratch = _scratch()
    try:
        info = {
            "name": "rehearsal", "method": whole.method.kind, "model": whole.model.name, "rehearse": True,
            "auto": choices(config, facts), "secrets": secrets_of(whole, facts),
        }  # fmt: skip
        run = store.create(scratch, dump(short), info)
        measured = _follow(run, devices.choose(short.run.devices), on_phase or (lambda phase: None))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    # Two batches were measured where the step takes more.
    share = whole.optim.gradient_accumulation_steps / short.optim.gradient_accumulation_steps
    rehearsal = Rehearsal(
        t=time.time(),
        machine=_machine(facts),
        model=whole.model.name,
        method=whole.method.kind,
        memory_peak=measured["memory_peak"],
        seconds_per_step=round(measured["seconds"] * share, 4),
        rows=round(measured["rows"] * share),
        tokens=round(measured["tokens"] * share),
        longest=measured["longest"],
        estimated=_estimated(whole, facts, measured["longest"]),
        memory_allocated=measured.get("memory_allocated"),
    )
    keep(whole, facts, rehearsal)
    return rehearsal


def _scratch() -> str:
    """A folder of the rehearsal's own, below $WORKBENCH_SCRATCH where that is set."""
    below = os.environ.get("WORKBENCH_SCRATCH") or tempfile.gettempdir()
    try:
        return tempfile.mkdtemp(prefix="rehearsal-", dir=below)
    except OSError as problem:
        raise WorkbenchError(
            f"{visible(redact(below))}: a rehearsal cannot be written here: {problem.strerror or problem}.",
            "Let WORKBENCH_SCRATCH name a folder that you can write to, or unset it.",
        ) from problem


def last(config: RunConfig, facts: Facts, base: str | os.PathLike[str] = ".") -> Rehearsal | None:
    """The newest kept rehearsal of this very config on this machine; `base` is the folder of the config's file."""
    key = _key(resolved(config, facts), facts, base)
    try:
        lines = kept().read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in (line for line in reversed(lines) if key in line):
        with contextlib.suppress(ValueError, TypeError):
            values = json.loads(line)
            if isinstance(values, dict) and values.pop("key", None) == key:
                values.pop("error", None)
                return Rehearsal(**values)
    return None


def kept() -> Path:
    """The file of all rehearsals on this machine, one JSON line each."""
    cache = os.environ.get("WORKBENCH_CACHE") or platformdirs.user_cache_dir("finetuning-workbench")
    return Path(cache).expanduser().absolute() / "rehearsals.jsonl"


def _shortened(config: RunConfig) -> RunConfig:
    """A few steps on one device, with nothing between them: no held-out loss, no samples, no checkpoint. What would have no
    meaning in so short a run, and is refused there, stands at its default; no step costs more or less for it."""
    run, optim, data = config.run, config.optim, config.data
    accumulation = optim.gradient_accumulation_steps
    if METHODS[config.method.kind].rows != "prompts":
        accumulation = min(2, accumulation)  # a third batch allocates nothing that the second did not
    one = run.devices[:1] if isinstance(run.devices, list) else 1
    return config.model_copy(
        update={
            "run": run.model_copy(
                update={
                    "prompts": [],
                    "report_to": [],
                    "max_new_tokens": fields.run.max_new_tokens.default,
                    "eval_steps": fields.run.eval_steps.default,
                    "prompts_steps": fields.run.prompts_steps.default,
                    **{
                        spec.path.rpartition(".")[2]: spec.default
                        for spec in (
                            fields.run.evals_per_epoch,
                            fields.run.saves_per_epoch,
                            fields.run.metric_for_best_model,
                            fields.run.greater_is_better,
                            fields.run.save_best,
                        )
                    },
                    "devices": one,
                    "save_steps": 1_000_000,
                    "logging_steps": 1,
                }
            ),
            "optim": optim.model_copy(
                update={
                    "max_steps": rehearsed_steps(config),
                    "num_train_epochs": fields.optim.num_train_epochs.default,
                    "warmup_steps": fields.optim.warmup_steps.default,
                    "per_device_eval_batch_size": fields.optim.per_device_eval_batch_size.default,
                    "early_stopping_patience": fields.optim.early_stopping_patience.default,
                    "bf16_full_eval": fields.optim.bf16_full_eval.default,
                    "gradient_accumulation_steps": accumulation,
                }
            ),
            "data": data.model_copy(update={"eval": [], "val_set_size": 0.0, "shuffle": False}),
        }
    )


def _follow(run: store.RunFolder, choice: devices.Choice, on_phase: OnPhase) -> dict[str, Any]:
    """Start the worker and read its events until it is gone. It never outlives this call."""
    log = inside.open_file(run, run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        child = subprocess.Popen(
            spawn.worker_argv(run, choice),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=run.path,
            env=spawn.environment(os.environ, choice, secrets.token_hex(16), run.read_json()["secrets"]),
            start_new_session=True,
        )
    finally:
        os.close(log)
    tail, measured, failure = Tail(run.events), None, ""
    try:
        ended = False
        while not ended:
            ended = child.poll() is not None
            while events := tail.read(500):
                for event in events:
                    if event["kind"] == "phase":
                        on_phase(str(event.get("name")))
                    elif event["kind"] == "rehearsed":
                        measured = event
                    elif event["kind"] == "failed":
                        failure = str(event.get("message"))
            if not ended:
                time.sleep(LOOK_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if measured is None:
        why = failure or cause.explain(child.returncode, run.log).message
        raise WorkbenchError(f"the rehearsal did not get through a step: {visible(why)}")
    return measured


def _estimated(config: RunConfig, facts: Facts, longest: int) -> int | None:
    """The formula's bytes for the same step: one device, rows of the length that was rehearsed."""
    data = replace(facts.data or DataFacts(), longest=longest)
    classes = memory_model.memory(config, replace(facts, data=data), config.memory.gradient_checkpointing)
    if not classes:
        return None
    # What the driver keeps for itself is no part of what torch can measure.
    driver = memory_model.CUDA_CONTEXT if facts.machine is not None and facts.machine.gpus else 0
    return sum(classes.values()) - driver


def _key(config: RunConfig, facts: Facts, base: str | os.PathLike[str] = ".") -> str:
    """What decides memory and time of a step, hashed: not where the run goes or how long it lasts."""
    mapping = absolute(as_mapping(config), base)
    mapping.pop("run", None)
    for name in ("eval", "val_set_size"):
        mapping.get("data", {}).pop(name, None)
    for name in ("learning_rate", "max_steps", "num_train_epochs", "lr_scheduler_type", "warmup_steps", "weight_decay"):
        mapping.get("optim", {}).pop(name, None)
    text = json.dumps([_machine(facts), mapping], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _machine(facts: Facts) -> str:
    machine = facts.machine
    if machine is None:
        return ""
    return machine.gpus[0].name if machine.gpus else f"CPU, {machine.cpu_count} cores"


def keep(config: RunConfig, facts: Facts, rehearsal: Rehearsal) -> None:
    """One line more; an old file that has grown too long begins anew. A cache that cannot be written is no failure."""
    line = json.dumps({"key": _key(config, facts), **rehearsal.as_json()}) + "\n"
    place = kept()
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and place.stat().st_size > MOST_KEPT:
            place.unlink()
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
