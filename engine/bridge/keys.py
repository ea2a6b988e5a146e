"""How a tool's keys are read: a table of what each means here, and the one reader that goes through a file with it.

A table has one `Key` for each key that the tool's documentation names: what its value means, and the tool's default where
it changes what is learned or kept. The reader checks what a meaning gives against our own settings, sees keys that
disagree and settings of other methods, and adds the defaults that differ from ours. Facts alone are taken from the tools'
documentation; a key without an entry is said to be unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.bridge.ledger import Origin, Outcome, Row
from engine.config.absent import absent
from engine.config.coercion import Uncoerced, expectation, fit
from engine.config.files import DATA_SUFFIXES
from engine.config.findings import shown
from engine.config.renames import is_off, sentence_for
from engine.config.tree import FieldSpec, fields
from engine.errors import visible

NO_DEFAULT: Any = object()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one value means: the settings that say it here, and why where they do not say the same."""

    outcome: Outcome
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def mapped(settings: Mapping[str, Any], reason: str = "") -> Answer:
    """It means the same here."""
    return Answer("mapped", settings, reason)


def changed(settings: Mapping[str, Any], reason: str) -> Answer:
    """Something else stands here, and this is why."""
    return Answer("changed", settings, reason)


def needless(reason: str) -> Answer:
    """Nothing needs to be written."""
    return Answer("needless", {}, reason)


def unsupported(reason: str) -> Answer:
    """It is not done here; what there is instead."""
    return Answer("unsupported", {}, reason)


Part = tuple[str, Any, Answer]
"""The answer to one key inside a value: its path there, its value, what it means."""


class File:
    """A config of another tool being read: its keys, and the folders that its paths and ours are relative to."""

    def __init__(
        self,
        mapping: Mapping[str, Any],
        *,
        title: str,
        folder: Path,
        out: Path,
        name: str = "",
        method: str | None = None,
        lists: Path | None = None,
    ) -> None:
        self.mapping, self.title, self.folder, self.out, self.name = mapping, title, folder, out, name
        self.method = method
        """The method that the caller names, for tools whose files do not."""
        self.lists = lists
        """Where the tool's list of data sets lies, when the caller says so."""
        self.from_lists: list[Row] = []
        """Rows about what a list of data sets says."""

    def get(self, key: str, default: Any = None) -> Any:
        """What the file says; the default also where it says null."""
        value = self.mapping.get(key)
        return default if value is None else value

    def on(self, key: str) -> bool:
        """Whether the file turns this on."""
        value = self.get(key)
        return value is True or str(value).lower() in ("true", "yes", "on")

    def is_local(self, name: str) -> bool:
        """Whether a source's name is a file or a folder, by its looks or because it is there."""
        return (
            name.startswith((".", "~", "/"))
            or name.lower().endswith(DATA_SUFFIXES)
            or self.resolve_path(name) is not None
        )

    def resolve_path(self, name: str) -> Path | None:
        """Where a path of the file leads: the tools count from where they are started, which may be the file's folder."""
        for base in (self.folder, Path.cwd()):
            place = base / os.path.expanduser(name)
            try:
                if name.strip() and "\0" not in name and place.exists():
                    return place
            except OSError:
                continue
        return None

    def place(self, name: str) -> str:
        """A path as it must stand in the new config, which counts from its own folder; names stay names."""
        there = self.resolve_path(name) if not os.path.isabs(os.path.expanduser(name)) else None
        return self.from_out(there) if there is not None else name

    def from_out(self, there: Path) -> str:
        """A path that exists, as the new config names it."""
        return Path(os.path.relpath(there.absolute(), self.out)).as_posix()


Meaning = Callable[[Any, File], "Answer | list[Part]"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a tool: what its value means, and what the tool takes where the file leaves it out.

    A default is a value, or a function of the file that gives one, or NO_DEFAULT where none is taken then.
    """

    means: Meaning
    default: Any = NO_DEFAULT
    why: str = ""
    """Said beside the default where that alone would puzzle."""
    empty: Answer | None = None
    """What null means, where it does not mean the default."""


EXPERTS_STAY: Mapping[str, Any] = {"model.quantize_moe_experts": False}
"""Beside a base in few bits, of tools that leave the experts of a mixture in 16."""

# Meanings that many keys share


def same(path: str, default: Any = NO_DEFAULT, reason: str = "", why: str = "") -> Key:
    """The same value under our name, of a mapping each key for itself."""

    def means(value: Any, file: File) -> Answer | list[Part]:
        if isinstance(value, Mapping) and value:
            return [(str(key), item, mapped({path: {key: item}}, reason)) for key, item in value.items()]
        return mapped({path: value}, reason)

    return Key(means, default, why)


def placed(path: str) -> Key:
    """A path, or a name, under our name."""
    return Key(lambda value, file: mapped({path: file.place(str(value))}))


def flag(settings: Mapping[str, Any], default: Any = NO_DEFAULT, off: str = "", why: str = "") -> Key:
    """Settings that a switch stands for; off it asks for nothing."""

    def means(value: Any, file: File) -> Answer:
        if value is True or str(value).lower() in ("true", "yes", "on"):
            return mapped(settings)
        return needless(off or OFF) if is_off(value) else unsupported(f"It is known as true or false here: {BY_HAND}")

    return Key(means, default, why)


def flag_of(answer: Callable[[File], Answer]) -> Key:
    """What a switch stands for in this file; off it asks for nothing."""

    def means(value: Any, file: File) -> Answer:
        if value is True or str(value).lower() in ("true", "yes", "on"):
            return answer(file)
        return needless(OFF) if is_off(value) else unsupported(f"It is known as true or false here: {BY_HAND}")

    return Key(means)


def anything(settings: Mapping[str, Any], off: str = "") -> Key:
    """Settings that every value stands for but an empty one, which asks for nothing."""
    return Key(lambda value, file: needless(off or OFF) if is_off(value) else mapped(settings))


def choice(words: Mapping[Any, Answer], otherwise: str = "", default: Any = NO_DEFAULT, why: str = "") -> Key:
    """A value out of some, each with its own answer."""

    def means(value: Any, file: File) -> Answer:
        known = next((answer for word, answer in words.items() if word == value and type(word) is type(value)), None)
        return known or unsupported(otherwise or f"This value is not known here: {BY_HAND}")

    return Key(means, default, why)


def nothing(reason: str = "") -> Key:
    """Whatever it says, nothing needs to be written: it happens by itself, or changes nothing of what is learned."""
    return Key(lambda value, file: needless(reason or OFF))


def unless_off(reason: str = "", off: str = "") -> Key:
    """Not done here unless it is off; without a reason that of the one table of what is not here yet."""
    return Key(lambda value, file: needless(off or OFF) if is_off(value) else unsupported(reason))


def of_new_adapter(named: str, key: Key) -> Key:
    """Of an adapter that is begun: where the file names one that is trained further (`named`), its own folder says it."""
    there = needless("The folder of the adapter that training goes on from says it.")
    return Key(
        lambda value, file: there if file.get(named) else key.means(value, file), key.default, key.why, key.empty
    )


def unless(value: Any, reason: str, same_as: str = "") -> Key:
    """Not done here unless it has this one value, which is what happens here."""

    def means(given: Any, file: File) -> Answer:
        return needless(same_as or SAME_HERE) if given == value else unsupported(reason)

    return Key(means)


def where_known(path: str, otherwise: Key) -> Key:
    """Our setting of this name where this version has it, off being nothing to write; else another answer."""
    if path not in fields:
        return otherwise
    return Key(lambda value, file: needless(OFF) if is_off(value) else mapped({path: value}))


OFF = "It is off or empty, which needs no setting here."
EMPTY = "It is empty, so the tool's own default stands."
SAME_HERE = "So it is here."
BY_HAND = "look at it by hand."
INTERNAL = "The tool writes it for itself."


# Reading a file


def read_rows(table: Mapping[str, Key], file: File) -> tuple[Row, ...]:
    """What became of every key of the file, and the tool's defaults that differ from ours."""
    rows = [row for key, value in file.mapping.items() for row in _rows_of(str(key), value, table.get(str(key)), file)]
    rows += file.from_lists
    file.from_lists = []
    rows += [row for key, known in table.items() for row in _default_rows(key, known, file)]
    kinds = _kinds(rows)
    claims: dict[tuple[str, Any], tuple[str, Any]] = {}
    settled = [_settled(row, kinds, claims) for row in rows]
    return tuple(row for row in settled if row.origin != "default" or _differs(row, kinds))


def _rows_of(key: str, value: Any, known: Key | None, file: File, origin: Origin = "file") -> Iterator[Row]:
    if value is None:
        empty = known.empty if known is not None and known.empty is not None else needless(EMPTY)
        yield Row(key, value, empty.outcome, empty.settings, empty.reason, origin)
        return
    try:
        answer = known.means(value, file) if known is not None else _not_known(key, value, file)
    except TypeError:  # a list or settings where the tool takes a word
        answer = unsupported(f"This value is not known here: {BY_HAND}")
    if isinstance(answer, list) and not answer:
        answer = needless(OFF)
    if isinstance(answer, list):
        for inner, item, part in answer:
            yield from _leaves(f"{key}.{inner}" if inner else key, item, part, origin)
    else:
        yield from _leaves(key, value, answer, origin)


def _leaves(key: str, value: Any, answer: Answer, origin: Origin) -> Iterator[Row]:
    """One row for each value that stands below a key; what is written stands in the first."""
    reason = answer.reason
    if answer.outcome == "unsupported" and not reason:
        reason = _reason_for(key) or f"This value is not known here: {BY_HAND}"
    answer = replace(answer, reason=reason)
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        inner = list(enumerate(value))
    if not inner:
        yield Row(key, value, answer.outcome, answer.settings, answer.reason, origin)
        return
    for name, item in inner:
        yield from _leaves(f"{key}.{name}", item, answer, origin)
        answer = replace(answer, settings={})


def _reason_for(key: str) -> str:
    """The sentence that the table of what is not here yet, or of other tools' names, has for a key."""
    top = key.partition(".")[0]
    missing = absent(top)
    return missing.sentence if missing is not None else sentence_for(top)


def _not_known(key: str, value: Any, file: File) -> Answer:
    missing = absent(key)
    if missing is not None:
        return needless(OFF) if is_off(value) else unsupported(missing.sentence)
    return unsupported(f"It is no key that is known of {file.title}, so nothing was taken from it: {BY_HAND}")


def _default_rows(key: str, known: Key, file: File) -> Iterator[Row]:
    given = key in file.mapping and (file.mapping[key] is not None or known.empty is not None)
    if known.default is NO_DEFAULT or given:
        return
    value = known.default(file) if callable(known.default) else known.default
    if value is NO_DEFAULT:
        return
    for row in _rows_of(key, value, known, file, "default"):
        yield replace(row, reason=f"{row.reason} {known.why}".strip())


def _kinds(rows: list[Row]) -> dict[str, str]:
    """The method and the adapter that the file asks for; what it says counts before what the tool takes by itself."""
    kinds = {"method": "sft", "adapter": "none"}
    for section in kinds:
        path = f"{section}.kind"
        asked = [row.settings[path] for row in rows if path in row.settings]
        kinds[section] = next((kind for kind in asked if kind in fields[path].choices), kinds[section])
    return kinds


def _settled(row: Row, kinds: Mapping[str, str], claims: dict[tuple[str, Any], tuple[str, Any]]) -> Row:
    """The row with its settings as our own annotations take them, or with the reason why they cannot be written."""
    settings: dict[str, Any] = {}
    for path, value in row.settings.items():
        spec = fields.get(path)
        if spec is None:
            return replace(row, outcome="unsupported", settings={}, reason=row.reason or _reason_for(row.key))
        section = spec.section or path.partition(".")[0]
        if spec.kinds and spec.name != "kind":
            kind = kinds[section]
            if kind not in spec.kinds:
                words = f"It counts with {section}.kind {' or '.join(spec.kinds)} alone; here it is {kind}."
                return replace(row, outcome="needless", settings={}, reason=words)
            spec = spec.for_kind(kind)
        taken = value if value is None else fit(spec, value)
        if isinstance(taken, Uncoerced) or (value is not None and _is_unsupported(taken, spec)):
            why = f"{path} must be {expectation(spec)}; got {shown(value)}."
            return replace(row, outcome="unsupported", settings={}, reason=f"{row.reason} {why}".strip())
        other = _claimed(path, taken, row.key, claims)
        if other is not None:
            if row.origin == "default":
                return replace(row, settings={}, outcome="needless")
            why = f"{visible(other[0])} says it otherwise, and that was taken ({shown(other[1])})."
            return replace(row, outcome="unsupported", settings={}, reason=why)
        settings[path] = taken
    return replace(row, settings=settings)


def _is_unsupported(value: Any, spec: FieldSpec) -> bool:
    """Whether a value is one that the schema knows and this version refuses."""
    return any(value == known and type(value) is type(known) for known in spec.unsupported)


def _claimed(path: str, value: Any, key: str, claims: dict[tuple[str, Any], tuple[str, Any]]) -> tuple[str, Any] | None:
    """The key that has said something else about this setting before, with what it said."""
    for inner, item in value.items() if isinstance(value, Mapping) else ((None, value),):
        before = claims.setdefault((path, inner), (key, item))
        if before[1] != item:
            return before
    return None


def _differs(row: Row, kinds: Mapping[str, str]) -> bool:
    """Whether a tool's default says something else than ours does where nothing is written."""
    if row.outcome in ("changed", "unsupported"):
        return True
    for path, value in row.settings.items():
        spec = fields.get(path)
        ours = spec.for_kind(kinds.get(spec.section, "")).default if spec is not None else None
        if spec is None or spec.name == "kind" or ours != value or isinstance(ours, bool) != isinstance(value, bool):
            return True
    return False


def config_of(rows: tuple[Row, ...]) -> dict[str, Any]:
    """The config that the rows make, in the order of the schema; mappings that several keys fill are one."""
    written: dict[str, Any] = {}
    for row in rows:
        for path, value in row.settings.items():
            if isinstance(value, Mapping) and isinstance(written.get(path), Mapping):
                written[path] = {**written[path], **value}
            elif path not in written:
                written[path] = dict(value) if isinstance(value, Mapping) else value
    order = {spec.path: number for number, spec in enumerate(fields)}
    inner = {spec.name: number for number, spec in enumerate(fields.data.train.items)}

    def place(path: str) -> tuple[int, ...]:
        section, name, *entry = path.split(".")
        within = (int(entry[0]), inner.get(entry[1], len(inner))) if entry else ()
        return (order.get(f"{section}.{name}", len(order)), *within)

    config: dict[str, Any] = {}
    for path in sorted(written, key=place):
        if written[path] is not None:
            _put(config, path.split("."), written[path])
    for name in ("train", "eval"):
        if name in config.get("data", {}):
            config["data"][name] = [entry for entry in config["data"][name] if entry]
    return config


def _put(place: dict[str, Any], parts: list[str], value: Any) -> None:
    section, name, *inner = parts
    settings = place.setdefault(section, {})
    if not inner:
        settings[name] = value
        return
    entries = settings.setdefault(name, [])
    index, key = int(inner[0]), inner[1]
    while len(entries) <= index:
        entries.append({})
    entries[index][key] = value
