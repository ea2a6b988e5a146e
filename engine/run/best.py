"""By which number of the held-out rows a run's best checkpoint is told, and how a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import figures
from engine.run.curves import label_of
from engine.run.view import RunView

if TYPE_CHECKING:
    from engine.config.tree import RunConfig


def metric_of(config: RunConfig) -> tuple[str, bool]:
    """The name of the logged metric, and whether more of it is better: what the config says, else what the method is for."""
    from engine.config.method import METHODS  # what watches a run needs none of the config

    sampled = METHODS[config.method.kind].rows == "prompts"
    named = config.run.metric_for_best_model or ("reward" if sampled else "loss")
    greater = config.run.greater_is_better
    # As transformers decides it.
    return f"eval_{named.removeprefix('eval_')}", not named.endswith("loss") if greater is None else greater


def title_of(metric: str) -> str:
    """The metric as a person reads it."""
    return label_of(metric).title


def best_text(view: RunView) -> str:
    """Which checkpoint is the best one and by what; empty where none of those kept is."""
    best = view.best
    if best is None or best["step"] not in view.committed:
        return ""
    return f"checkpoint-{best['step']} is the best: {title_of(best['metric'])} {figures.number(best['value'], 4)}"
