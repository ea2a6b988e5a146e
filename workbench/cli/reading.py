"""What commands that take a config need to know: overrides, facts, the disk forecast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.facts import DataFacts, Facts
from engine.config.files import Document, absolute, load, overrides, parse_value, place_of, put
from engine.errors import UsageError, WorkbenchError, visible
from workbench.calling import file_name

if TYPE_CHECKING:
    from engine.config.tree import RunConfig
    from engine.planning.estimate import Estimate

Ask = Callable[..., Any]
"""A question to the inspector, `ask(do, **params)`, that waits for the answer. Raises WorkbenchError."""

# What is given beside the file takes the place of the file's other way to say how long a run is.
_LENGTHS = ("optim.max_steps", "optim.num_train_epochs")


def load_own(file: Path) -> Document:
    """A config of the workbench. Raises UsageError for one of another tool, whose every key would be an error."""
    from engine.bridge.detect import TITLES, detect

    document = load(file)
    if (tool := detect(document.mapping)) is not None:
        raise UsageError(
            f"{visible(str(file))}: must be a config of the workbench; it is one of {TITLES[tool]}.",
            import_way(file, tool),
        )
    return document


def import_way(file: Path, tool: str) -> str:
    """How a config of another tool is taken over."""
    return f"`workbench import {file_name(file)} --from {tool} -o my.yaml` takes it over as a new one, with a ledger of every key."


def with_overrides(mapping: Mapping[str, Any], base: Path, pairs: Iterable[str]) -> dict[str, Any]:
    """The mapping with absolute paths: the file's own against its folder, the overrides' against the working directory."""
    complete = absolute(mapping, base)
    here, pairs = Path.cwd(), tuple(pairs)
    _leave_other_length(complete, pairs)
    for pair in pairs:
        put(complete, *placed_override(pair, here))
    return complete


def _leave_other_length(complete: dict[str, Any], pairs: tuple[str, ...]) -> None:
    lengths = [path for path in _LENGTHS if path in {pair.partition("=")[0].strip() for pair in pairs}]
    if len(lengths) == 1 and isinstance(complete.get("optim"), dict):
        complete["optim"].pop(next(path for path in _LENGTHS if path not in lengths).partition(".")[2], None)


def placed_override(pair: str, here: Path | None = None) -> tuple[str, Any]:
    """The setting and the value of a KEY=VALUE, a path in it taken from the working directory. Raises UsageError."""
    here = here or Path.cwd()
    written = overrides({}, [pair])  # says what is wrong with its form
    path, _, text = pair.partition("=")
    parts = path.strip().split(".")
    if len(parts) == 2:
        section, name = parts
        return path.strip(), absolute(written, here)[section][name]
    value = parse_value(text)
    if parts[-1] == "path" and isinstance(value, str):
        value = place_of(value, here)
    return path.strip(), value


def read_with(document: Document, pairs: Iterable[str]) -> tuple[dict[str, Any], dict[str, int | None]]:
    """The mapping of a file with overrides, and the line of each place; what was overridden stands in no line.

    Paths of the file are as they stand there, so that messages name them so; those of overrides are from the working directory.
    """
    lines: dict[str, int | None] = dict(document.lines)
    given = tuple(pairs)
    if not given:
        return document.mapping, lines
    complete = copy.deepcopy(dict(document.mapping))
    _leave_other_length(complete, given)
    here = Path.cwd()
    for pair in given:
        put(complete, *placed_override(pair, here))
        path = pair.partition("=")[0].strip()
        lines = {place: line for place, line in lines.items() if not place.startswith(f"{path}.")} | {path: None}
    return complete, lines


def facts_for(mapping: Mapping[str, Any], runs: str | None = None) -> Facts:
    """What is known without loading anything: this machine, the model's own files, a look at each source; `runs` is the folder
    of runs that the command names."""
    from engine.data.gather_facts import gather_facts
    from engine.rules import read

    return gather_facts(read(mapping).config, runs=runs)


def beside_the_file(file: Path, beside: RunConfig, facts: Facts) -> tuple[Estimate, Estimate]:
    """The estimate of a file without the settings `beside` it, and that with them, to be compared: by what is known of this machine
    and of the rows of each, or of neither, where those of one alone were counted."""
    from engine.data.gather_facts import gather_facts
    from engine.planning.estimate import estimate
    from engine.rules import read

    base = file.resolve().parent
    config = read(with_overrides(load(file).mapping, base, ())).config
    own = gather_facts(config, base)
    # Counts that were made under other limits say of themselves what they do not hold for, but not that they are of other rows.
    data = own.data or (facts.data if config.data.train == beside.data.train else None)
    if data is None:
        facts = replace(facts, data=None)
    elif facts.data is None:
        data = None
    return estimate(config, replace(own, machine=facts.machine, data=data)), estimate(beside, facts)


def asking(*, quiet: bool) -> Ask:
    """Questions to an inspector of their own; its progress is shown meanwhile where a person looks."""
    from engine.client import ask_once
    from workbench.cli.output import on_stderr

    return partial(ask_once, on_progress=None if quiet else on_stderr)


def counts(
    mapping: Mapping[str, Any], base: Path, ask: Ask, *, sample: int | None = None
) -> tuple[DataFacts | None, str]:
    """What the inspector counts over the prepared rows, or over `sample` of them; or the sentence why it cannot."""
    try:
        facts = ask("data", config=mapping, base=str(base), sample=sample)
    except WorkbenchError as problem:
        return None, problem.full_message
    return DataFacts.counted_from(facts), ""
