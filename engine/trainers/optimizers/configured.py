"""An optimizer that takes up a checkpoint's states goes on with the settings of its config, not with the checkpoint's.

torch saves settings and what steps count side by side in an optimizer's groups, and loads both. What steps write there is
named here; every other key of a group is a setting, whichever optimizer it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from engine.errors import WorkbenchError, visible

COUNTED = frozenset({"step", "k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"})
"""Keys that an optimizer's own steps write: of pytorch-optimizer and of schedule-free."""
_SCHEDULED = frozenset({"params", "lr", "initial_lr"})
_LAYOUT = frozenset({"fused", "foreach", "capturable"})
"""How torch computes the same numbers; where a state's `step` lies goes with it, so it stays as that was saved."""
_SHAPES = {"rank": "rank", "projection_type": "proj_type", "proj_bits": "proj_bits", "rank_fraction": "rank_fraction"}
"""Settings that the shapes of states follow from, by their keys in a group: their names in `optim.optim_args`."""


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer is set to: no weights, no rate, nothing that steps change."""
    return {key: value for key, value in group.items() if key not in COUNTED | _SCHEDULED | _LAYOUT}


@contextlib.contextmanager
def as_configured(optimizer: Optimizer, scheduler: Any) -> Iterator[None]:
    """Settings and learning rate stay those of the config while states are loaded, which bring their own.

    Without it a run that goes on with a changed config would train with the settings of its checkpoint. Raises
    WorkbenchError where the states are shaped by a setting that was changed.
    """
    fixed = [settings_of(group) for group in optimizer.param_groups]
    rates = list(getattr(scheduler, "base_lrs", ()))
    yield
    for group, settings in zip(optimizer.param_groups, fixed, strict=True):
        _refuse_other_shapes(group, settings)
        group.update(settings)
    if isinstance(scheduler, LambdaLR):
        _follow_the_schedule(optimizer, scheduler, rates)


def _follow_the_schedule(optimizer: Optimizer, scheduler: LambdaLR, rates: list[Any]) -> None:
    """Gives the next step the rate that the schedule of now has there. The one that was saved is of the schedule of then, which
    had come down to 0 where a finished run is trained longer."""
    scheduler.base_lrs = rates
    for group, rate, share in zip(optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * share(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _refuse_other_shapes(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, name in _SHAPES.items():
        if key in settings and key in group and group[key] != settings[key]:
            before, now = visible(str(group[key])), visible(str(settings[key]))
            raise WorkbenchError(
                f"optim.optim_args.{name}: the optimizer's states of the checkpoint are made for {before}, and do not "
                f"serve {now}.",
                f"Put it back to {before}, or start a new run from the checkpoint's weights.",
            )
