"""What a run leaves when it ends: its model, how good it became, what it answers now, and what to do next.

The commands, the app and the notebook show the same; each has keys, buttons or commands of its own for the ways on.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import figures
from engine.errors import as_argument, redact, visible
from engine.model_files import ADAPTER
from engine.run import checkpoint, inside, proposals
from engine.run.batches import rows_of
from engine.run.best import best_text, title_of
from engine.run.curves import no_signal, rose
from engine.run.evaluations import has_harness, records_of, summary
from engine.run.in_flight import in_flight
from engine.run.proposals import Change
from engine.run.pruning_choice import prunable
from engine.run.store import ORIGIN, RunFolder, called
from engine.run.view import RunView

MEMORY = "memory_allocated"
ROWS = 6
"""Rows of the step in which a run ended that are named."""
PROMPTS = 2
ANSWER = 100
"""Characters of a prompt and of an answer."""


@dataclass(frozen=True, slots=True)
class Way:
    """Something to do with a run that ended: `do` names it for keys and buttons, `command` does it in a terminal."""

    do: str
    title: str
    means: str
    command: str


@dataclass(frozen=True, slots=True)
class End:
    """What there is to say about a run that ended."""

    facts: tuple[tuple[str, str], ...] = ()
    """(what, words); a line without a name goes on with the one above."""
    ways: tuple[Way, ...] = ()
    way_on: str = ""
    """What the first key does for a run that ended badly, in words."""
    step: int | None = None
    """Its newest whole checkpoint."""
    kept: tuple[int, ...] | None = None
    """The steps of a finished run's checkpoints that are there and whole; None where nobody has looked yet."""
    change: Change | None = None
    """The change of its config that is proposed; without one there is nothing to apply."""
    anew: bool = False
    """Whether that change wants a new run, from the start."""
    blocked: bool = False
    """Whether going on as it is would end the same way, and nothing is known to mend it."""


def end_of(view: RunView, folder: RunFolder, name: str) -> End:
    """What a run that is over leaves; `name` is what it is called in a command. Reads its folder."""
    if view.state == "finished":
        return End(tuple(facts(view, folder)), tuple(ways(view, folder, name)), kept=tuple(_kept(view, folder)))
    if view.state not in ("failed", "lost"):
        return End()
    details = (*_memory(view), *_in_flight(view, folder), *_on_hub(view, folder), *_origin(folder))
    newest, skipped = checkpoint.newest_valid(folder, hashes=False)
    step = checkpoint.step_of(newest) if newest else None
    settings = proposals.settings_of(folder)
    change = proposals.propose(view, settings) if settings else None
    why = ": no checkpoint is whole" if skipped and not newest else ""
    why += "".join(f"; {path.name} is passed over ({reason})" for path, reason in skipped[:2])
    if change is not None:
        anew = not proposals.goes_on(view, change, step)
        start = "start a new run from the beginning" if anew else f"go on from checkpoint-{step}"
        return End(details, way_on=f"apply it and {start}{why}", step=step, change=change, anew=anew)
    blocked = view.cause_kind in proposals.REPEATS
    words = proposals.way_on(view.cause_kind, newest.name if newest else None, why)
    return End(details, way_on=words, step=step, blocked=blocked)


def done_text(view: RunView, end: End) -> str:
    """A finished run in one sentence: the checkpoint that is its model, of those that are there."""
    steps = view.committed if end.kept is None else end.kept
    if not steps:
        return "Done, but no checkpoint is whole any more."
    best = view.best
    if best is None or best["step"] not in steps:
        return f"Done: the trained model is checkpoint-{steps[-1]}."
    if best["step"] == steps[-1]:
        return f"Done: {best_text(view).replace(' is', ', the last one, is', 1)}."
    return f"Done: {best_text(view)}; the end is checkpoint-{steps[-1]}."


def facts(view: RunView, folder: RunFolder) -> list[tuple[str, str]]:
    """Where the model is, how good it is, and what it answers beside what it answered at first."""
    if view.state == "stopped":
        return _on_hub(view, folder)
    if view.state != "finished" or not view.committed:
        return []
    if not (kept_steps := _kept(view, folder)):
        lines = [("model", f"none: no checkpoint is whole any more in {visible(redact(str(folder.checkpoints)))}")]
    else:
        end, step = view.committed[-1], _step(view, kept_steps)
        path = visible(as_argument(folder.checkpoints / f"checkpoint-{step}"))
        lines = [("model", path)]
        if view.best and view.best["step"] == step != end:
            lines = [("model", f"{path}, the best; the end is checkpoint-{end}")]
        elif step != end:
            lines = [("model", f"{path}; checkpoint-{end} is not whole any more")]
    if (risen := rose(view.method, view.series)) is not None:
        began, ended = (figures.number(value, 4) for value in risen)
        lines.append(
            ("got worse", f"the loss ended at {ended}, far above its {began} at first: lower optim.learning_rate")
        )
    if words := no_signal(view.method, view.series):
        lines.append(("no signal", words))
    if held_out := _held_out(view, _step(view, kept_steps) if kept_steps else None):
        lines.append(("held out", held_out))
    for first, last in _answers(view)[:PROMPTS]:
        when = f"after step {first['step']:,}" if first["step"] else "before training"
        lines.append(("asked", _short(first["prompt"])))
        lines.append(("", f"{when}: {_short(first['completion'])}"))
        lines.append(("", f"after step {last['step']:,}: {_short(last['completion'])}"))
    lines += _on_hub(view, folder)
    if measured := records_of(folder):
        lines.append(("measured", summary(measured[-1])))
    return lines + _origin(folder)


def ways(view: RunView, folder: RunFolder, name: str) -> list[Way]:
    """What can be done with the model of a finished run."""
    if view.state != "finished" or not view.committed or not (kept_steps := _kept(view, folder)):
        return []
    found = [Way("chat", "talk to it", "beside its base model", f"workbench chat {name}")]
    if any(metric.startswith("eval_") for metric in view.series):
        means = "on the held-out rows, beside the model that training began with"
        found.append(Way("evaluate", "measure it", means, f"workbench evaluate {name} --base"))
    if has_harness():
        means = "by a task of lm-evaluation-harness, a YAML file that names rows of this machine; beside the base"
        command = f"workbench evaluate {name} --tasks FILE --base"
        found.append(Way("tasks", "score it", means, command))
    means = "the whole model, its adapter alone, or GGUF"
    found.append(Way("export", "take it along", means, f"workbench export {name} --to safetensors"))
    longer = proposals.longer(folder)
    means = f"{longer.summary}, from checkpoint-{kept_steps[-1]} on; {longer.why}"
    found.append(Way("longer", "train longer", means, f"workbench resume {name} {longer.options}"))
    if older := prunable(view, folder):
        freed = figures.size(sum(map(checkpoint.size_of, older)))
        many = f"{len(older):,} checkpoint{' is' if len(older) == 1 else 's are'}"
        means = f"{many} neither the newest nor the best: {freed}"
        found.append(Way("prune", "free disk", means, f"workbench prune {name}"))
    return found


def _on_hub(view: RunView, folder: RunFolder) -> list[tuple[str, str]]:
    """Which checkpoint has arrived at a hub, and whether a newer one has not."""
    if not view.uploads:
        return []
    arrived = [entry for entry in view.uploads if entry["state"] == "arrived"]
    words = f"checkpoint-{arrived[-1]['step']} is at {_short(arrived[-1]['url'])}" if arrived else "nothing has arrived"
    last = view.uploads[-1]
    if last["state"] != "arrived":
        step, to = last["step"], _short(last["repository"])
        adapted = inside.exists(folder, folder.checkpoints / f"checkpoint-{step}" / ADAPTER)
        form = " --form adapter" if adapted else ""  # as what had arrived before it
        words += f"; checkpoint-{step} has not arrived: `workbench push {called(folder)} --checkpoint {step}{form} --to {to}` sends it"
    return [("hub", words)]


def _origin(folder: RunFolder) -> list[tuple[str, str]]:
    """Which run this one was started for, and what was changed."""
    origin = folder.read_json().get(ORIGIN)
    return [("comes from", _short(origin))] if isinstance(origin, str) and origin else []


def _memory(view: RunView) -> list[tuple[str, str]]:
    """Memory at the first step, where it was the most, and at the last."""
    series = view.series.get(MEMORY)
    if series is None:
        return []
    steps, low, high = series.points()
    if not steps:
        return []
    most = max(range(len(steps)), key=high.__getitem__)
    total = max((card.get("memory_total") or 0 for card in view.gpu), default=0)
    words = f"{figures.size(low[0])} at step {steps[0]:,}"
    if steps[most] not in (steps[0], steps[-1]):
        words += f", {figures.size(high[most])} at step {steps[most]:,}"
    if steps[-1] != steps[0]:
        words += f", {figures.size(high[-1])} at step {steps[-1]:,}"
    return [("memory", words + (f", of {figures.size(total)}" if total else ""))]


def _in_flight(view: RunView, folder: RunFolder) -> list[tuple[str, str]]:
    """The rows of the step in which it ended: of the one that diverged, else of the one that was not finished."""
    last = in_flight(folder)
    step = view.diverged_at or (last[0] if last is not None and last[0] > view.step else None)
    rows = rows_of(folder, step) if step is not None else None
    if step is None or not rows:
        return []
    named = ", ".join(f"{row:,}" for row in rows[:ROWS])
    named += f", … ({len(rows):,} rows)" if len(rows) > ROWS else ""
    of = " (rank 0)" if view.world_size > 1 else ""
    return [("in flight", f"step {step:,}{of}: row{'s' if len(rows) > 1 else ''} {named}")]


def _kept(view: RunView, folder: RunFolder) -> list[int]:
    """The steps of its checkpoints that are still there and whole; people remove them to free the disk."""
    return [step for step in view.committed if not checkpoint.problem_with(folder.checkpoints / f"checkpoint-{step}")]


def _step(view: RunView, kept_steps: list[int]) -> int:
    """The best checkpoint where one is known and kept, else the last."""
    return view.best["step"] if view.best and view.best["step"] in kept_steps else kept_steps[-1]


def _held_out(view: RunView, step: int | None) -> str:
    """The metric that tells the best checkpoint, else the loss: at the checkpoint that is the model, at first, at the end."""
    metric = view.best["metric"] if view.best else "eval_loss"
    if not (series := view.series.get(metric)):
        return ""
    steps, low, high = series.points()
    _, at_step, _ = series.points(step, step) if step is not None else ((), (), ())
    values = {steps[0]: low[0], steps[-1]: high[-1]}
    model = step if step is not None and len(at_step) else steps[-1]
    values.setdefault(model, at_step[0] if len(at_step) else high[-1])
    exact = low[0] == high[0]  # a curve thinned here holds several values at its first point
    order = [model, *(each for each in (steps[0], steps[-1]) if each != model and (exact or each != steps[0]))]
    told = [f"{figures.number(values[each], 4)} at step {each:,}" for each in dict.fromkeys(order)]
    return f"{title_of(metric).removeprefix('held-out ')} {', '.join(told)}"


def _answers(view: RunView) -> list[tuple[dict[str, object], dict[str, object]]]:
    """The first and the last answer to each pinned prompt that has two."""
    of: dict[int, list[dict[str, object]]] = {}
    for sample in view.samples:
        of.setdefault(sample["index"], []).append(sample)
    return [(answers[0], answers[-1]) for _, answers in sorted(of.items()) if len(answers) > 1]


def _short(text: object) -> str:
    shown = " ".join(visible(str(text)).split()) or "no words"
    return shown if len(shown) <= ANSWER else f"{shown[: ANSWER - 1]}…"
