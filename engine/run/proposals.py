"""What a run that failed proposes, from what ended it and from its own settings: never what has just failed.

One place for the worker's last word and both frontends. Standard library and the config's text only.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REPEATS = frozenset({"diverged", "error", "cuda_oom", "host_oom"})
"""Ends that come again as long as nothing was put right."""
FIRST = "put right what is named above, as it stands it ends the same way"


@dataclass(frozen=True, slots=True)
class Change:
    """Settings to change in a run's config: (path, value now, value then) each, and what follows in a sentence."""

    sets: tuple[tuple[str, Any, Any], ...]
    why: str

    @property
    def words(self) -> str:
        """`optim.num_train_epochs 2 -> 4`."""
        return ", ".join(f"{path} {_shown(before)} -> {_shown(after)}" for path, before, after in self.sets)

    @property
    def options(self) -> str:
        """The same for `workbench resume`, as a shell takes it."""
        return " ".join(f"--set {shlex.quote(f'{path}={_shown(after)}')}" for path, _, after in self.sets)

    @property
    def settings(self) -> dict[str, Any]:
        """The values then, by their paths."""
        return {path: after for path, _, after in self.sets}


def longer(settings: Mapping[str, Any]) -> Change:
    """Twice as long as a finished run was told to train."""
    steps = _value(settings, "optim", "max_steps")
    name = "max_steps" if isinstance(steps, int) and steps > 0 else "num_train_epochs"
    before = steps if name == "max_steps" else _value(settings, "optim", name)
    if isinstance(before, bool) or not isinstance(before, (int, float)) or before <= 0:
        before = 1
    why = "the learning rate follows the longer schedule"
    return Change(((f"optim.{name}", before, 2 * before),), why)


def settings_of(run: Any) -> Mapping[str, Any]:
    """The run's config as written; empty where it cannot be read."""
    from engine.config.files import load
    from engine.errors import WorkbenchError

    try:
        return load(run.config).mapping
    except (WorkbenchError, OSError):
        return {}


def after_divergence(settings: Mapping[str, Any], checkpoint: str | None) -> str:
    """The change to make after numbers stopped being finite, and the checkpoint to go on from."""
    steps = []
    rate = _value(settings, "optim", "learning_rate")
    if isinstance(rate, (int, float)) and rate > 0:
        steps.append(f"lower optim.learning_rate from {rate:g} to {rate / 10:g}")
    else:
        steps.append("lower optim.learning_rate")
    clips = _value(settings, "optim", "max_grad_norm")
    if isinstance(clips, (int, float)) and not 0 < clips <= 1:
        steps.append("clip gradients with optim.max_grad_norm: 1.0")
    if (dtype := _value(settings, "model", "dtype")) in ("float16", "bfloat16"):
        steps.append(f"take model.dtype: {'bfloat16' if dtype == 'float16' else 'float32'}")
    todo = ", ".join(steps[:-1]) + (" or " if steps[:-1] else "") + steps[-1]
    then = f"then resume from {checkpoint}, the last with finite weights" if checkpoint else "then start a new run"
    return f"{todo[0].upper()}{todo[1:]}; {then}."


def after_out_of_memory(settings: Mapping[str, Any]) -> str:
    """What takes less memory and is not in force already."""
    steps = []
    batch = _value(settings, "optim", "per_device_train_batch_size")
    if isinstance(batch, int) and batch > 1:
        steps.append(f"lower optim.per_device_train_batch_size from {batch} to {batch // 2}")
    if _value(settings, "memory", "gradient_checkpointing") not in (True, "full"):
        steps.append("set memory.gradient_checkpointing to full")
    length = _value(settings, "data", "max_length")
    steps.append(f"lower data.max_length from {length:,}" if isinstance(length, int) else "lower data.max_length")
    if _value(settings, "adapter", "kind") == "none":
        steps.append("train an adapter alone (adapter.kind: lora)")
    todo = ", ".join(steps[:-1]) + (" or " if steps[:-1] else "") + steps[-1]
    return f"{todo[0].upper()}{todo[1:]}, or take a smaller model."


def way_on(cause_kind: str, checkpoint: str | None, passed_over: str = "") -> str:
    """What resuming does; where it would only fail again, what comes first."""
    words = f"resume from {checkpoint}" if checkpoint else "start again from the beginning"
    words += passed_over
    if cause_kind in REPEATS:
        return f"{FIRST}; then {words}"
    return words


def _shown(value: Any) -> str:
    """A value as a config has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(settings: Mapping[str, Any], section: str, name: str) -> Any:
    found = settings.get(section)
    return found.get(name) if isinstance(found, Mapping) else None
