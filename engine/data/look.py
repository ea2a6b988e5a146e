"""One quick look at everything a config names: machine, model files, packages, sources. Torch-free, for both faces.

Gives the facts that rules and estimate need before anything is prepared: whether a source is there, how large, what its
first rows hold, how many rows it has if that is known within a moment. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config.facts import Facts, SourceFacts, model_facts
from engine.config.files import DATA_SUFFIXES, place_of
from engine.config.reward_specs import files_of
from engine.errors import WorkbenchError, visible
from engine.hardware import Machine, installed, this_machine

FIRST_ROWS = 1000
PATIENCE = 0.25
"""Seconds to wait for a row count; an index that takes longer is counted by the inspector."""


class Installed(Mapping[str, str | None]):
    """The versions of packages here, each looked up when a rule asks for it; a package that is missing is `None`."""

    def __getitem__(self, package: str) -> str | None:
        return installed(package)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Installed)

    def __hash__(self) -> int:
        return hash(Installed)


def look_at(config: Any, base: str | Path = ".", machine: Machine | None = None, *, sources: bool = True) -> Facts:
    """What can be known of this config at once. With `machine` the packages here say nothing about it."""
    folder = Path(base)
    name = config.model.name
    model = model_facts(place_of(name, folder), config.model.revision)
    here = machine is None
    return Facts(
        machine=this_machine(folder / config.run.output_dir) if machine is None else machine,
        model=replace(model, name=name) if model else None,
        packages=Installed() if here else None,
        sources=look_at_sources([*config.data.train, *config.data.eval], folder) if sources else None,
        files={path: _there(path, folder) for path in files_of(getattr(config.method, "reward_funcs", ()))},
    )


def completed(facts: Facts, config: Any, base: str | Path = ".") -> Facts:
    """These facts, and what a look would still add: for a launch that comes before the look after the last edit."""
    model = facts.model if facts.model is not None and facts.model.name == config.model.name else None
    paths = {entry.path for entry in (*config.data.train, *config.data.eval) if entry.path}
    sources = facts.sources if facts.sources is not None and paths <= facts.sources.keys() else None
    if facts.machine is not None and model is not None and sources is not None:
        return facts
    found = look_at(config, base, sources=sources is None)
    return replace(
        facts,
        machine=facts.machine or found.machine,
        model=model or found.model,
        packages=found.packages if facts.packages is None else facts.packages,
        sources=found.sources if sources is None else sources,
        files=found.files,
    )


def counted_over(config: Any) -> list[Any]:
    """Whose tokens a count is of: model and tokenizer, sources, method. Counts made over others say nothing of this one."""
    model, data = config.model, config.data
    rows = [entry.model_dump() for entry in (*data.train, *data.eval)]
    return [model.name, model.revision, model.tokenizer, rows, len(data.train), config.method.kind]


def _there(path: str, folder: Path) -> bool:
    """Whether a reward's file is there, or the folder of a model."""
    try:
        places = Path(place_of(path, folder)), folder / path
        return any(
            place.is_file() or (place / "config.json").is_file() or (place / "adapter_config.json").is_file()
            for place in places
        )
    except (OSError, ValueError):
        return False


def look_at_sources(entries: Iterable[Any], folder: Path) -> dict[str, SourceFacts]:
    """One look at each source, by its path as the config writes it."""
    found: dict[str, SourceFacts] = {}
    for entry in entries:
        if entry.path and entry.path not in found:
            found[entry.path] = look_at_source(entry, folder)
    return found


def look_at_source(entry: Any, folder: Path) -> SourceFacts:
    """There or not, size, first rows, format. Never raises for bad data: a problem is part of the answer."""
    if entry.path == "builtin/dates":
        return _builtin(entry)
    if entry.path.startswith("builtin/"):
        return SourceFacts(entry.path)
    written = place_of(entry.path, folder)
    place = Path(written)
    try:
        if not place.exists():
            local = written.startswith("/") or written.lower().endswith(DATA_SUFFIXES)
            return SourceFacts(entry.path, exists=False if local else None)
        if place.is_dir() or ".parquet" in place.suffixes or ".arrow" in place.suffixes:
            # columns of these need pyarrow, which the inspector has loaded
            return SourceFacts(entry.path, exists=True, bytes=None if place.is_dir() else place.stat().st_size)
        return _file(entry, place)
    except OSError as problem:
        return SourceFacts(
            entry.path, exists=True, problem=f"cannot be read: {problem.strerror or 'input/output error'}."
        )


def _builtin(entry: Any) -> SourceFacts:
    from engine.builtin import dates

    rows = dates.HELD_OUT_DAYS if entry.split == "eval" else dates.TRAIN_ROWS
    return SourceFacts(entry.path, exists=True, rows=rows, columns=("messages",), format="messages")


def _file(entry: Any, place: Path) -> SourceFacts:
    from engine.data.detect import detect
    from engine.data.rows import open_rows

    size = place.stat().st_size
    try:
        rows = open_rows(place)
    except WorkbenchError as problem:
        sentence = problem.message.removeprefix(f"{visible(str(place))}: ")
        return SourceFacts(entry.path, exists=True, bytes=size, problem=f"{sentence}. {problem.hint}".strip())
    try:
        seen = detect(rows, {**entry.columns, **entry.properties}, entry.format, look=FIRST_ROWS)
        problem_text = ""
        if seen.problems:
            problem_text = seen.problems[0].removeprefix(f"{visible(str(place))}").removeprefix(": ").lstrip(":")
            problem_text = f"line {problem_text}" if problem_text[:1].isdigit() else problem_text
            problem_text += "" if problem_text.endswith(".") else "."
        columns = tuple(visible(str(column)) for column in (seen.example or {}))
        try:
            count = rows.wait(PATIENCE)
        except WorkbenchError:
            count = None
        return SourceFacts(entry.path, True, size, count, columns, seen.format, problem_text)
    finally:
        rows.close()
