"""What a run that failed proposes, from what ended it and from its own settings: never what has just failed.

One place for the worker's last word, the commands and both frontends. `propose` gives one change of the config, which the
rules have no error against; the sentences name what else would help.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.facts.smaller_batch import smaller_batch

if TYPE_CHECKING:
    from engine.run.view import RunView

OUT_OF_MEMORY = frozenset({"cuda_oom", "host_oom", "GPU memory", "host memory"})
REPEATS = frozenset({"diverged", "error", "exception", *OUT_OF_MEMORY})
"""Ends that come again as long as nothing was put right."""
EARLY = "early_stopping"
"""The cause that a run gives which finished before its last step."""
SHORTEST = 64
"""Tokens of `data.max_length` below which no half of it is proposed."""
FIRST = "put right what is named above, as it stands it ends the same way"


@dataclass(frozen=True, slots=True)
class Change:
    """Settings to change in a run's config: (path, value now, value then) each, and what follows in a sentence."""

    sets: tuple[tuple[str, Any, Any], ...]
    why: str

    @property
    def summary(self) -> str:
        """`optim.num_train_epochs 2 -> 4`."""
        return ", ".join(f"{path} {shown(before)} -> {shown(after)}" for path, before, after in self.sets)

    @property
    def options(self) -> str:
        """The same for `workbench resume`, as a shell takes it."""
        return " ".join(f"--set {shlex.quote(f'{path}={shown(after)}')}" for path, _, after in self.sets)

    @property
    def settings(self) -> dict[str, Any]:
        """The values then, by their paths."""
        return {path: after for path, _, after in self.sets}


def longer(run: Any) -> Change:
    """Twice as long as a finished run was told to train; twice the patience where it ended early for want of that."""
    settings = settings_of(run)
    patience = _value(settings, "optim", "early_stopping_patience")
    if isinstance(patience, int) and run.read_json().get("cause") == EARLY:
        why = f"it ended early, and goes on until {2 * patience:,} evaluations in a row are no better"
        return Change((("optim.early_stopping_patience", patience, 2 * patience),), why)
    steps = _value(settings, "optim", "max_steps")
    name = "max_steps" if isinstance(steps, int) and steps > 0 else "num_train_epochs"
    before = steps if name == "max_steps" else _value(settings, "optim", name)
    if isinstance(before, bool) or not isinstance(before, (int, float)) or before <= 0:
        before = 1
    why = "the learning rate follows the longer schedule"
    return Change(((f"optim.{name}", before, 2 * before),), why)


KEEPS_ROWS = ("optim.", "memory.", "kernels.", "model.attention", "run.")
"""Settings that change neither the rows nor what a checkpoint's weights are."""


def propose(view: RunView, settings: Mapping[str, Any]) -> Change | None:
    """The one change of the config to try after a run failed; None where nothing is known to help."""
    for change in _candidates(view, settings):
        if change.sets and _fits(settings, change):
            return change
    return None


def goes_on(view: RunView, change: Change, step: int | None) -> bool:
    """Whether the checkpoint of a step can be gone on from after the change: it must teach the same rows, and have learned."""
    if step is None or not all(path.startswith(KEEPS_ROWS) for path, _, _ in change.sets):
        return False
    if view.cause_kind != "diverged":
        return True
    # The first loss after a checkpoint is that of its weights. A rate that was too high spoils them before numbers break:
    # what is worse than at the start, or broke at once, is no checkpoint to go on from.
    loss, broken = view.series.get("loss"), view.diverged_at if view.diverged_at is not None else view.step
    points = list(zip(*loss.points()[:2], strict=True)) if loss else []
    after = [value for at, value in points if step < at < broken]
    return bool(after) and after[0] <= points[0][1]


def _candidates(view: RunView, settings: Mapping[str, Any]) -> Iterator[Change]:
    for mend in view.mends:
        yield _change(settings, mend, "what was named above does not come again")
    if view.cause_kind == "diverged":
        if _value(settings, "model", "dtype") == "float16":
            why = "bfloat16 holds numbers up to 3e38, float16 up to 65,504"
            yield _change(settings, {"model.dtype": "bfloat16"}, why)
        if (rate := lower_rate(settings)) is not None:
            clips = _value(settings, "optim", "max_grad_norm")
            clipped = {"optim.max_grad_norm": 1.0} if clips == 0 else {}
            why = "a tenth of it, and no more than auto takes" + ("; gradients are clipped" if clipped else "")
            yield _change(settings, {"optim.learning_rate": rate, **clipped}, why)
    if view.cause_kind in OUT_OF_MEMORY:
        for path, why in _memory_for_speed(settings):
            yield _change(settings, {path: None}, why)
        batch = _value(settings, "optim", "per_device_train_batch_size")
        gathered = _value(settings, "optim", "gradient_accumulation_steps")
        if isinstance(batch, int) and batch > 1:
            paths = "optim.per_device_train_batch_size", "optim.gradient_accumulation_steps"
            if isinstance(gathered, int):
                sizes = smaller_batch(batch, gathered)
                why = "less memory for a pass, as many rows in a step"
                yield _change(settings, dict(zip(paths, sizes, strict=True)), why)
            else:
                yield _change(settings, {paths[0]: batch // 2}, "less memory for a pass, and fewer rows in a step")
        why = "activations are computed again instead of kept, which takes about a third more time"
        yield _change(settings, {"memory.gradient_checkpointing": "full"}, why)
        length = _value(settings, "data", "max_length")
        if isinstance(length, int) and length > SHORTEST:
            yield _change(settings, {"data.max_length": length // 2}, "longer rows are then treated as too long")


def _memory_for_speed(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings in force that take memory for speed alone, and what follows where they are empty."""
    again = "all layers are computed again, as checkpointing does by itself, and the same is learned"
    scores = "the head's scores get the usual memory and are computed again; sums round otherwise"
    for section, name, why in (("memory", "recompute_num_layers", again), ("kernels", "cut_ce_workspace", scores)):
        value = _value(settings, section, name)
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{section}.{name}", why


def lower_rate(settings: Mapping[str, Any]) -> float | None:
    """A tenth of the learning rate, and no more than what `auto` takes for the method; None where it is not known."""
    rate = _value(settings, "optim", "learning_rate")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate <= 0:
        return None
    from engine.planning.auto import resolved
    from engine.rules import read

    usual = resolved(read(_with(settings, {"optim.learning_rate": "auto"})).config).optim.learning_rate
    return min(float(f"{rate / 10:.3g}"), usual) if isinstance(usual, (int, float)) else float(f"{rate / 10:.3g}")


def _change(settings: Mapping[str, Any], mend: Mapping[str, Any], why: str) -> Change:
    """The settings among these that are not so already."""
    changes = []
    for path, after in mend.items():
        section, _, name = str(path).partition(".")
        before = _value(settings, section, name)
        if before != after and not (path == "memory.gradient_checkpointing" and before in (True, "full")):
            changes.append((str(path), before, after))
    return Change(tuple(changes), why)


def _with(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    from engine.config.files import put

    changed = copy.deepcopy(dict(settings))
    for path, value in values.items():
        put(changed, path, value)
    return changed


def _fits(settings: Mapping[str, Any], change: Change) -> bool:
    """Whether the rules find no error that was not there before."""
    from engine.rules import read

    def errors(mapping: Mapping[str, Any]) -> set[tuple[str, str]]:
        return {(finding.path, finding.rule) for finding in read(mapping).findings if finding.severity == "error"}

    return errors(_with(settings, change.settings)) <= errors(settings)


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
    if (rate := lower_rate(settings)) is not None:
        steps.append(f"lower optim.learning_rate from {_value(settings, 'optim', 'learning_rate'):g} to {rate:g}")
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
    steps = [f"set {path} to null" for path, _ in _memory_for_speed(settings)]
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


def shown(value: Any) -> str:
    """A value as a config has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(settings: Mapping[str, Any], section: str, name: str) -> Any:
    entry = settings.get(section)
    return entry.get(name) if isinstance(entry, Mapping) else None
