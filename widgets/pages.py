"""What each step says beside its settings, as plain blocks: titles, sentences, tables and code.

Pure functions of a session. A block is `{"kind", ...}`; the browser draws kinds and knows no
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.config.findings import Finding
from engine.config.recipes import recipes
from engine.config.steps import GOALS, STEPS, step_fields, step_of_path
from engine.config.text_values import as_typed
from engine.config.tree import fields
from engine.errors import visible
from engine.figures import size
from engine.hardware import machine_text
from engine.session import pages
from engine.session.build import BuildSession, step_statuses
from engine.session.draft import Draft
from engine.session.explain import of_kind, of_recipe
from engine.session.opening import goal_of

Block = dict[str, Any]


def title(text: str) -> Block:
    return {"kind": "title", "text": text}


def text_block(text: str, kind: str = "text") -> Block:
    return {"kind": kind, "text": visible(text)}


def blocks(session: BuildSession, step: str) -> list[Block]:
    """The blocks below the settings of a step."""
    page = _PAGES.get(step)
    return list(page(session)) if page else []


def drawn(page_blocks: Iterable[pages.Block]) -> Iterator[Block]:
    """What the session says; a table travels as rows, a gap not at all."""
    for block in page_blocks:
        if block.kind == "table":
            yield {"kind": "table", "rows": [list(row) for row in block.rows]}
        elif block.kind != "gap":
            yield {"kind": block.kind, "text": block.text}


def steps(session: BuildSession, findings: Sequence[Finding]) -> list[dict[str, str]]:
    """The seven steps with what each asks, and how it stands with its findings."""
    rows, uncounted = [], session.uncounted
    for step, standing in zip(STEPS, step_statuses(findings), strict=True):
        bad, soft = standing.errors, standing.others
        mark, kind = ("✗", "error") if bad else ("?", "hint") if soft else ("✓", "ok")
        words = f"{bad} to mend" if bad else f"{soft} to look at" if soft else "nothing to mend"
        if step.id == step_of_path(fields.data.train.path) and not standing.worst and uncounted:
            mark, words = "·", uncounted
        row = {"id": step.id, "title": step.title, "question": step.question}
        rows.append(row | {"mark": mark, "kind": kind, "words": words})
    return rows


def consequences(session: BuildSession) -> list[dict[str, Any]]:
    """The numbers of the estimate, with the change that the last edit made."""
    return [
        {"label": number.label, "text": number.text, "delta": number.change, "worse": number.worse, "over": number.over}
        for number in session.consequences
    ]


def goals(draft: Draft) -> list[dict[str, Any]]:
    """The wishes in words, then the other ready configs (`ready`), then wishes that no recipe answers yet."""
    mine = goal_of(draft)
    wishes = [
        {
            "recipe": goal.recipe,
            "words": goal.description,
            "note": goal.note,
            "about": _plain(of_recipe(goal.recipe)) if goal.recipe else [],
            "chosen": bool(goal.recipe) and goal is mine,
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
    about = {}
    for spec in step_fields(step, draft.config):
        if spec.name == fields.method.kind.name:
            title, paragraphs = of_kind(spec.section, spec.value(draft.config))
            about[spec.path] = {"title": title, "about": _plain(paragraphs)}
    return about


def _plain(paragraphs: Iterable[str]) -> list[str]:
    """Without the marks that names have in a docstring."""
    return [text.replace("`", "") for text in paragraphs]


def _review(session: BuildSession) -> Iterator[Block]:
    draft = session.draft
    yield from drawn(pages.in_sentences(session))
    yield from drawn(pages.uncounted(session))
    yield from drawn(pages.waiting(session))
    changed = [setting for setting in session.becomes.values() if setting.requested != setting.effective]
    if changed:
        yield title(pages.CHOSEN)
        rows = [
            [setting.path, _short(setting.requested), "→", _short(setting.effective), visible(setting.reason)]
            for setting in changed
        ]
        yield {"kind": "table", "rows": rows}
    machine, need = draft.facts.machine, session.estimate.checkpoints_bytes
    if machine is not None and machine.disk_free_bytes is not None:
        yield title("Disk")
        will = size(need) if need is not None else "not known yet"
        yield {"kind": "table", "rows": [["checkpoints will take", will], ["free", size(machine.disk_free_bytes)]]}
    if rehearsed := session.rehearsed:
        yield title("Measured")
        yield text_block(rehearsed)
    yield title(pages.changed_from(session))
    difference = draft.diff()
    if difference:
        rows = [[path, _short(was), "→", _short(now)] for path, was, now in difference]
        yield {"kind": "table", "rows": rows}
    else:
        yield text_block("nothing", "dim")


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [", ".join(as_typed(item) for item in entry.values()) for entry in value]
    text = visible(as_typed(value)) or "none"
    return text if len(text) <= 80 else text[:79] + "…"


def _launch(session: BuildSession) -> Iterator[Block]:
    if session.errors:
        yield text_block(f"{session.errors} to mend before the run can start; the list is below.", "bad")
    else:
        yield from drawn(pages.uncounted(session))
        yield from drawn(pages.waiting(session))
    yield title("Where")
    yield text_block(f"On {machine_text(session.draft.facts.machine)}.")
    yield text_block(f"Its folder is made in {session.runs_dir}.")
    yield title("When this notebook closes")
    yield text_block(
        "The run goes on: it is a process of its own. Closing the page, restarting the kernel or stopping Jupyter does not "
        "touch it. Come back with Monitor and the run's name, or with the command workbench in a terminal."
    )


_PAGES: dict[str, Callable[[BuildSession], Iterator[Block]]] = {
    "model": lambda session: drawn(pages.about_model(session)),
    "data": lambda session: drawn(pages.about_data(session)),
    "review": _review,
    "launch": _launch,
}
