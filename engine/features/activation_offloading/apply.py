"""`memory.activation_offloading`: what the backward pass will need waits on the host or on disk, in every method.

The trainer instance's `training_step` runs inside a context of saved-tensor hooks. For `cpu` that is TRL's: pinned memory, a
stream of its own and at most five tensors in flight; for `disk` ours (`engine.features.activation_offloading.scratch`). TRL's ends a step by
waiting for the card on the host, so that clipping and the optimizer are launched while the card idles; here it ends
without (`_streamed`). How many bytes moved is known after the first step and then told in the receipt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from trl.models.activation_offloading import OffloadActivations, get_act_offloading_ctx_manager

from engine import figures
from engine.compat.instances import put
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features import activation_offloading
from engine.features.activation_offloading.scratch import SavedOnDisk, Scratch, clear
from engine.features.applied import Applied
from engine.features.built import Built, cards_here
from engine.features.feature import refuse

FEATURE = "activation offloading"
_WORDS = {
    "cpu": "to pinned host memory on a stream of its own, at most 5 tensors in flight",
    "disk": "to a nameless private file in the run folder",
}


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Wraps this trainer's `training_step`; None where it was not asked for."""
    where, trainer, folder = config.memory.activation_offloading, built.training, built.notes.folder
    clear(folder, trainer.args.process_index)
    if where is None:
        return None
    refuse(activation_offloading, config, cards_here(), machine_alone=True)
    context: Any
    context, close = _on_disk(built) if where == "disk" else _on_host(built.policy)
    step = trainer.training_step
    told = False

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal told
        with _streamed(context) if where == "cpu" else context:
            loss = step(*args, **kwargs)
        # Answers that all teach nothing leave a batch of two tokens.
        if not told and (context.written or not getattr(trainer, "taught_nothing", False)):
            told = True
            _report(built, where, context)
        return loss

    unwrap = put(trainer, "training_step", training_step)

    def undo() -> None:
        unwrap()
        close()

    return Applied(FEATURE, where, where, None, f"{_WORDS[where]}; bytes are told after the first step", undo)


def _on_disk(built: Built) -> tuple[SavedOnDisk, Any]:
    scratch = Scratch(built.notes.folder, built.training.args.process_index)
    return SavedOnDisk(scratch, built.policy.parameters()), scratch.close


def _on_host(policy: Any) -> tuple[Any, Any]:
    context: Any = get_act_offloading_ctx_manager(policy, warn_if_no_head=False)
    if getattr(policy, "quantization_method", None) is None:
        context.device_module = _KeepingItsCache(context.device_module)
    context.written = 0
    pack = context.pack_hook

    def counted(tensor: torch.Tensor) -> Any:
        number = pack(tensor)
        if context.tracker[number][1]:
            context.written += tensor.numel() * tensor.element_size()
        return number

    context.pack_hook = counted
    return context, lambda: None


@contextmanager
def _streamed(context: OffloadActivations) -> Iterator[None]:
    """TRL's context, whose end lets each stream wait for the other on the card, and the host for neither.

    What is dropped then was taken on one of the two streams and used on the other; its memory is taken again only by what
    that stream is given after the wait.
    """
    context.__enter__()
    try:
        yield
    finally:
        try:
            context.s0.wait_stream(context.s1)
            context.s1.wait_stream(context.s0)
            for stash in (context.bwd_tensor_stash, context.bwd_ev_stash, context.fwd_stash):
                stash.clear()
        finally:
            saved_tensors_hooks.__exit__(context)


class _KeepingItsCache:
    """`torch.cuda` as TRL's context sees it, whose `empty_cache` does nothing.

    TRL gives the allocator's whole cache back before each step once bitsandbytes is imported, which PEFT does where it is
    installed, for the sake of models that bitsandbytes holds. Others would take all their memory from the driver anew.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def empty_cache(self) -> None:
        return


def _report(built: Built, where: str, context: Any) -> None:
    """The receipt's entry again, now with what the first batch moved."""
    moved = f"{figures.size(context.written)} of the first batch moved {_WORDS[where]}"
    if context.written == 0:
        raise ModelError(
            f"memory.activation_offloading: {where} was requested and no tensor of the first batch was large enough to "
            "move.",
            "Leave it out.",
        )
    built.report(Applied(FEATURE, where, where, context.written, moved))
