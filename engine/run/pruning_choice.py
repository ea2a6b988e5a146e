"""Which checkpoints of a run that has ended would stay and go, each with why, and their removal once a person has seen that.

The command, the app and the notebook show the same lines. What is removed is what was shown and still may go: everything is
looked at anew, read whole, so the newest whole checkpoint and the best one stay whatever a frontend asks for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import visible
from engine.figures import size
from engine.run import checkpoint, pruning
from engine.run.curves import format_metric, titled
from engine.run.index import open_view
from engine.run.store import RunFolder
from engine.run.view import RunView


@dataclass(frozen=True)
class Kept:
    """A checkpoint as a person judges it: what it takes, how good it is, what it answers, and why it stays or goes."""

    step: int
    bytes: int
    best: bool
    held_out: float | None
    answers: list[dict[str, Any]]
    problem: str
    why: str
    metric: str

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"checkpoint-{self.step}"

    def summary(self) -> str:
        """Its figure on held-out rows, where one was measured, and the reason."""
        figure = (
            f"{titled(self.metric)} {format_metric(self.metric, self.held_out)}" if self.held_out is not None else ""
        )
        return ", ".join(filter(None, (figure, self.why)))


@dataclass(frozen=True)
class Choice:
    """What stays and what goes, each the newest first."""

    run: RunFolder
    keep: int
    stay: list[Kept]
    go: list[Kept]

    @property
    def bytes(self) -> int:
        """What removing frees."""
        return sum(each.bytes for each in self.go)

    def count(self) -> str:
        """How many go, in words."""
        return f"{len(self.go):,} checkpoint{'' if len(self.go) == 1 else 's'}"

    def removed(self) -> str:
        """What was done, once it is."""
        return f"{self.count()} removed, {size(self.bytes)} free." if self.go else "Nothing was removed."


def choose(run: RunFolder, keep: int, *, hashes: bool = True) -> Choice:
    """What would go with the `keep` newest whole checkpoints kept; with `hashes` those are read whole.

    Raises RunBusy for a run that is at work, and WorkbenchError where no checkpoint is whole.
    """
    view = _view(run)
    return _described(run, keep, view, pruning.plan(run, keep, _best(view), hashes=hashes))


def remove(run: RunFolder, keep: int, steps: Collection[int]) -> Choice:
    """Removes of the checkpoints of these steps those that may go now; returns what went and what stays.

    Raises what `choose` raises, and WorkbenchError where something cannot be removed.
    """
    view = _view(run)
    plan = pruning.plan(run, keep, _best(view))
    go = [path for path in plan.go if checkpoint.step_of(path) in steps]
    spared = [path for path in checkpoint.newest_first(run) if path not in go]
    choice = _described(run, keep, view, pruning.Plan(spared, go))
    if go:
        pruning.carry_out(run, pruning.Plan(spared, go))
    return choice


def prunable(view: RunView, run: RunFolder) -> list[Path]:
    """The checkpoints that `workbench prune` offers to remove, by a quick look; nothing of a run without a whole one."""
    return checkpoint.to_delete(run, 1, _best(view))


def _view(run: RunFolder) -> RunView:
    with open_view(run) as watch:
        watch.read_completely()
        return watch.view.copy()


def _best(view: RunView) -> int | None:
    return view.best["step"] if view.best else None


def _described(run: RunFolder, keep: int, view: RunView, plan: pruning.Plan) -> Choice:
    problems = {path: checkpoint.problem_with(path) for path in (*plan.stay, *plan.go)}
    whole = [path for path in plan.stay if not problems[path]]
    stay = []
    for path in plan.stay:
        place = whole.index(path) if path in whole else -1
        why = [] if place < 0 else ["the newest whole one"] if place == 0 else ["one of the newest"] * (place < keep)
        if checkpoint.step_of(path) == _best(view):
            why.append("the best")
        stay.append(_kept(path, view, problems[path], why))
    rest = "older, not the best" if view.best else "older"
    go = [_kept(path, view, problems[path], [] if problems[path] else [rest]) for path in plan.go]
    return Choice(run, keep, stay, go)


def _kept(path: Path, view: RunView, problem: str, why: list[str]) -> Kept:
    step = checkpoint.step_of(path) or 0
    metric = view.best["metric"] if view.best else "eval_loss"
    held_out = None
    if (curve := view.series.get(metric)) is not None:
        _, low, _ = curve.points(step, step)
        held_out = low[-1] if len(low) else None
    words = [*why, f"not whole: {problem}"] if problem else why
    # The newest answer to each pinned prompt that the model gave with these weights or the last ones asked before them.
    newest = {each["prompt"]: each for each in view.samples if each["step"] <= step}
    answers = [{"prompt": prompt, "step": each["step"], "text": each["completion"]} for prompt, each in newest.items()]
    return Kept(
        step,
        checkpoint.size_of(path),
        step == _best(view),
        held_out,
        answers,
        problem,
        visible(", ".join(words)),
        metric,
    )
