"""The best step by what is measured on held-out rows, and the end of a run that no longer gets better.

transformers' `TrainerState` keeps the best value, its step and, below `stateful_callbacks`, how many evaluations came since:
all of it lies in each checkpoint's `trainer_state.json`, so a resumed run counts on. `EarlyStoppingCallback` itself reads only
the metrics that `evaluate` returns, and rewards of sampled answers are not among them: this one reads what is logged.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback

from engine.config.tree import RunConfig
from engine.errors import WorkbenchError, visible
from engine.run.async_writer import AsyncWriter
from engine.run.best import metric_of, title_of

STATE = "HeldOutBest"


class HeldOutBest(TrainerCallback):
    """Follows one metric of the held-out rows on every rank, whose values are the same; `writer` is the first rank's."""

    def __init__(self, config: RunConfig, writer: AsyncWriter | None) -> None:
        self.metric, self.greater = metric_of(config)
        self.patience, self.saves = config.optim.early_stopping_patience, config.run.save_best
        self.threshold = config.optim.early_stopping_threshold
        self._wanted = config.run.metric_for_best_model is not None or self.patience is not None
        self.waited = 0
        """Evaluations since one was better than those before it by more than the threshold."""
        self._writer = writer
        self._measured: dict[str, float] = {}

    @property
    def over(self) -> bool:
        """Whether it has not become better for as long as it may."""
        return self.patience is not None and self.waited >= self.patience

    def reason(self, step: int) -> str:
        """Why a run that is over ended at this step."""
        times = f"{self.waited} evaluation{'s' if self.waited != 1 else ''}"
        verb = "risen" if self.greater else "fallen"
        enough = f" by more than {self.threshold:g}" if self.threshold else ""
        return f"stopped early at step {step}: {title_of(self.metric)} has not {verb}{enough} for {times}"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kept = state.stateful_callbacks.get(STATE)
        self.waited = int(kept["attributes"]["waited"]) if kept else 0
        if state.best_global_step is not None and state.best_metric is not None:
            self._report(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._measured |= {name: value for name, value in (logs or {}).items() if name.startswith("eval_")}

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        measured, self._measured = self._measured, {}
        if self.metric not in measured:
            if not self._wanted:
                return
            # `evaluate` says how long it took, which nobody means.
            timed = ("_runtime", "_per_second")
            known = [name for name in measured if not name.endswith(timed)]
            names = ", ".join(sorted(visible(name.removeprefix("eval_")) for name in known))
            raise WorkbenchError(
                f"run.metric_for_best_model: {visible(self.metric.removeprefix('eval_'))} is not measured on held-out rows; "
                f"there are {names}."
            )
        value, best = float(measured[self.metric]), state.best_metric
        better = not math.isnan(value) and (best is None or (value > best if self.greater else value < best))
        # As transformers counts: beside the best one so far, also where that was better by too little.
        counts = better and (best is None or abs(value - best) > self.threshold)
        self.waited = 0 if counts else self.waited + 1
        state.stateful_callbacks[STATE] = {"args": {}, "attributes": {"waited": self.waited}}
        if better:
            state.best_metric, state.best_global_step = value, state.global_step
            self._report(state)
            control.should_save = control.should_save or self.saves
        if self.over:
            control.should_save = control.should_training_stop = True

    def _report(self, state: Any) -> None:
        if self._writer is not None:
            self._writer.write("best", step=state.best_global_step, metric=self.metric, value=state.best_metric)
