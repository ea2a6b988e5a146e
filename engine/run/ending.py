"""What a finished run leaves, in a few lines: its model, how good it became, what it answers now, and what to do with it."""

from __future__ import annotations

from engine import figures
from engine.errors import visible
from engine.run.best import title_of
from engine.run.store import RunFolder
from engine.run.view import RunView

PROMPTS = 2
ANSWER = 100
"""Characters of a prompt and of an answer."""


def card(view: RunView, folder: RunFolder, name: str) -> list[tuple[str, str]]:
    """(what, words) of each line; empty where no checkpoint is kept. `name` is what the run is called in a command."""
    if view.state != "finished" or not view.committed:
        return []
    end = view.committed[-1]
    step = view.best["step"] if view.best and view.best["step"] in view.committed else end
    path = visible(str(folder.checkpoints / f"checkpoint-{step}"))
    lines = [("model", path if step == end else f"{path}, the best; the end is checkpoint-{end}")]
    if held_out := _held_out(view):
        lines.append(("held out", held_out))
    for first, last in _answers(view)[:PROMPTS]:
        when = f"after step {first['step']:,}" if first["step"] else "before training"
        lines.append(("asked", _short(first["prompt"])))
        lines.append(("", f"{when}: {_short(first['completion'])}"))
        lines.append(("", f"after step {last['step']:,}: {_short(last['completion'])}"))
    lines.append(("talk to it", f"workbench chat {name}"))
    lines.append(("take it along", f"workbench export {name} --to safetensors"))
    return lines


def _held_out(view: RunView) -> str:
    """The first and the last value of the metric that tells the best checkpoint, else of the loss."""
    metric = view.best["metric"] if view.best else "eval_loss"
    if not (series := view.series.get(metric)):
        return ""
    steps, low, high = series.points()
    said = f"{title_of(metric).removeprefix('held-out ')} {figures.number(high[-1], 4)} at step {steps[-1]:,}"
    if steps[0] == steps[-1] or low[0] != high[0]:
        return said
    return f"{said}, {figures.number(low[0], 4)} at step {steps[0]:,}"


def _answers(view: RunView) -> list[tuple[dict[str, object], dict[str, object]]]:
    """The first and the last answer to each pinned prompt that has two."""
    of: dict[int, list[dict[str, object]]] = {}
    for sample in view.samples:
        of.setdefault(sample["index"], []).append(sample)
    return [(answers[0], answers[-1]) for _, answers in sorted(of.items()) if len(answers) > 1]


def _short(text: object) -> str:
    shown = " ".join(visible(str(text)).split()) or "no words"
    return shown if len(shown) <= ANSWER else f"{shown[: ANSWER - 1]}…"
