"""Compiled layers at their first batch and later: what came of them, and plain ones where they fail and nobody asked for them.

Layers are compiled when they are first called, in the middle of a step. A run that had asked for it ends with the
compiler's error; one that took it by `auto` goes on with plain layers from where the step began: no gradient, the same
random numbers, the trainer's own lists and counts as they were. Where several processes train together a step is not begun
again, since the others would wait for what it sends and these for more: there the call that fails is made again, as at
later batches. Nor does `auto` keep layers whose graphs break. A later
batch may be compiled anew, for another length; there the one call that fails is made again by the plain layer, and so is
each after it: nothing of the step is lost, since under `auto` the backward pass is compiled with its forward pass and no
later. A batch that plain layers cannot compute either ends the run as it would have without a compiler, and so does a
device without memory for it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from engine.compat.instances import all_of, put
from engine.errors import ModelError, WorkbenchError
from engine.features import failures
from engine.features.applied import Applied
from engine.features.built import Built, Training
from engine.features.compile import recompiles
from engine.features.compile.progress import CompileProgress, Paces
from engine.features.compile.recompiles import TURN_OFF, LaterGraphs, graphs_and_breaks

FEATURE = "torch.compile"
EARNED = "the first batch waits, all others are computed faster"
NONE_COMPILED = "the first batch was computed without a compiled layer"


@dataclass
class Switch:
    """Whether the layers run compiled from now on, and what of them has."""

    on: bool = True
    ran: set[CodeType] = field(default_factory=set)
    """The functions that were called compiled: the compiler keeps its graphs there, for the next run in this process too."""
    give_up: Callable[[Exception], None] | None = None
    """Turns it off for good after this failure of a call, or raises it; None where a failure is not survived."""
    requested: bool = True
    """Whether a person asked for it; a run with them ends where it fails."""
    counting: bool = False
    """Whether the calls are inside of `as_many_graphs` already."""


@dataclass(frozen=True)
class Compiling:
    """What is told of it: the layers' number, words for the detail, and why `auto` took it, None where it was asked for."""

    layers: int
    summary: str
    auto: str | None
    shape: str | None = None
    """What the wait for such layers is kept under; None where it is not kept."""
    expected: float | None = None
    """Seconds that it took the last time, where that is known."""

    def applied(self, detail: str, effective: str = "inductor") -> Applied:
        """Its row of the receipt."""
        requested = True if self.auto is None else "auto"
        count = self.layers if effective == "inductor" else None
        return Applied(FEATURE, requested, effective, count, detail)


def watch_first_step(built: Built, switch: Switch, compiling: Compiling) -> Callable[[], None]:
    """Wraps the instance's `training_step`, whose first call is told and under `auto` survived whole; returns the undo."""
    trainer, graphs = built.training, graphs_and_breaks()
    step = trainer.training_step
    told, together = False, _others_train_along()
    progress = CompileProgress(built.events, compiling.auto or EARNED, compiling.expected)
    paces = Paces(None if built.events is None else compiling.shape)
    later = LaterGraphs(built)

    def give_up(error: Exception) -> None:
        if isinstance(error, (WorkbenchError, torch.OutOfMemoryError)):
            raise error
        switch.on = False
        _report_failure(built, compiling, _problem(error), f" at step {_number(trainer)}")

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal told
        paces.batch(switch.on)
        at_once = contextlib.nullcontext() if compiling.auto is None else _backward_at_once()
        with progress.batch(), at_once, as_many_graphs(switch):
            if told or not switch.on:
                with later.batch():
                    return step(*args, **kwargs)
            told, switch.give_up = True, give_up if together and compiling.auto is not None else None
            begun = time.monotonic()
            back = compiling.auto is not None and not together
            loss = _first(built, step, args, kwargs, switch, compiling, graphs, back=back)
            paces.waited(time.monotonic() - begun)
        switch.give_up = None if compiling.auto is None else give_up
        return loss

    switch.give_up = None if compiling.auto is None else give_up
    return all_of([progress.watch(), put(trainer, "training_step", training_step)])


def _first(
    built: Built,
    step: Any,
    args: Any,
    kwargs: Any,
    switch: Switch,
    compiling: Compiling,
    before: tuple[int, int],
    *,
    back: bool,
) -> Any:
    """The first step's answer, with compiled layers or without; `before` counts graphs and breaks until then, and with
    `back` a step that fails is begun again."""
    begun = time.monotonic()
    loss, problem = _attempt(built.training, step, args, kwargs, back=back)
    if problem is not None:
        switch.on = False
        _report_failure(built, compiling, problem)
        return step(*args, **kwargs)
    if not switch.on:  # a call failed, was made again and is told already
        return loss
    made, broken = (now - then for now, then in zip(graphs_and_breaks(), before, strict=True))
    seconds = f"first batch {time.monotonic() - begun:.1f} s"
    if made:
        _MADE.update(switch.ran)
    if not switch.ran or not (made or any(map(_known, switch.ran))):
        _without(built, switch, compiling, NONE_COMPILED)
    elif broken and compiling.auto:
        pieces = f"{made} graphs, {broken} breaks in them, {seconds}: layers in pieces gain little"
        _without(built, switch, compiling, pieces)
    else:
        found = f"{made} graphs, {broken} breaks in them" if made else "graphs of an earlier run in this process"
        built.report(compiling.applied(f"layers; {found}; {seconds}{compiling.summary}"))
    return loss


def _others_train_along() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """Inside, in this thread, what is compiled is compiled with its backward pass, so that a failure is one of a layer's
    call. Torch would wait for the first backward pass, when gradients of other layers have been added already."""
    from torch._functorch import config

    name = "force_non_lazy_backward_lowering"
    return config.patch(name, True) if hasattr(config, name) else contextlib.nullcontext()


def as_many_graphs(switch: Switch) -> contextlib.AbstractContextManager[Any]:
    """Inside, in this thread, torch makes up to `recompiles.MOST_GRAPHS` graphs of a layer's call and raises where one more is wanted.

    A layer's plain numbers (scales, epsilons) are constants of its graph: taken as inputs, as torch has it for any length at
    once, they make it trace and compile the graph twice, the first time in vain.
    """
    return contextlib.nullcontext() if switch.counting else _counting(switch)


@contextlib.contextmanager
def _counting(switch: Switch) -> Iterator[None]:
    from torch._dynamo import config

    switch.counting = True
    limits = {"recompile_limit": recompiles.MOST_GRAPHS, "fail_on_recompile_limit_hit": True, "specialize_float": True}
    # DistributedDataParallel would have each graph cut where a bucket of gradients is full, the first after 1 MiB. Layers are
    # graphs of their own: messages pass between them as it is.
    limits["optimize_ddp"] = False
    # What a checkpointed layer puts down beside its answer (routers are heard and counted) is put down once.
    try:
        with config.patch({**limits, "skip_fwd_side_effects_in_bwd_under_checkpoint": True}):
            yield
    finally:
        switch.counting = False


def _number(trainer: Training) -> int:
    return getattr(getattr(trainer, "state", None), "global_step", 0) + 1


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {failures.first_line(error)}"


def _without(built: Built, switch: Switch, compiling: Compiling, reason: str) -> None:
    """Goes on with plain layers. Raises ModelError where compiled ones were asked for."""
    if compiling.auto is None:
        raise ModelError(f"kernels.torch_compile: {reason}.", TURN_OFF)
    switch.on = False
    built.report(compiling.applied(f"{reason}, so they run as they are; auto had taken it: {compiling.auto}", "off"))


def _attempt(trainer: Training, step: Any, args: Any, kwargs: Any, *, back: bool) -> tuple[Any, str | None]:
    """The step's answer, or with `back` why it failed, everything put back to where it began.

    The error itself is not kept: it holds all that the step computed.
    """
    if not back:
        return step(*args, **kwargs), None
    before = _Before(trainer)
    # The trainer takes parts out of its batch.
    batch = [dict(each) if type(each) is dict else each for each in args]
    try:
        return step(*batch, **kwargs), None
    except failures.known() as error:
        if isinstance(error, (WorkbenchError, torch.OutOfMemoryError)):
            raise
        problem = _problem(error)
    before.restore()
    return None, problem


class _Before:
    """What the first batch of a start changes beside the batch itself."""

    def __init__(self, trainer: Training) -> None:
        self.trainer = trainer
        self.gradients = [(weight, weight.grad) for weight in trainer.model.parameters() if weight.requires_grad]
        self.noted = {
            name: _copied(value) for name, value in vars(trainer).items() if isinstance(value, (int, float, list, dict))
        }
        self.cpu = torch.get_rng_state()
        self.cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        for weight, gradient in self.gradients:
            weight.grad = gradient
        for name, value in self.noted.items():
            setattr(self.trainer, name, _put_back(vars(self.trainer).get(name), value))
        torch.set_rng_state(self.cpu)
        if self.cards:
            torch.cuda.set_rng_state_all(self.cards)


def _copied(value: Any) -> Any:
    """The lists and mappings anew, what is in them as it is."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _put_back(value: Any, before: Any) -> Any:
    """A list or mapping holds again what it held, and stays the same object; others are replaced."""
    if isinstance(value, dict):
        held = {name: _put_back(value.get(name), each) for name, each in before.items()}
        value.clear()
        value.update(held)
        return value
    if isinstance(value, list):
        value[:] = before
        return value
    return before


def _report_failure(built: Built, compiling: Compiling, problem: str, when: str = "") -> None:
    sentence = f"compiling failed{when} ({problem}), so the layers run as they are"
    print(f"kernels.torch_compile: {sentence}.", file=sys.stderr, flush=True)
    built.warn("kernels.torch_compile", f"{sentence[0].upper()}{sentence[1:]}.")
    built.report(compiling.applied(f"{sentence}; auto had taken it: {compiling.auto}", "off"))


_MADE = set[CodeType]()
"""Functions of which this process has made graphs: torch keeps an entry also for one that it left as it is."""


def _known(code: CodeType) -> bool:
    """Whether this process has graphs of this function."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return code in _MADE and bool(_debug_get_cache_entry_list(code))
