"""A config being built: what both forms edit. Set, unset, undo, redo, diff, findings; comments of the file are kept.

What it said before, and its text, stand in `engine.session.history`. Plain Python, not thread-safe, no I/O but `open` and
`save`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import files
from engine.config.coercion import Uncoerced, coerce
from engine.config.edit import MISSING
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix
from engine.config.reading import Reading, keeps_meaning
from engine.config.recipes import recipe_mapping, recipe_text
from engine.config.section import Section, plain
from engine.config.tree import RunConfig, fields
from engine.errors import UsageError, WorkbenchError, visible
from engine.rules import read
from engine.session.history import DraftHistory

EMPTY = "version: 1\n"
MOST_FIXES = 200


class FileChanged(WorkbenchError):
    """The file holds what this draft does not know of, and saving would lose it."""


class Draft:
    """A config and its history. `edits` grows with every change of content, `version` with those of facts too."""

    def __init__(
        self, text: str | files.Document = EMPTY, *, path: Path | None = None, recipe: str | None = None
    ) -> None:
        document = files.parse(text, path=path) if isinstance(text, str) else text
        self.history = DraftHistory(document.source, document.mapping, saved=path is not None)
        self.facts = Facts()
        """What is known so far; `learn` changes it."""
        self._reading: tuple[int, Reading] | None = None
        self.version = self.edits = 0
        self.path = path
        self.recipe = recipe
        self.file_mark: str | None = None
        """By which what the file held is known again, when it was opened or saved here; None where that is not known."""

    @classmethod
    def new(cls, recipe: str | None = None) -> Draft:
        """A draft from a recipe, or an empty one. Raises UsageError for an unknown recipe."""
        return cls(recipe_text(recipe) if recipe else EMPTY, recipe=recipe)

    @classmethod
    def open(cls, file: str | os.PathLike[str] | files.Document) -> Draft:
        """The draft of a file, or of what was read of it. Raises ConfigUnreadable."""
        document = file if isinstance(file, files.Document) else files.load(file)
        assert document.path is not None
        draft = cls(document, path=document.path.absolute())
        draft.file_mark = _mark(document.source.encode())
        return draft

    # What it says

    @property
    def mapping(self) -> dict[str, Any]:
        """What the config says now, as a plain mapping; change it through the draft alone."""
        return dict(self.history.now.mapping)

    @property
    def base(self) -> Path:
        """The folder that relative paths start from: that of its file, else the working directory."""
        return self.path.parent if self.path is not None else Path.cwd()

    @property
    def reading(self) -> Reading:
        """The config read with the facts known so far; kept until something changes."""
        if self._reading is None or self._reading[0] != self.version:
            self._reading = (self.version, read(self.history.now.mapping, self.facts))
        return self._reading[1]

    @property
    def config(self) -> RunConfig:
        """The config, whole: a bad value stands as its default."""
        return self.reading.config

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that is wrong or odd, errors first."""
        return self.reading.findings

    def value(self, path: str) -> Any:
        """What is written at a path, valid or not; nothing when it is not written."""
        written = _at(self.history.now.mapping, path)
        return None if written is MISSING else written

    # Changing it

    def set(self, path: str, value: Any) -> None:
        """Write one setting. A text is written as the value that it means (`"3e-4"` as 0.0003), paths and numpy's numbers as
        text and numbers. Raises UsageError, and changes nothing, for what no file could hold."""
        value = _plain(path, value)
        spec = fields.get(path)
        if spec is not None and isinstance(value, str):
            meant = coerce(spec, value)
            value = value if isinstance(meant, Uncoerced) else meant
        _edited(self, self.history.change(_with(self.history.now.mapping, path.split("."), value)))

    def unset(self, path: str) -> None:
        """Take one setting out, so that its default stands; a section left empty goes too."""
        _edited(self, self.history.change(_without(self.history.now.mapping, path.split("."))))

    def apply(self, fix: Fix) -> None:
        """Apply a fix as one change. A key under another name keeps its place and its comments."""
        now = self.history.now
        mapping = now.mapping
        if (name := _new_name(fix, mapping)) is not None and (renamed := now.renamed(fix.unset[0].split("."), name)):
            now, mapping = renamed, renamed.mapping
        for path in sorted(fix.unset, key=_order, reverse=True):
            mapping = _without(mapping, [path] if path in mapping else path.split("."))
        for path, value in fix.set.items():
            mapping = _with(mapping, path.split("."), _plain(path, value))
        _edited(self, self.history.change(mapping, now))

    def replace_text(self, yaml: str) -> None:
        """Take a text as a person edited it. Raises ConfigUnreadable and changes nothing when it is no config."""
        mapping = files.parse(yaml, path=self.path).mapping
        _edited(self, self.history.replace(yaml, mapping))

    def learn(self, facts: Facts) -> None:
        """Take what is known of machine, model, data and packages; not part of the history."""
        if facts != self.facts:
            self.facts = facts
            self.version += 1

    def undo(self) -> bool:
        """Step back; False when there is nothing before."""
        return _edited(self, self.history.undo())

    def redo(self) -> bool:
        """Step forward again; False when nothing was undone."""
        return _edited(self, self.history.redo())

    # The file

    def text(self) -> str:
        """The file as it would be saved: comments and order kept, byte-identical while nothing was changed."""
        return self.history.text()

    @property
    def dirty(self) -> bool:
        """Whether a save would change the file."""
        return self.history.dirty

    def save(self, path: str | os.PathLike[str] | None = None, *, replace: bool = False) -> Path:
        """Write the file, whole or not at all, and remember its place. Raises WorkbenchError with the way out; FileChanged, unless it
        is to `replace` it, where the file was written elsewhere since it was opened or saved here."""
        if path is None and self.path is None:
            raise UsageError("the config has no file yet: give it a name to save it under.")
        place = Path(path).absolute() if path is not None else self.path
        assert place is not None
        if not replace and place == self.path and self.file_mark is not None:
            held = _mark(_bytes_of(place))
            if held is not None and held not in (self.file_mark, _mark(self.text().encode())):
                raise FileChanged(
                    f"{visible(str(place))}: was changed by someone else since it was opened here.",
                    "Save under another name, or open it anew.",
                )
        write(place, self.text())
        self.path, self.file_mark = place, _mark(_bytes_of(place))
        self.history.save()
        return place

    def diff(self) -> list[tuple[str, Any, Any]]:
        """`(path, value in the recipe, value here)` for every setting that differs; without a recipe, from the defaults."""
        before = read(recipe_mapping(self.recipe) if self.recipe else {}).config
        changes = []
        for spec in fields:
            was, now = spec.value(before), spec.value(self.config)
            if spec.applies(self.config) and (was != now or isinstance(was, bool) != isinstance(now, bool)):
                changes.append((spec.path, plain(was), plain(now)))
        return changes


def save_as(draft: Draft, name: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """Save where a person says: as `Draft.save`, and with FileChanged also where another file is there already."""
    place = Path(name).expanduser()
    if place.is_file():
        if draft.path is not None and draft.path.exists() and place.samefile(draft.path):
            place = draft.path  # by another way, which would pass by what is known of it
        elif not replace:
            raise FileChanged(f"{visible(str(place))}: is there already, and is not the file of this config.")
    return draft.save(place, replace=replace)


def _mark(held: bytes | None) -> str | None:
    return None if held is None else hashlib.sha256(held).hexdigest()


def _bytes_of(place: Path) -> bytes | None:
    """What the file holds; None where it cannot be read, as where there is none."""
    try:
        return place.read_bytes()
    except OSError:
        return None


def _edited(draft: Draft, changed: bool) -> bool:
    if changed:
        draft.edits += 1
        draft.version += 1
    return changed


def mend(draft: Draft) -> list[str]:
    """Apply every fix after which the file says what it says already; their labels, in order."""
    done: list[str] = []
    while len(done) < MOST_FIXES:
        finding = next((known for known in draft.findings if keeps_meaning(known)), None)
        before = draft.edits
        if finding is None or finding.fix is None:
            break
        draft.apply(finding.fix)
        if draft.edits == before:
            break
        done.append(f"{finding.path}: {finding.fix.label}")
    return done


def write(place: Path, text: str) -> None:
    """Write a text file whole or not at all, keeping the mode of the one it replaces."""
    shown = visible(str(place))
    real = place.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{real.name[:40]}.", dir=real.parent)
    except OSError as problem:
        raise WorkbenchError(f"{shown}: cannot be written: {problem.strerror}.", "Save it in another folder.") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mode = real.stat().st_mode & 0o777 if real.exists() else 0o666 & ~_umask()
        os.chmod(name, mode)
        os.replace(name, real)
    except OSError as problem:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise WorkbenchError(
            f"{shown}: cannot be written: {problem.strerror}.", "The file is as it was. Make room or save it elsewhere."
        ) from None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _plain(path: str, value: Any) -> Any:
    """The value as YAML writes it: a path as text, a number of numpy's as Python's. Raises UsageError for what is none."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(path, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(path, item) for item in value]
    if isinstance(value, Section):
        return _plain(path, value.model_dump(exclude_defaults=True))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str.__str__(value)
    listed = value.tolist() if callable(getattr(value, "tolist", None)) else None
    if type(listed) in (bool, int, float, str, list):
        return _plain(path, listed)
    kind = type(value).__name__
    raise UsageError(
        f"{path}: must be text, a number, a truth, nothing, a list or a mapping of such; got a value of type {kind}.",
        "Give it as one of these.",
    )


def _new_name(fix: Fix, mapping: Mapping[str, Any]) -> str | None:
    """What a fix calls a key of `mapping` that it leaves where it is, with its value; None for any other fix."""
    if len(fix.unset) != 1 or len(fix.set) != 1:
        return None
    (old,), ((new, value),) = fix.unset, fix.set.items()
    within, _, name = new.rpartition(".")
    stays = old.rpartition(".")[0] == within and old not in mapping and not name.isdigit()
    return name if stays and _same(_at(mapping, old), value) and _at(mapping, new) is MISSING else None


def _order(path: str) -> tuple[Any, ...]:
    """Later entries of a list are removed before earlier ones."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in path.split("."))


def _at(place: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(place, Mapping) and part in place:
            place = place[part]
        elif isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        else:
            return MISSING
    return place


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _with(place: Any, parts: list[str], value: Any) -> Any:
    """`place` with `value` at the path; only what lies on the way is copied, `place` itself when nothing changes."""
    part, rest = parts[0], parts[1:]
    if part.isdigit() and not isinstance(place, Mapping):
        items = list(place) if isinstance(place, list) else []
        index = min(int(part), len(items))
        old = items[index] if index < len(items) else MISSING
        new = _with(old, rest, value) if rest else value
        if isinstance(place, list) and _same(old, new):
            return place
        items[index : index + 1] = [new]
        return items
    if isinstance(place, str) and part.isdigit() is False and rest == [] and part != "path":
        place = {"path": place}  # an entry written as a bare path grows keys
    mapping = dict(place) if isinstance(place, Mapping) else {}
    old = mapping.get(part, MISSING)
    new = _with(old, rest, value) if rest else value
    if isinstance(place, Mapping) and _same(old, new):
        return place
    mapping[part] = new
    return mapping


def _without(place: Any, parts: list[str]) -> Any:
    """`place` without the path; sections that end up empty go too, `place` itself when nothing was there."""
    part, rest = parts[0], parts[1:]
    if isinstance(place, Mapping):
        key: Any = part if part in place else next((known for known in place if str(known) == part), MISSING)
        if key is MISSING:
            return place
        inner = _without(place[key], rest) if rest else MISSING
        if inner is place[key]:
            return place
        gone = inner is MISSING or inner in ({}, [])
        return {**{k: v for k, v in place.items() if k != key}} if gone else {**place, key: inner}
    if isinstance(place, list) and part.isdigit() and int(part) < len(place):
        index = int(part)
        inner = _without(place[index], rest) if rest else MISSING
        if inner is place[index]:
            return place
        return [*place[:index], *([] if inner is MISSING or inner == {} else [inner]), *place[index + 1 :]]
    return place
