"""`memory.activation_offloading`: what the backward pass will need waits on the host or on disk, in every method.

The trainer instance's `training_step` runs inside a context of saved-tensor hooks. For `cpu` that is TRL's: pinned memory, a
stream of its own and at most five tensors in flight; for `disk` ours (`engine.memory.scratch`). TRL's ends a step by
waiting for the card on the host, so that clipping and the optimizer are launched while the card idles; here it ends
without (`_streamed`). How many bytes moved is known after the first step and then told in the receipt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from trl.models.activation_offloading import OffloadActivations, get_act_offloading_ctx_manager

from engine.errors import ModelError
from engine.memory.scratch import SavedOnDisk, Scratch, clear
from engine.patches.instances import put
from engine.patches.plan import Applied

FEATURE = "activation offloading"
_WORDS = {
    "cpu": "to pinned host memory on a stream of its own, at most 5 tensors in flight",
    "disk": "to a nameless private file in the run folder",
}


def activation_offloading(config: Any, trainer: Any, folder: Path) -> Applied | None:
    """Wraps this trainer's `training_step`; None where it was not asked for."""
    where = config.memory.activation_offloading
    clear(folder, trainer.args.process_index)
    if where is None:
        return None
    context: Any
    context, close = _on_disk(trainer, folder) if where == "disk" else _on_host(trainer)
    step = trainer.training_step
    told = False

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal told
        with _streamed(context) if where == "cpu" else context:
            loss = step(*args, **kwargs)
        if not told:
            told = True
            _tell(trainer, where, context)
        return loss

    unwrap = put(trainer, "training_step", training_step)

    def undo() -> None:
        unwrap()
        close()

    return Applied(FEATURE, where, where, None, f"{_WORDS[where]}; bytes are told after the first step", undo)


def _on_disk(trainer: Any, folder: Path) -> tuple[SavedOnDisk, Any]:
    scratch = Scratch(folder, trainer.args.process_index)
    return SavedOnDisk(scratch, trainer.model.parameters()), scratch.close


def _on_host(trainer: Any) -> tuple[Any, Any]:
    if not torch.cuda.is_available():
        raise ModelError(
            "memory.activation_offloading: must be disk or empty without a GPU; got cpu.",
            "The activations are in the host's memory already.",
        )
    context: Any = get_act_offloading_ctx_manager(trainer.model, warn_if_no_head=False)
    if getattr(trainer.model, "quantization_method", None) is None:
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


def _tell(trainer: Any, where: str, context: Any) -> None:
    """The receipt's entry again, now with what the first batch moved."""
    moved = f"{context.written / 2**20:,.1f} MiB of the first batch moved {_WORDS[where]}"
    if context.written == 0:
        raise ModelError(
            f"memory.activation_offloading: {where} was requested and no tensor of the first batch was large enough to "
            "move.",
            "Leave it out.",
        )
    if getattr(trainer, "writer", None) is not None:
        trainer.writer.write("receipt", entries=[Applied(FEATURE, where, where, context.written, moved).entry()])
