"""The tools: their tables, `take_over`, which reads one, and `export`, which writes ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bridge import axolotl, llamafactory, to_axolotl, to_trl, trl
from engine.bridge.detect import TITLES, detect
from engine.bridge.giving import Meaning, write_for
from engine.bridge.keys import File, Key, config_of, read_rows
from engine.bridge.ledger import Ledger
from engine.config.absent import other_file
from engine.config.data import DataSource
from engine.config.files import Document
from engine.config.method import METHODS
from engine.config.tree import SECTIONS, VERSION, RunConfig, fields
from engine.errors import UsageError, nearest, visible
from engine.figures import alternatives


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its name in commands and in sentences, and its table of keys."""

    name: str
    title: str
    keys: Mapping[str, Key]


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("axolotl", TITLES["axolotl"], axolotl.KEYS),
        Tool("llamafactory", TITLES["llamafactory"], llamafactory.KEYS),
        Tool("trl", TITLES["trl"], trl.KEYS),
    )
}


def tool_of(mapping: Mapping[str, Any]) -> Tool | None:
    """The tool whose config this is; nothing for one of ours, for what is no training, and where it is not clear."""
    name = detect(mapping)
    return TOOLS[name] if name is not None else None


def tool_named(name: str) -> Tool:
    """The tool of this name. Raises UsageError."""
    word = name.strip().lower().replace("-", "").replace("_", "")
    if word in TOOLS:
        return TOOLS[word]
    close = nearest(word, TOOLS)
    hint = f"Did you mean {close}?" if close else ""
    raise UsageError(f"{visible(name)}: must be {alternatives([*TOOLS])}.", hint)


def take_over(
    document: Document,
    tool: Tool | None = None,
    *,
    out: Path | None = None,
    method: str | None = None,
    lists: Path | None = None,
) -> Ledger:
    """The ledger of another tool's config, with the config that it makes for the folder `out` (else beside the file).

    `method` names the method where the file does not, `lists` the folder of LLaMA-Factory's list of data sets. Raises
    UsageError for a config of ours, for a file that is no training, and where the tool is not clear.
    """
    mapping, source = document.mapping, str(document.path or "config")
    shown = visible(source)
    if other := other_file(mapping):
        raise UsageError(f"{shown}: must be the config of a training; got one that describes {other[0]}.")
    if any(isinstance(mapping.get(name), Mapping) for name in SECTIONS if name not in ("data", "model")) or (
        "version" in mapping
    ):
        raise UsageError(
            f"{shown}: must be a config of another tool; this one is the workbench's own.",
            f"`workbench check {shown}` judges it.",
        )
    tool = tool or tool_of(mapping)
    if tool is None:
        raise UsageError(
            f"{shown}: it is not clear which tool this config is for.", f"Name it with --from {'|'.join(TOOLS)}."
        )
    if method is not None and method not in METHODS:
        close = nearest(method, METHODS)
        raise UsageError(
            f"{visible(method)}: must be a method: {', '.join(METHODS)}.", f"Did you mean {close}?" if close else ""
        )
    folder = document.path.absolute().parent if document.path is not None else Path.cwd()
    file = File(
        mapping,
        title=tool.title,
        folder=folder,
        out=(out or folder).absolute(),
        name=document.path.name if document.path is not None else "",
        method=method,
        lists=lists,
    )
    rows = read_rows(tool.keys, file)
    opening = f"Taken over from {Path(source).name}."
    return Ledger(tool.name, tool.title, Path(source).name, rows, {"version": VERSION, **config_of(rows)}, opening)


TARGETS: dict[str, Mapping[str, Meaning]] = {"axolotl": to_axolotl.TABLE, "trl": to_trl.TABLE}
"""The tools that our configs are written for."""


def export(
    config: RunConfig,
    target: str,
    *,
    source: str,
    folder: Path,
    out: Path | None = None,
    formats: Mapping[str, str] | None = None,
) -> Ledger:
    """The ledger of a config of ours written for another tool, whose file stands in `out` (else beside ours).

    `formats` says what was seen in sources that name no format. What the tool cannot say is in `refused(ledger)`; nothing
    may be written then.
    """
    seen = formats or {}

    def named(entry: DataSource) -> DataSource:
        return entry.model_copy(update={"format": entry.format or seen.get(entry.path)})

    rows = {spec: [*map(named, spec.value(config))] for spec in (fields.data.train, fields.data.eval)}
    config = config.with_values(rows)
    return write_for(target, TOOLS[target].title, TARGETS[target], config, source, folder, (out or folder).absolute())
