"""A measured rehearsal as a frontend asks for it: the worker in a child process, in a folder that is gone afterwards.

The child is the run's own worker with the run's own config, but for the number of steps; a rehearsal that does not fit
ends as the run would have ended, in one sentence. Results are kept (`engine.run.rehearsed`). Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.config.facts import DataFacts, Facts
from engine.config.files import dump
from engine.config.method import METHODS
from engine.config.tree import RunConfig, fields
from engine.errors import WorkbenchError, redact, visible
from engine.facts.counts import rehearsed_steps
from engine.planning import memory_model
from engine.planning.auto import choices, resolved
from engine.run import cause, devices, inside, spawn, store
from engine.run.from_config import secrets_of
from engine.run.rehearsed import Rehearsal, keep, machine_name
from engine.run.tail import Tail

LOOK_SECONDS = 0.1
OnPhase = Callable[[str], None]


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
        machine=machine_name(facts),
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
                    "push_to_hub": False,
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
                            fields.run.hub_model_id,
                            fields.run.hub_strategy,
                            fields.run.hub_private_repo,
                            fields.run.hub_wait_seconds,
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
                    "early_stopping_threshold": fields.optim.early_stopping_threshold.default,
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
    # What the driver keeps for itself is no part of what torch can measure, nor is a process that samples beside the training.
    driver = memory_model.CUDA_CONTEXT if facts.machine is not None and facts.machine.gpus else 0
    return sum(classes.values()) - driver - classes.get("generation", 0)
