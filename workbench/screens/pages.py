"""What each step shows: its settings as rows, and what a person needs to read beside them.

Pure functions from a `View` to rows. Settings are rows by a loop over the specs of the step; the texts are facts that
the background has found so far, and say so when nothing is known yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config.files import short_path
from engine.config.findings import RANK
from engine.config.recipes import recipes
from engine.config.steps import GOALS, STEPS, step_fields
from engine.config.tree import FieldSpec, fields
from engine.figures import size
from engine.hardware import machine_text
from engine.planning.auto import Effective
from engine.session.build import BuildSession
from engine.session.collector import key_of
from engine.session.draft import Draft
from engine.session.opening import goal_of
from engine.session.pages import (
    CHOSEN,
    Block,
    about_data,
    about_model,
    changed_from,
    in_sentences,
    uncounted,
    waiting,
)
from workbench.calling import program
from workbench.panels.fields import entry_text, format_value, row_of, unit_of, when_empty
from workbench.panels.form import Row
from workbench.panels.paint import clean

if TYPE_CHECKING:
    from workbench.unsaved import UnsavedConfig

LEVELS = ("basic", "advanced", "expert")
LAUNCH, QUEUE = "launch!", "queue!"
TWO_LINES = 66  # cells of a recipe in the list, at 80 columns
CORE = (
    fields.run.name,
    fields.model.name,
    fields.data.train,
    fields.method.kind,
    fields.adapter.kind,
    fields.optim.learning_rate,
)


@dataclass(frozen=True)
class View:
    """All that a page may show."""

    session: BuildSession
    level: str = "basic"
    effective: dict[str, Effective] = field(default_factory=dict)
    logout: str = ""
    problem: str = ""
    """Why the run could not be started."""
    starting: bool = False
    left: tuple[UnsavedConfig, ...] = ()
    """Configs that earlier windows left unsaved."""

    @property
    def draft(self) -> Draft:
        """The config being built."""
        return self.session.draft


def page(step: str, view: View) -> list[Row]:
    """The rows of a step."""
    return list(PAGES[step](view))


def text(*lines: tuple[str, str] | str, most: int = 99) -> Row:
    """Lines to read, each wrapped into as many as it may take; aligned ones take one and are cut."""
    parts = tuple((line, "", most) if isinstance(line, str) else (line[0], line[1], most) for line in lines)
    return Row(key="", kind="text", lines=parts)


def blocks(found: Iterable[Block], width: int = 15) -> Iterator[Row]:
    """What the session says, drawn: labels `width` cells wide, rows of a file in at most three lines each."""
    for block in found:
        if block.kind == "gap":
            yield text("")
        elif block.kind == "title":
            yield text("", (block.text, "bold"))
        elif block.kind == "table":
            yield text(*(f"{label:<{width}}{value}" for label, value in block.rows), most=1)
        else:
            style = "" if block.kind == "text" else block.kind
            yield text((block.text, style), most=3 if block.kind == "code" else 99)


def setting(spec: FieldSpec, view: View, path: str | None = None) -> Row:
    """The row of one setting."""
    draft = view.draft
    path = path or spec.path
    reading = draft.reading
    invalid = path in reading.invalid
    return row_of(
        spec,
        reading.config,
        effective=view.effective,
        findings=reading.findings,
        given=path in reading.given,
        raw=draft.value(path) if invalid else None,
        invalid=invalid,
    )


def settings(step: str, view: View) -> Iterator[Row]:
    """The settings of a step up to the level; those that are written or have a finding are never hidden."""
    reading = view.draft.reading
    allowed = LEVELS[: LEVELS.index(view.level) + 1]
    paths = {finding.path for finding in reading.findings}
    hidden = 0
    for spec in step_fields(step, reading.config):
        needed = spec.path in reading.given or any(
            path == spec.path or path.startswith(spec.path + ".") for path in paths
        )
        if spec.level not in allowed and not needed:
            hidden += 1
            continue
        yield setting(spec, view)
        if spec.control == "sources":
            yield from _entries(spec, view, allowed)
    if hidden:
        following = LEVELS[min(LEVELS.index(view.level) + 1, 2)]
        yield text((f"+ {hidden} more: a shows {following} ones", "faint"))
    elif view.level != "basic":
        yield text(("all are shown: a goes back to basic ones", "faint"))


def _entries(spec: FieldSpec, view: View, allowed: tuple[str, ...]) -> Iterator[Row]:
    """The settings of each source below it; its path is edited in the list of sources."""
    raw = view.draft.value(spec.path)
    if not isinstance(raw, list):
        return
    for number, entry in enumerate(raw):
        if not isinstance(entry, dict):
            continue
        for item in spec.items:
            look = view.session.facts.looks.get(key_of(entry))
            unclear = item.name == "columns" and look is not None and bool(look.columns) and not look.format
            if item.name == "path" or (item.level not in allowed and item.name not in entry and not unclear):
                continue
            value = entry.get(item.name, item.default)
            path = f"{spec.path}.{number}.{item.name}"
            shown: tuple[tuple[str, str], ...]
            short = ""
            if item.name == "format" and value is None:
                seen = look.format if look else ""
                shown = ((seen, "value"), (" detected", "dim")) if seen else (("detected", "dim"),)
                short = seen
            elif value in (None, {}, []):
                shown = ((when_empty(item), "faint"),)
            else:
                shown = (
                    (format_value(item, value), "given"),
                    *(((f" {unit_of(item, value)}", "dim"),) if item.unit else ()),
                )
            base = setting_of_entry(path, view)
            label = f"  {item.title}" if len(raw) == 1 else f"  {number + 1} {item.title}"
            yield Row(
                key=path,
                label=label,
                value=shown,
                mark=base[0],
                notes=base[1],
                short=short,
                tail="▾" if item.control == "choice" else "",
            )


def setting_of_entry(path: str, view: View) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The gravest finding and the notes at a path inside a source."""
    styles = {"error": "bad", "warning": "warn", "hint": "hint"}
    mine = sorted((f for f in view.draft.findings if f.path == path), key=lambda f: RANK[f.severity])
    return (mine[0].severity if mine else ""), tuple((clean(f.text), styles[f.severity]) for f in mine)


# The seven pages


def _goal(view: View) -> Iterator[Row]:
    draft = view.draft
    for number, kept in enumerate(view.left[:3]):
        of = kept.path.name if kept.path else f"recipe {kept.recipe}" if kept.recipe else "no file"
        yield Row(f"unsaved:{number}", "pick", f"Go on with what was not saved, {kept.clock}, {clean(of)}")
    if view.left:
        yield text("")
    yield text((STEPS[0].question, "bold"))
    first = {goal.recipe for goal in GOALS if goal.recipe}
    mine = goal_of(draft)
    for goal in GOALS:
        if goal.recipe:
            yield Row(f"recipe:{goal.recipe}", "pick", goal.description, chosen=goal is mine)
    yield text("", ("The config so far", "bold"))
    for spec in CORE:
        if spec.applies(draft.config):
            yield setting(spec, view)
    yield text("", ("Other ready configs", "bold"))
    for recipe in recipes():
        if recipe.name not in first:
            yield Row(f"recipe:{recipe.name}", "pick", brief_title(recipe.title), chosen=draft.recipe == recipe.name)
    later = [goal.description[0].lower() + goal.description[1:] for goal in GOALS if not goal.recipe]
    if later:
        yield text("", (f"Not yet: {', '.join(later)}.", "faint"))


def brief_title(title: str) -> str:
    """A recipe's title in at most two lines of the list: what is longer is told by its second half, which names the method."""
    _, _, means = title.partition(": ")
    return title if not means or len(title) <= TWO_LINES else means[0].upper() + means[1:]


def _model(view: View) -> Iterator[Row]:
    yield from settings("model", view)
    yield from blocks(about_model(view.session))


def _data(view: View) -> Iterator[Row]:
    yield from settings("data", view)
    yield from blocks(about_data(view.session), 20)


def _review(view: View) -> Iterator[Row]:
    draft = view.draft
    errors = view.session.errors
    ready = (
        ("Ready to start: ] goes to Launch.", "good")
        if not errors
        else (f"{errors} to mend before it can start: ! lists them.", "bad")
    )
    yield text(ready)
    yield text("")
    yield from blocks(in_sentences(view.session))
    yield from blocks(uncounted(view.session))
    yield from blocks(waiting(view.session))
    if draft.findings:
        yield text("", ("Findings", "bold"))
        signs = {"error": ("✗", "bad"), "warning": ("!", "warn"), "hint": ("?", "hint")}
        for finding in sorted(draft.findings, key=lambda f: RANK[f.severity]):
            sign, style = signs[finding.severity]
            yield text((f"{sign} {clean(finding.message)}", style))
    changed = [setting for setting in view.effective.values() if setting.requested != setting.effective]
    if changed:
        yield text("", (CHOSEN, "bold"))
        for setting in changed:
            becomes = format_value(fields[setting.path], setting.effective)
            yield text(
                f"{setting.path}: {clean(setting.requested)} -> {becomes}", (f"  {clean(setting.reason)}", "dim")
            )
    yield text("", ("Estimate", "bold"))
    yield text(*_estimate(view), most=1)
    if rehearsed := view.session.rehearsed:
        yield text(rehearsed)
    difference = draft.diff()
    yield text("", (changed_from(view.session), "bold"))
    if not difference:
        yield text(("nothing", "dim"))
    for path, was, now in difference:
        spec = fields[path]
        before, after = _shown(spec, was), _shown(spec, now)
        yield text(f"{clean(path)}: {before} -> {after}")
    yield text("", (f"The file{', ' + clean(draft.path.name) if draft.path else ', not saved yet (w saves)'}", "bold"))
    yield text(*((clean(line), "code") for line in draft.text().rstrip("\n").split("\n")), most=1)


def _shown(spec: FieldSpec, value: Any) -> str:
    if isinstance(value, list) and value:
        return clean(", ".join(entry_text(entry) for entry in value))
    return format_value(spec, value) if value not in (None, "", [], {}) else "none"


def _estimate(view: View) -> Iterator[tuple[str, str] | str]:
    known, machine = view.session.consequences, view.draft.facts.machine
    for number in known:
        yield f"{number.short:<18}{number.plain:>12}"
    if machine is not None and machine.disk_free_bytes is not None:
        yield f"{'disk free':<18}{size(machine.disk_free_bytes):>12}"
    if not known:
        yield ("not known yet", "dim")


def _launch(view: View) -> Iterator[Row]:
    errors = view.session.errors
    if errors:
        yield text((f"{errors} to mend before the run can start: ! lists them, f mends what it can.", "bad"))
    else:
        words = "starting" if view.starting else "enter"
        yield Row(LAUNCH, "action", "Start the run", value=((f"  {words}", "dim"),))
        yield Row(QUEUE, "action", "Queue it", value=(("  when a device is free", "dim"),))
        yield from blocks(uncounted(view.session))
        yield from blocks(waiting(view.session))
    if view.problem:
        yield text((view.problem, "bad"))
    yield text(
        "",
        ("Where", "bold"),
        f"On {machine_text(view.draft.facts.machine)}.",
        f"Its folder is made in {clean(short_path(str(view.session.runs_dir)))}.",
    )
    yield text("", ("When this window closes", "bold"), f"The run goes on. `{program()} NAME` shows it again.")
    if view.logout:
        yield text(view.logout)
    yield text("")
    yield from settings("launch", view)


def _plain(step: str) -> Any:
    def rows(view: View) -> Iterator[Row]:
        yield from settings(step, view)

    return rows


PAGES = {
    "goal": _goal,
    "model": _model,
    "data": _data,
    "method": _plain("method"),
    "memory": _plain("memory"),
    "review": _review,
    "launch": _launch,
}
