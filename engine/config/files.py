"""Config files: YAML in, within safe limits, and a complete resolved YAML out.

A file is read with ruamel's YAML 1.2 parser into plain values; no tag but the core ones, at most 1 MiB, 64 levels and
4,000 values with aliases expanded, no key twice. What cannot be read is one sentence with the line, never a traceback.
Writing single changes into a text is `engine.config.edit`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from engine.config.facts import Facts
from engine.config.nodes import TooMuch, plain
from engine.config.reward_specs import BadReward, reward_spec, with_path
from engine.config.tree import FieldSpec, RunConfig, fields, fields_of
from engine.errors import ConfigUnreadable, UsageError, visible

MOST_BYTES = 1024 * 1024
COMPRESSIONS = (".gz", ".bz2", ".zst", ".xz")
DATA_SUFFIXES = (
    ".json",
    ".jsonl",
    ".ndjson",
    ".csv",
    ".tsv",
    ".parquet",
    ".txt",
    ".md",
    ".gz",
    ".zst",
    ".xz",
    ".bz2",
    ".arrow",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A config file as it was read: its text, what it says, and where each key stands (lines from 1)."""

    source: str
    mapping: dict[str, Any]
    lines: Mapping[str, int]
    path: Path | None = None

    def text(self) -> str:
        """The file's text, byte for byte."""
        return self.source


def load(path: str | os.PathLike[str]) -> Document:
    """The config file at `path`. Raises ConfigUnreadable with one sentence when it is none."""
    place = Path(path)
    shown = visible(str(path))
    try:
        if place.is_dir():
            raise ConfigUnreadable(f"{shown}: must be a file; got a folder. Name the YAML file in it.")
        with place.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigUnreadable(
            f"{shown}: must be a file that exists; got nothing there. Write one with `workbench new -o {shown}`."
        ) from None
    except OSError as problem:
        raise ConfigUnreadable(
            f"{shown}: cannot be read: {problem.strerror or problem}. See whose file it is."
        ) from None
    if len(raw) > MOST_BYTES:
        raise ConfigUnreadable(
            f"{shown}: must be at most 1 MiB; got more. A config is a few dozen lines: is this a data file?"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise ConfigUnreadable(
            f"{shown}:{line}: must be UTF-8 text; got byte 0x{raw[problem.start]:02x}. Save it as UTF-8."
        ) from None
    return parse(text, path=place)


def parse(text: str, *, path: Path | None = None) -> Document:
    """The config that `text` is. Raises ConfigUnreadable."""
    where = visible(str(path)) if path else "config"
    if len(text) > MOST_BYTES:
        raise ConfigUnreadable(f"{where}: must be at most 1 MiB; got more. A config is a few dozen lines.")
    try:
        value, lines = plain(text.removeprefix("\ufeff"))
    except TooMuch as problem:
        raise ConfigUnreadable(
            f"{where}:{problem.line}: {problem.sentence}" if problem.line else f"{where}: {problem.sentence}"
        ) from None
    except ReaderError as problem:
        raise ConfigUnreadable(_unprintable(where, text.removeprefix("\ufeff"), problem)) from None
    except MarkedYAMLError as problem:
        raise ConfigUnreadable(_sentence(where, text, problem)) from None
    except (YAMLError, ValueError) as problem:
        what = visible(str(problem).splitlines()[0] if str(problem) else type(problem).__name__)
        raise ConfigUnreadable(f"{where}: must be YAML; got {what}.") from None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigUnreadable(
            f"{where}: must be settings by section, such as `model:` and `data:`; got a {_kind(value)}. Start from a recipe: "
            "`workbench recipes` lists them."
        )
    return Document(text, value, lines, path)


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else "single value"


def _sentence(where: str, text: str, problem: MarkedYAMLError) -> str:
    """ruamel's problem as one sentence with line and column."""
    mark = problem.problem_mark or problem.context_mark
    place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    what = " ".join(str(problem.problem or problem.context or "it cannot be read").split())
    hint = "Check the indentation and the colons near there."
    if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in what:
        hint = "Indent with spaces, not with tabs."
    elif "mapping values are not allowed" in what:
        hint = "Put a space after the colon, and quote texts that hold a colon."
    what = what.replace("'<stream end>'", "the end of the file")
    return f"{place}: must be YAML, and cannot be read there: {visible(what)}. {hint}"


def _unprintable(where: str, text: str, problem: ReaderError) -> str:
    """A character that no YAML may hold, as one sentence with its line."""
    character = chr(problem.character) if isinstance(problem.character, int) else str(problem.character)[:1]
    line = text.count("\n", 0, problem.position) + 1
    code = f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
    return (
        f"{where}:{line}: must be text that can be printed; got the character {visible(character)}. "
        f"Remove it, or write it as {code} between double quotes."
    )


def parse_value(text: str) -> Any:
    """One value as YAML reads it: `1e-4`, `[0, 2]`, `null`; a text that is no YAML stays as it is."""
    try:
        value, _ = plain(text)
    except (TooMuch, YAMLError, ValueError):
        return text
    return value


def overrides(mapping: Mapping[str, Any], pairs: Iterable[str]) -> dict[str, Any]:
    """The mapping with `optim.learning_rate=1e-4` and the like written into it; the given one is not changed.

    Raises UsageError where a pair has no `=` or its path leads nowhere; unknown settings are left for `read` to find.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(mapping))
    for pair in pairs:
        put(changed, *parse_pair(pair))
    return changed


def parse_pair(pair: str) -> tuple[str, Any]:
    """Path and value of `optim.learning_rate=1e-4`. Raises UsageError for what is of another form."""
    path, equals, text = pair.partition("=")
    path = path.strip()
    if not equals or not re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", path):
        raise UsageError(f"{visible(pair)}: must be of the form section.setting=value, as in optim.learning_rate=1e-4.")
    return path, parse_value(text)


def put(mapping: dict[str, Any], path: str, value: Any) -> None:
    """Write one value at a dotted path; sections and entries on the way are made."""
    *parents, last = path.split(".")
    place: Any = mapping
    for part, following in zip(parents, [*parents, last][1:], strict=True):
        inner = _inside(place, part)
        if not isinstance(inner, (dict, list)) or (isinstance(inner, list) and not following.isdigit()):
            inner = [] if following.isdigit() and part in ("train", "eval", "prompts") else {}
            _store(place, part, inner)
        place = inner
    _store(place, last, value)


def _inside(place: Any, part: str) -> Any:
    if isinstance(place, dict):
        return place.get(part)
    index = int(part) if part.isdigit() else -1
    return place[index] if 0 <= index < len(place) else None


def _store(place: Any, part: str, value: Any) -> None:
    if isinstance(place, dict):
        place[part] = value
    elif part.isdigit() and int(part) < len(place):
        place[int(part)] = value
    elif part.isdigit():
        place.append(value)


def absolute(mapping: Mapping[str, Any], base: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping with its relative paths made absolute against `base`, the folder of its file.

    Hub names and `builtin/...` stay: a name is taken for a path when it starts with `.`, `~` or `/`, ends like a data
    file, or exists below `base`.
    """
    folder = Path(base).expanduser().absolute()
    changed: dict[str, Any] = copy.deepcopy(dict(mapping))
    for spec in fields:
        section = changed.get(spec.section)
        if not isinstance(section, dict) or spec.name not in section:
            continue
        if spec.control == "path":
            section[spec.name] = _absolute(spec, section[spec.name], folder)
        elif spec.control == "sources":
            section[spec.name] = _absolute_sources(section[spec.name], folder)
        elif spec is fields.method.reward_funcs:
            section[spec.name] = _absolute_rewards(section[spec.name], folder)
    return changed


def named_places(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(setting, text) of everything in a mapping that can name a file, a folder, an address or a model of the hub."""
    found: list[tuple[str, Any]] = []
    for spec in fields:
        section = mapping.get(spec.section)
        value = section.get(spec.name) if isinstance(section, Mapping) else None
        if spec.control == "path":
            found.append((spec.path, value))
        elif spec.control == "sources":
            for entry in value if isinstance(value, list) else [value]:
                named = [entry.get(key) for key in ("path", "chat_template")] if isinstance(entry, Mapping) else [entry]
                found += [(spec.path, each) for each in named]
        elif spec is fields.method.reward_funcs:
            found += [(spec.path, each) for each in _named_by_rewards(value)]
    return [(path, text) for path, text in found if isinstance(text, str) and text.strip()]


def _named_by_rewards(value: Any) -> list[str]:
    """The files and models that reward functions name."""
    found = []
    for text in value if isinstance(value, list) else [value]:
        with contextlib.suppress(BadReward):
            if isinstance(text, str) and (spec := reward_spec(text)).kind in ("function", "model", "json_schema"):
                found.append(spec.argument)
    return found


def placed(facts: Facts, base: str | os.PathLike[str]) -> Facts:
    """The same facts under the names that `absolute` gives: what was looked up as `./rows.jsonl` is known by its place.

    Without it a config whose paths were made absolute would not be recognised as the one that was looked at.
    """
    folder = Path(base).expanduser().absolute()
    model, sources = facts.model, facts.sources
    if model is not None:
        model = replace(model, name=place_of(model.name, folder))
    tokenizer = facts.tokenizer
    if tokenizer is not None:
        tokenizer = replace(tokenizer, name=place_of(tokenizer.name, folder))
    if sources is not None:
        sources = {
            place_of(path, folder): replace(source_facts, path=place_of(path, folder))
            for path, source_facts in sources.items()
        }
    adapter = facts.adapter
    if adapter is not None:
        adapter = replace(adapter, path=_place_on_disk(adapter.path, folder))
    files = facts.files
    if files is not None:
        files = {**files, **{place_of(path, folder): there for path, there in files.items()}}
    return replace(facts, model=model, tokenizer=tokenizer, sources=sources, files=files, adapter=adapter)


def _absolute_sources(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return [{"path": place_of(value, folder)}]
    for entry in [value] if isinstance(value, dict) else value if isinstance(value, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            entry["path"] = place_of(entry["path"], folder)
        if isinstance(entry, dict) and isinstance(entry.get("chat_template"), str):
            entry["chat_template"] = place_of(entry["chat_template"], folder)
    if isinstance(value, list):
        return [{"path": place_of(entry, folder)} if isinstance(entry, str) else entry for entry in value]
    return value


def _absolute_rewards(value: Any, folder: Path) -> Any:
    if not isinstance(value, (str, list)):
        return value

    def place(name: str) -> str:
        # A file of functions is always one, also while it is not there yet.
        return os.path.normpath(folder / os.path.expanduser(name)) if name.endswith(".py") else place_of(name, folder)

    texts = [value] if isinstance(value, str) else value
    return [with_path(text, place) if isinstance(text, str) else text for text in texts]


def _absolute(spec: FieldSpec, value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    if spec.section in ("run", "data", "adapter"):  # never a hub name
        return _place_on_disk(value, folder)
    return place_of(value, folder)


def _place_on_disk(path: str, folder: Path) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))


REMOTE = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oci": "ocifs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""How the address of rows that lie elsewhere begins, and the package that fetches them."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(path: str) -> str:
    """How an address begins, in lower case: `s3` of `s3://bucket/rows.jsonl`; empty for a path or a name."""
    match = _ADDRESS.match(path)
    return match[1].lower() if match else ""


def short_path(path: str) -> str:
    """A path by its last two parts when it is long; relative to the working directory when inside it."""
    if not os.path.isabs(path):
        return path
    near = os.path.relpath(path)
    if not near.startswith(".."):
        return near
    return path if len(path) <= 24 else "…/" + "/".join(path.rstrip("/").split("/")[-2:])


def place_of(name: str, folder: Path) -> str:
    """An absolute path where `name` is a path, and `name` itself where it is a hub name or built in."""
    if name.startswith("builtin/") or not name.strip() or "://" in name or "\0" in name:
        return name
    looks_local = name.startswith((".", "~", "/")) or name.lower().endswith((*DATA_SUFFIXES, ".jinja", ".j2"))
    there = folder / os.path.expanduser(name)
    try:
        if looks_local or there.exists():
            return os.path.normpath(there)
    except OSError:
        return name
    return name


def as_mapping(config: RunConfig) -> dict[str, Any]:
    """The config as a plain mapping, complete, in the order of the schema, without settings of other kinds."""
    mapping: dict[str, Any] = {"version": config.version}
    for spec in fields_of(config):
        value = spec.value(config)
        if spec.control == "sources":
            value = [entry.model_dump() for entry in value]
        mapping.setdefault(spec.section, {})[spec.name] = copy.deepcopy(value)
    return mapping


def dump(config: RunConfig) -> str:
    """The complete config as YAML; resolve it first where no `auto` may be left."""
    return as_yaml(as_mapping(config))


def as_yaml(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Plain values as block YAML, in the order given."""
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # ruamel infers None from its default
    writer.allow_unicode = True
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    writer.dump(value, out)
    return out.getvalue()
