"""The tiles of our kernels by timing, where `kernels.kernel_auto_compose` asks that kernels are timed.

From the first launch on, each kernel with a choice of tiles is timed on its own inputs, once for each range of lengths,
and the fastest is kept in the user's cache for later runs on this card. What was taken stands in the receipt after the
first step, and whenever a later length brought another. On a CPU nothing has tiles and nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.compat.instances import put
from engine.config.tree import RunConfig
from engine.errors import redact
from engine.features.applied import Applied
from engine.features.built import Built
from engine.kernels.device import kernel_serves
from engine.kernels.tuned import folder
from engine.kernels.tuner import TUNER, Picked

FEATURE = "tiles by timing"
_KERNELS = ("use_cut_ce", "fused_attn_kernel", "fused_experts", "fused_lora")
"""The settings whose kernels have a choice."""


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Turns the timing of tiles on for this run; None where it was not asked for or no kernel is there to time."""
    if not config.kernels.kernel_auto_compose or not any(getattr(config.kernels, name) is True for name in _KERNELS):
        return None
    if not kernel_serves(*built.policy.parameters()):
        return None
    TUNER.start()
    undo_step = _report_after_steps(built)

    def undo() -> None:
        undo_step()
        TUNER.stop()

    place = redact(str(folder()))
    return Applied(FEATURE, True, "at first use", None, f"kept for this card in {place}", undo)


def picked_tiles(picked: list[Picked], problems: Sequence[str] = ()) -> Applied:
    """What was taken so far, for the receipt, and what was in the way of keeping it."""
    other = sum(each.tile != each.tiles.default for each in picked)
    kept = sum(each.origin == "kept" for each in picked)
    words = "; ".join(dict.fromkeys(each.words() for each in picked))
    detail = f"kernels and lengths, {other} with other tiles than by hand, {kept} known from earlier runs: {words}"
    detail += "".join(f"; {redact(problem)}" for problem in problems)
    return Applied(FEATURE, True, "timed", len(picked), detail)


def _report_after_steps(built: Built) -> Callable[[], None]:
    """Wraps the instance's `training_step`: a step that brought new tiles adds an entry. Returns the undo."""
    step = built.training.training_step
    known = 0

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal known
        loss = step(*args, **kwargs)
        if len(TUNER.picked) > known:
            known = len(TUNER.picked)
            built.report(picked_tiles(TUNER.picked, TUNER.problems))
        return loss

    return put(built.training, "training_step", training_step)
