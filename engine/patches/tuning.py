"""The tiles of our kernels by timing, where `kernels.kernel_auto_compose` asks that kernels are timed.

From the first launch on, each kernel with a choice of tiles is timed on its own inputs, once for each range of lengths,
and the fastest is kept in the user's cache for later runs on this card. What was taken stands in the receipt after the
first step, and whenever a later length brought another. On a CPU nothing has tiles and nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import redact
from engine.kernels.device import kernel_serves
from engine.kernels.tuned import folder
from engine.kernels.tuner import TUNER, Picked
from engine.patches.instances import put
from engine.patches.plan import Applied

FEATURE = "tiles by timing"
_KERNELS = ("use_cut_ce", "fused_attn_kernel", "fused_lora")
"""The settings whose kernels have a choice."""


def tiles_by_timing(config: Any, trainer: Any) -> Applied | None:
    """Turns the timing of tiles on for this run; None where it was not asked for or no kernel is there to time."""
    if not config.kernels.kernel_auto_compose or not any(getattr(config.kernels, name) is True for name in _KERNELS):
        return None
    if not kernel_serves(*trainer.model.parameters()):
        return None
    TUNER.start()
    undo_step = _tell_after_steps(trainer)

    def undo() -> None:
        undo_step()
        TUNER.stop()

    place = redact(str(folder()))
    return Applied(FEATURE, True, "at first use", None, f"kept for this card in {place}", undo)


def told(picked: list[Picked], problems: Sequence[str] = ()) -> Applied:
    """What was taken so far, for the receipt, and what was in the way of keeping it."""
    other = sum(each.tile != each.tiles.default for each in picked)
    kept = sum(each.origin == "kept" for each in picked)
    words = "; ".join(dict.fromkeys(each.words() for each in picked))
    detail = f"kernels and lengths, {other} with other tiles than by hand, {kept} known from earlier runs: {words}"
    detail += "".join(f"; {redact(problem)}" for problem in problems)
    return Applied(FEATURE, True, "timed", len(picked), detail)


def _tell_after_steps(trainer: Any) -> Callable[[], None]:
    """Wraps the instance's `training_step`: a step that brought new tiles adds an entry. Returns the undo."""
    step = trainer.training_step
    known = 0

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal known
        loss = step(*args, **kwargs)
        if len(TUNER.picked) > known and getattr(trainer, "writer", None) is not None:
            known = len(TUNER.picked)
            trainer.writer.write("receipt", entries=[told(TUNER.picked, TUNER.problems).entry()])
        return loss

    return put(trainer, "training_step", training_step)
