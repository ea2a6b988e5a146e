"""What each step shows: its settings as rows, and what a person needs to read beside them.

Pure functions from a `View` to rows. Settings are rows by a loop over the specs of the step; the texts are facts that
the background has found so far, and say so when nothing is known yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.draft import Draft
from engine.config.findings import RANK
from engine.config.recipes import recipes
from engine.config.schema import Effective, FieldSpec, fields
from engine.config.steps import GOALS, STEPS, step_fields
from workbench.panels.consequences import ROWS, size
from workbench.panels.fields import entry_words, in_words, row_of, short_path, unit_of
from workbench.panels.form import Row
from workbench.panels.paint import clean

if TYPE_CHECKING:
    from engine.hardware import Machine
    from workbench.screens.learn import Look
    from workbench.unsaved import Kept

LEVELS = ("basic", "advanced", "expert")
LAUNCH = "launch!"
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

    draft: Draft
    level: str = "basic"
    effective: dict[str, Effective] = field(default_factory=dict)
    estimate: Any = None
    looks: dict[str, Look] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None
    asking: str = ""
    """What the inspector is busy with, in words."""
    trouble: tuple[str, ...] = ()
    runs_dir: Path = Path("runs")
    logout: str = ""
    problem: str = ""
    """Why the run could not be started."""
    starting: bool = False
    machine: Machine | None = None
    left: tuple[Kept, ...] = ()
    """Configs that earlier windows left unsaved."""
    rehearsed: str = ""
    """What a measured step of this very config took."""


def page(step: str, view: View) -> list[Row]:
    """The rows of a step."""
    return list(PAGES[step](view))


def text(*lines: tuple[str, str] | str, most: int = 99) -> Row:
    """Lines to read, each wrapped into as many as it may take; aligned ones take one and are cut."""
    made = tuple((line, "", most) if isinstance(line, str) else (line[0], line[1], most) for line in lines)
    return Row(key="", kind="text", lines=made)


def table(rows: Iterable[tuple[str, str | None]], width: int = 15) -> Row:
    """Labels and values, aligned; what is not known is left out."""
    return text(*(f"{label:<{width}}{clean(value)}" for label, value in rows if value), most=1)


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
    found = {finding.path for finding in reading.findings}
    hidden = 0
    for spec in step_fields(step, reading.config):
        needed = spec.path in reading.given or any(
            path == spec.path or path.startswith(spec.path + ".") for path in found
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
            look = view.looks.get(_key(entry))
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
                shown = (("none", "faint"),)
            else:
                shown = (
                    (in_words(item, value), "given"),
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


def _key(entry: Any) -> str:
    return repr(sorted(entry.items(), key=str)) if isinstance(entry, dict) else str(entry)


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
    for goal in GOALS:
        if goal.recipe:
            yield Row(f"recipe:{goal.recipe}", "pick", goal.words, chosen=draft.recipe == goal.recipe)
    yield text("", ("The config so far", "bold"))
    for spec in CORE:
        if spec.applies(draft.config):
            yield setting(spec, view)
    yield text("", ("Other ready configs", "bold"))
    for recipe in recipes():
        if recipe.name not in first:
            yield Row(f"recipe:{recipe.name}", "pick", brief_title(recipe.title), chosen=draft.recipe == recipe.name)
    later = [goal.words[0].lower() + goal.words[1:] for goal in GOALS if not goal.recipe]
    if later:
        yield text("", (f"Not yet: {', '.join(later)}.", "faint"))


def brief_title(title: str) -> str:
    """A recipe's title in at most two lines of the list: what is longer is told by its second half, which names the method."""
    _, _, means = title.partition(": ")
    return title if not means or len(title) <= TWO_LINES else means[0].upper() + means[1:]


def _model(view: View) -> Iterator[Row]:
    yield from settings("model", view)
    facts = view.draft.facts.model
    lines: list[tuple[str, str] | str] = ["", ("What is known of this model", "bold")]
    if facts is None:
        lines.append((f"Nothing yet; {view.asking or 'name a folder, a hub model or builtin/tiny'}.", "dim"))
    elif facts.missing:
        lines.append((f"{facts.missing}", "bad"))
    elif facts.remote:
        lines.append(
            ("Its files are not on this machine; they are downloaded at launch if the hub can be reached.", "warn")
        )
    else:
        rows = (
            ("Kind", facts.model_type or None),
            ("Parameters", f"{facts.parameters:,}" if facts.parameters else None),
            ("Layers", f"{facts.layers} of width {facts.hidden_size:,}" if facts.layers else None),
            ("Context", f"{facts.max_length:,} tokens" if facts.max_length else None),
            ("Vocabulary", f"{facts.vocab_size:,}" if facts.vocab_size else None),
            ("Chat template", {True: "yes", False: "none in its files", None: None}[facts.chat_template]),
        )
        yield text(*lines)
        lines = []
        yield table(rows)
    if view.tokenizer:
        tokenizer = view.tokenizer.get("tokenizer") or {}
        template = view.tokenizer.get("template") or {}
        own = str(template.get("name") or "").startswith("the tokenizer")
        known = (
            ("Tokenizer", f"{tokenizer.get('size', 0):,} tokens"),
            ("Template", "the tokenizer's" if own else template.get("name") or "none"),
            ("End of answer", tokenizer.get("eos_token") or "none"),
        )
        yield table(known)
    elif view.asking:
        lines.append((view.asking, "dim"))
    yield text(*lines)
    yield from _trouble(view)


def _data(view: View) -> Iterator[Row]:
    yield from settings("data", view)
    sources = view.draft.value(fields.data.train.path)
    for entry in sources if isinstance(sources, list) else []:
        look = view.looks.get(_key(entry))
        if look is not None:
            yield from _looked(look)
    facts = view.draft.facts.data
    if facts is not None and facts.rows is not None:
        rows = (
            ("Rows to learn from", f"{facts.rows:,}"),
            ("Held-out rows", f"{facts.eval_rows:,}" if facts.eval_rows else None),
            ("Tokens", f"{facts.tokens:,}" if facts.tokens else None),
            ("of them learned", f"{facts.trained_tokens:,}" if facts.trained_tokens else None),
            ("Longest row", f"{facts.longest:,} tokens" if facts.longest else None),
            ("Rows too long", f"{facts.truncated:,}" if facts.truncated else None),
            ("Nothing to learn in", f"{facts.masked:,} rows" if facts.masked else None),
        )
        yield text("", ("Counted over all rows" if facts.exact else "Counted so far", "bold"))
        yield table(rows, 20)
    elif view.asking:
        yield text("", (view.asking, "dim"))
    yield from _trouble(view)


def _looked(look: Look) -> Iterator[Row]:
    """Format, columns and three rows of one source."""
    yield text("", (short_path(clean(look.path)) + (f", {look.count:,} rows" if look.count else ""), "bold"))
    if look.why:
        seen = f"{look.format}: " if look.format else ""
        yield text((clean(f"{seen}{look.why}"), "dim"))
    renamed = [f"{part} from {column}" for part, column in look.used if part != column]
    if renamed:
        yield text((clean("Read as " + ", ".join(renamed)), "dim"))
    if look.columns and not look.format:
        yield text((clean("Columns that can be mapped: " + ", ".join(look.columns)), "dim"))
    for problem in look.problems[:3]:
        yield text((clean(problem), "bad"))
    if look.rows:
        yield text(*((clean(row), "code") for row in look.rows), most=3)


def _trouble(view: View) -> Iterator[Row]:
    if view.trouble:
        yield text("", *((clean(words), "warn") for words in view.trouble))


def _review(view: View) -> Iterator[Row]:
    draft = view.draft
    errors = sum(finding.severity == "error" for finding in draft.findings)
    ready = (
        ("Ready to start: ] goes to Launch.", "good")
        if not errors
        else (f"{errors} to mend before it can start: ! lists them.", "bad")
    )
    yield text(ready)
    if draft.findings:
        yield text("", ("Findings", "bold"))
        signs = {"error": ("✗", "bad"), "warning": ("!", "warn"), "hint": ("?", "hint")}
        for finding in sorted(draft.findings, key=lambda f: RANK[f.severity]):
            sign, style = signs[finding.severity]
            yield text((f"{sign} {clean(finding.message)}", style))
    difference = draft.diff()
    yield text("", (f"Changed from {'recipe ' + draft.recipe if draft.recipe else 'the defaults'}", "bold"))
    if not difference:
        yield text(("nothing", "dim"))
    for path, was, now in difference:
        spec = fields[path]
        before, after = _shown(spec, was), _shown(spec, now)
        yield text(f"{clean(path)}: {before} -> {after}")
    changed = [each for each in view.effective.values() if each.requested != each.effective]
    if changed:
        yield text("", ("Asked -> what it becomes", "bold"))
        for each in changed:
            becomes = in_words(fields[each.path], each.effective)
            yield text(f"{each.path}: {clean(each.requested)} -> {becomes}", (f"  {clean(each.reason)}", "dim"))
    yield text("", ("Estimate", "bold"))
    yield text(*_estimate(view), most=1)
    if view.rehearsed:
        yield text(view.rehearsed)
    yield text("", (f"The file{', ' + clean(draft.path.name) if draft.path else ', not saved yet (w saves)'}", "bold"))
    yield text(*((clean(line), "code") for line in draft.text().rstrip("\n").split("\n")), most=1)


def _shown(spec: FieldSpec, value: Any) -> str:
    if isinstance(value, list) and value:
        return clean(", ".join(entry_words(entry) for entry in value))
    return in_words(spec, value) if value not in (None, "", [], {}) else "none"


def _estimate(view: View) -> Iterator[tuple[str, str] | str]:
    known = False
    for label, name, write in ROWS:
        value = getattr(view.estimate, name, None)
        if value is not None:
            known = True
            yield f"{label:<18}{write(value):>12}"
    if view.machine is not None and view.machine.disk_free_bytes is not None:
        yield f"{'disk free':<18}{size(view.machine.disk_free_bytes):>12}"
    if not known:
        yield ("not known yet", "dim")


def _launch(view: View) -> Iterator[Row]:
    errors = sum(finding.severity == "error" for finding in view.draft.findings)
    if errors:
        yield text((f"{errors} to mend before the run can start: ! lists them, f mends what it can.", "bad"))
    else:
        words = "starting" if view.starting else "enter"
        yield Row(LAUNCH, "action", "Start the run", value=((f"  {words}", "dim"),))
    if view.problem:
        yield text((view.problem, "bad"))
    yield text(
        "",
        ("Where", "bold"),
        f"On {machine_words(view.machine)}.",
        f"Its folder is made in {clean(short_path(str(view.runs_dir)))}.",
    )
    yield text("", ("When this window closes", "bold"), "The run goes on. `workbench NAME` shows it again.")
    if view.logout:
        yield text(view.logout)
    yield text("")
    yield from settings("launch", view)


def machine_words(machine: Machine | None) -> str:
    """The machine in a few words."""
    if machine is None:
        return "this machine"
    if machine.gpus:
        gpu = machine.gpus[0]
        many = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
        return clean(f"{many}{gpu.name.removeprefix('NVIDIA ')}, {size(gpu.memory_bytes)}")
    return f"CPU, {machine.cpu_count or '?'} cores, {size(machine.memory_bytes)}"


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
