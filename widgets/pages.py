"""What each step says beside its settings, as plain blocks: titles, sentences, tables and code.

Pure functions of a draft and what has been found out. A block is `{"kind", ...}`; the browser draws kinds and knows no
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.draft import Draft
from engine.config.explain import of_kind, of_recipe
from engine.config.recipes import recipes
from engine.config.schema import Effective, fields
from engine.config.steps import GOALS, step_fields
from engine.config.typed import as_typed
from engine.errors import visible
from engine.hardware import Machine
from engine.memory.estimate import Estimate
from widgets.numbers import count, duration, large, percent, size

Block = dict[str, Any]

# (label, attribute of the estimate, how it is written, whether more of it is worse)
CONSEQUENCES: tuple[tuple[str, str, Callable[[Any], str], bool], ...] = (
    ("effective batch", "effective_batch", count, False),
    ("steps", "steps", count, False),
    ("tokens per epoch", "tokens_per_epoch", large, False),
    ("rows too long", "truncated_share", percent, True),
    ("rows with nothing to learn", "masked_rows", count, True),
    ("trainable parameters", "trainable_parameters", large, False),
    ("memory", "memory_total", size, True),
    ("one checkpoint", "checkpoint_bytes", size, True),
    ("disk for checkpoints", "checkpoints_bytes", size, True),
    ("time, roughly", "seconds_left", duration, True),
)


@dataclass(frozen=True)
class View:
    """All that a page may show."""

    draft: Draft
    estimate: Estimate
    effective: tuple[Effective, ...]
    working: str
    trouble: tuple[str, ...]
    runs_dir: Path
    rehearsed: str = ""
    """What a measured step of this very config took."""


def title(text: str) -> Block:
    return {"kind": "title", "text": text}


def say(text: str, kind: str = "text") -> Block:
    return {"kind": kind, "text": visible(text)}


def table(rows: Iterable[tuple[str, str | None]]) -> Block:
    return {"kind": "table", "rows": [[label, visible(value)] for label, value in rows if value]}


def blocks(step: str, view: View) -> list[Block]:
    """The blocks below the settings of a step."""
    page = _PAGES.get(step)
    return list(page(view)) if page else []


def consequences(now: Estimate, before: Estimate | None) -> list[dict[str, Any]]:
    """The numbers of an estimate, with the change that the last edit made."""
    changed = now.changes(before) if before is not None else {}
    found = []
    for label, name, write, costly in CONSEQUENCES:
        value = getattr(now, name)
        if value is None:
            continue
        text = write(value)
        over = name == "memory_total" and now.device_bytes is not None and value > now.device_bytes
        if name == "memory_total" and now.device_bytes:
            text = f"{text} of {size(now.device_bytes)}"
        delta = changed.get(name)
        written = f"{'+' if delta > 0 else '−'}{write(abs(delta))}" if delta else ""
        if written[1:] in ("0", "0 B", "0.0 %", "0:00"):
            written = ""
        found.append(
            {
                "label": label,
                "text": text,
                "delta": written,
                "worse": bool(delta and delta > 0 and costly),
                "over": over,
            }
        )
    return found


def goals(draft: Draft) -> list[dict[str, Any]]:
    """The wishes in words, then the other ready configs (`ready`), then wishes that no recipe answers yet."""
    wishes = [
        {
            "recipe": goal.recipe,
            "words": goal.words,
            "note": goal.note,
            "about": _plain(of_recipe(goal.recipe)) if goal.recipe else [],
            "chosen": bool(goal.recipe) and draft.recipe == goal.recipe,
            "ready": False,
        }
        for goal in GOALS
    ]
    named = {goal.recipe for goal in GOALS}
    others = [
        {
            "recipe": recipe.name,
            "words": recipe.title,
            "note": "",
            "about": _plain(of_recipe(recipe.name)),
            "chosen": draft.recipe == recipe.name,
            "ready": True,
        }
        for recipe in recipes()
        if recipe.name not in named
    ]
    possible = [wish for wish in wishes if wish["recipe"]]
    return [*possible, *others, *(wish for wish in wishes if not wish["recipe"])]


def kinds(step: str, draft: Draft) -> dict[str, dict[str, Any]]:
    """What the method or adapter taken is for and the rows it needs, by the path of its setting, where a step asks for it."""
    found = {}
    for spec in step_fields(step, draft.config):
        if spec.name == fields.method.kind.name:
            title, paragraphs = of_kind(spec.section, spec.value(draft.config))
            found[spec.path] = {"title": title, "about": _plain(paragraphs)}
    return found


def _plain(paragraphs: Iterable[str]) -> list[str]:
    """Without the marks that names have in a docstring."""
    return [text.replace("`", "") for text in paragraphs]


def machine_words(machine: Machine | None) -> str:
    if machine is None:
        return "this machine"
    if machine.gpus:
        gpu = machine.gpus[0]
        many = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
        return f"{many}{gpu.name}, {size(gpu.memory_bytes)}"
    return f"the CPU of this machine, {machine.cpu_count or '?'} cores, {size(machine.memory_bytes)}"


def _model(view: View) -> Iterator[Block]:
    facts = view.draft.facts.model
    if facts is None:
        yield say(view.working or "Nothing is known of this model yet.", "dim")
    elif facts.missing:
        yield say(facts.missing, "bad")
    elif facts.remote:
        yield say("Its files are not on this machine; they are downloaded at launch if the hub can be reached.", "warn")
    else:
        yield title("What is known of this model")
        yield table(
            (
                ("kind", facts.model_type or None),
                ("parameters", count(facts.parameters) if facts.parameters else None),
                ("layers", f"{facts.layers} of width {facts.hidden_size}" if facts.layers else None),
                ("context", f"{count(facts.max_length)} tokens" if facts.max_length else None),
                ("vocabulary", count(facts.vocab_size) if facts.vocab_size else None),
                ("chat template", {True: "yes", False: "none in its files", None: None}[facts.chat_template]),
            )
        )
    yield from _trouble(view)


def _data(view: View) -> Iterator[Block]:
    for source in (view.draft.facts.sources or {}).values():
        rows = f", {source.rows:,} rows" if source.rows is not None else ""
        yield title(visible(source.path) + rows)
        if source.problem:
            yield say(source.problem, "bad")
        elif source.exists is False:
            yield say("There is no such file.", "bad")
        elif source.format:
            yield say(f"Read as {source.format}; columns {', '.join(source.columns)}.", "dim")
    facts = view.draft.facts.data
    if facts is not None and facts.rows is not None:
        yield title("Counted over all rows" if facts.exact else "Counted so far")
        yield table(
            (
                ("rows to learn from", count(facts.rows)),
                ("held-out rows", count(facts.eval_rows) if facts.eval_rows else None),
                ("tokens", count(facts.tokens) if facts.tokens else None),
                ("of them learned", count(facts.trained_tokens) if facts.trained_tokens else None),
                ("longest row", f"{count(facts.longest)} tokens" if facts.longest else None),
                ("rows too long", count(facts.truncated) if facts.truncated else None),
                ("nothing to learn in", f"{count(facts.masked)} rows" if facts.masked else None),
            )
        )
    elif view.working:
        yield say(view.working, "dim")
    yield from _trouble(view)


def _trouble(view: View) -> Iterator[Block]:
    for words in view.trouble:
        yield say(words, "warn")


def _review(view: View) -> Iterator[Block]:
    draft = view.draft
    yield title(f"Changed from {'the recipe ' + draft.recipe if draft.recipe else 'the defaults'}")
    difference = draft.diff()
    if difference:
        rows = [[path, _short(was), "→", _short(now)] for path, was, now in difference]
        yield {"kind": "table", "rows": rows}
    else:
        yield say("Nothing.", "dim")
    changed = [each for each in view.effective if each.requested != each.effective]
    if changed:
        yield title("Asked → what it becomes")
        rows = [
            [each.path, _short(each.requested), "→", _short(each.effective), visible(each.reason)] for each in changed
        ]
        yield {"kind": "table", "rows": rows}
    machine = draft.facts.machine
    if machine is not None and machine.disk_free_bytes is not None:
        yield title("Disk")
        need = size(view.estimate.checkpoints_bytes) if view.estimate.checkpoints_bytes is not None else "not known yet"
        yield table((("checkpoints will take", need), ("free", size(machine.disk_free_bytes))))
    if view.rehearsed:
        yield title("Measured")
        yield say(view.rehearsed)


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [", ".join(as_typed(item) for item in entry.values()) for entry in value]
    text = visible(as_typed(value)) or "none"
    return text if len(text) <= 80 else text[:79] + "…"


def _launch(view: View) -> Iterator[Block]:
    errors = sum(finding.severity == "error" for finding in view.draft.findings)
    if errors:
        yield say(f"{errors} to mend before the run can start; the list is below.", "bad")
    yield title("Where")
    yield say(f"On {machine_words(view.draft.facts.machine)}, in a folder of its own in {view.runs_dir}.")
    yield title("When this notebook closes")
    yield say(
        "The run goes on: it is a process of its own. Closing the page, restarting the kernel or stopping Jupyter does not "
        "touch it. Come back with Monitor and the run's name, or with the command workbench in a terminal."
    )


_PAGES: dict[str, Callable[[View], Iterator[Block]]] = {
    "model": _model,
    "data": _data,
    "review": _review,
    "launch": _launch,
}
