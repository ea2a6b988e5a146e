"""What a config asks of its data, in one value: sources opened and detected, template chosen, limits.

The only place in this package that reads the config; everything behind it takes a `Plan`. A template is the tokenizer's
own, one of ours by name (`engine/data/templates`), one of the tokenizer's named ones, a file, or `none`.
"""

from __future__ import annotations

import random
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.files import scheme_of
from engine.config.kinds import BUILTIN_ROWS, LANGUAGE_FORMATS, NEEDS, SYNTHETIC, example_row
from engine.config.method import METHODS, learns_from_images, seeing_methods
from engine.config.tree import RunConfig
from engine.data.cache_entries import Progress
from engine.data.detect import Detection, detect
from engine.data.formats import read_example
from engine.data.hub_fetch import hub_rows
from engine.data.hub_sets import is_hub_set, rows_by_parts
from engine.data.image_references import folder_of, references
from engine.data.mapped import CountedRows, Rows
from engine.data.parsing import Row
from engine.data.parts import Example, FormatError, columns_of
from engine.data.rows import open_rows, refuse_special
from engine.errors import DataError, WorkbenchError, nearest, visible

_AGAIN = "Start again once nothing writes to it."
TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class Source:
    """One entry under data.train or data.eval, opened."""

    path: str
    rows: Rows
    detection: Detection
    weight: float = 1.0
    limit: int | None = None
    split: str | None = None
    template: str | None = None
    """The chat template of its rows by the name in the config, where that is not the run's."""
    ranking_pairs: str = "best_worst"
    """Which pairs its rankings give."""
    stamp: tuple[int, int, int] | None = None
    """Size, date and number of its file when it was opened."""

    @property
    def file(self) -> str:
        """What is read: the path itself, or the copy of what lies elsewhere."""
        return str(self.rows.copy.file) if self.rows.copy is not None else self.path

    def refuse_changed(self) -> None:
        """Raises `DataError` where the file is no longer the one that was opened: its rows would be of two files."""
        if self.stamp is None:
            return
        now, shown = stamp_of(self.file), visible(self.path)
        if now is None:
            raise DataError("is gone: it was removed or renamed while its rows were read", _AGAIN, path=shown)
        if now != self.stamp:
            sizes = f"from {self.stamp[0]:,} to {now[0]:,} bytes, " if now[0] != self.stamp[0] else ""
            raise DataError(f"changed {sizes}while its rows were read", _AGAIN, path=shown)

    def count(self) -> int:
        return len(self.rows) if self.limit is None else min(self.limit, len(self.rows))


@dataclass
class Plan:
    method: str
    split: str
    sources: list[Source]
    template: str | None
    template_name: str
    template_kwargs: Mapping[str, Any]
    trained_turns: str
    trained_thinking: bool
    max_length: int
    excess_length: str
    truncation_side: str
    packing: bool
    separate: bool
    on_bad_row: str
    seed: int
    prepared_path: str | None
    image_base_dir: str | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    count_all: bool = False
    """Whether a row that cannot be read is counted, and refused with all others at the end."""
    bases: tuple[int, ...] = ()
    """The number of the first row of each source, where that does not come of counting those before."""
    val_set_size: float | None = None
    """How many rows, or which share, are held out of the sources; the split says which side these rows are."""
    held: frozenset[tuple[int, int]] | None = None
    """(source, row) of those held out, once `engine.data.held_out` has drawn them."""
    deduplicate: str | None = None
    """How rows are compared that are to be left out where an earlier one says the same; None leaves none out."""
    duplicates: dict[tuple[int, int], int] | None = None
    """(source, row) of those left out, with the number of the earlier row, once `engine.data.duplicates` has looked."""
    known: tuple[str, list[str]] | None = None
    """Fingerprint and warnings of the data, once a preview has found them: they are the same for each of its rows."""

    def example(self, number: int, index: int) -> tuple[Example, Row]:
        """What a row says, its images as references, and the row without their column. Raises `WorkbenchError` without its place."""
        source = self.sources[number]
        row = source.rows[index]
        example = read_example(row, source.detection.format or "", source.detection.columns)
        example.template, example.ranking_pairs = source.template, source.ranking_pairs
        if example.images:
            if not learns_from_images(self.method):
                raise FormatError(
                    f"the row has images, which method {self.method} does not learn from yet",
                    f"Choose method {seeing_methods(self.method)}, or rows of text.",
                )
            if self.packing:
                raise FormatError(
                    "the row has images, and rows with images are not packed", "Set data.packing to false."
                )
            example.images = references(example.images, folder_of(source.path, self.image_base_dir))
            column = source.detection.columns.get("images", "images")
            row = {name: value for name, value in row.items() if name != column}
        return example, row

    def refuse_changed(self) -> None:
        """Raises `DataError` for the first file that is no longer as it was opened."""
        for source in self.sources:
            source.refuse_changed()

    def order(self) -> list[tuple[int, int]]:
        """(source, row) of all that this split prepares; of rows held out each stands there once."""
        order = self.everything()
        if self.val_set_size is None:
            return order
        assert self.held is not None, "hold_out comes before the order of rows"
        return sorted(self.held) if self.split == "eval" else [place for place in order if place not in self.held]

    def everything(self) -> list[tuple[int, int]]:
        """(source, row) of all sources: weight 2 gives rows twice, 0.5 a seeded random half, in file order."""
        order: list[tuple[int, int]] = []
        for number, source in enumerate(self.sources):
            count = source.count()
            whole = int(source.weight)
            part = round(count * (source.weight - whole))
            picked = sorted(random.Random(f"{self.seed}/{number}").sample(range(count), part)) if part else []
            order += [(number, index) for _ in range(whole) for index in range(count)]
            order += [(number, index) for index in picked]
        return [place for place in order if place not in self.duplicates] if self.duplicates else order

    def beginning(self) -> Iterator[tuple[int, int]]:
        """The same order, lazily: nothing is counted through while the first source has room."""
        if self.sources and self.sources[0].weight >= 1 and self.val_set_size is None and not self.duplicates:
            first = self.sources[0]
            for index in range(first.limit or 1 << 62):
                known = first.rows.length
                if known is not None and index >= known:
                    break
                yield 0, index
            return
        yield from self.order()

    @property
    def reads_columns(self) -> bool:
        """Whether all columns of a row count: rewards are given those that no format names."""
        return METHODS[self.method].rows == "prompts"

    @property
    def named(self) -> str:
        """The setting that names these rows."""
        return "data.val_set_size" if self.val_set_size is not None and self.split == "eval" else f"data.{self.split}"

    def base(self, which: int) -> int:
        """The number of the first row of a source when all rows before it are counted through."""
        if self.bases:
            return self.bases[which]
        return sum(source.count() for source in self.sources[:which])


def plan_of(
    config: RunConfig,
    processing_class: Any,
    split: str,
    on_progress: Progress | None = None,
    *,
    open_all: bool = True,
    tolerant: bool = False,
) -> Plan:
    """The plan of one split. Raises `DataError` when a source cannot be opened or its format told; `tolerant` opens one
    in which some rows are bad whatever the config says about them. `on_progress` hears of what is fetched."""
    data, method = config.data, config.method.kind
    template, name = template_of(config, processing_class)
    _check_kwargs(config.model.chat_template_kwargs, template, name)
    held_out = None if data.streaming or data.eval else data.val_set_size or None
    entries = list(data.train if split == "train" or held_out is not None else data.eval)
    plan = Plan(
        method=method,
        split=split,
        sources=[],
        template=template,
        template_name=name,
        template_kwargs=dict(config.model.chat_template_kwargs),
        trained_turns="all" if method == "pretrain" else data.trained_turns,
        trained_thinking=data.trained_thinking,
        max_length=data.max_length,
        excess_length=data.excess_length,
        truncation_side=data.truncation_side,
        packing=data.packing and METHODS[method].rows == "language",
        separate=data.packing_cross_doc_attn_mask,
        on_bad_row=data.on_bad_row,
        seed=config.run.seed,
        prepared_path=data.dataset_prepared_path,
        image_base_dir=data.image_base_dir,
        entries=[entry.model_dump() for entry in entries],
        val_set_size=held_out,
        deduplicate=data.deduplicate,
    )
    if open_all:
        policy = "skip" if tolerant else data.on_bad_row
        of = "train" if held_out is not None else split
        plan.sources = [
            open_source(entry, of, config.run.seed, policy, on_progress, by_parts=data.streaming) for entry in entries
        ]
        for source in plan.sources:
            check_fit(source, method)
    return plan


def _check_kwargs(kwargs: Mapping[str, Any], template: str | None, name: str) -> None:
    """A value that the template never names would change nothing, and a misspelt one is such."""
    words = set(re.findall(r"[A-Za-z_]\w*", template or ""))
    for key in kwargs:
        if template is not None and key not in words:
            near = nearest(str(key), words)
            raise DataError(
                f"model.chat_template_kwargs.{visible(str(key))}: {name} has no such value, so it would change nothing.",
                f"Did you mean {visible(near)}?" if near else "Leave it out, or take a template that uses it.",
            )


def open_source(
    entry: Any,
    split: str = "train",
    seed: int = 0,
    on_bad_row: str = "error",
    on_progress: Progress | None = None,
    *,
    by_parts: bool = False,
) -> Source:
    """Open one entry and tell its format. Raises `DataError` for one that cannot be used."""
    stamp = stamp_of(entry.path)
    rows = source_rows(entry.path, entry.split, split, seed, on_progress, entry.model_dump(), by_parts=by_parts)
    columns = columns_of(entry.columns, entry.properties, entry.roles)
    detection = detect(rows, columns, "synthetic" if entry.path == SYNTHETIC else entry.format)
    refuse_problems(entry.path, detection, on_bad_row)
    return Source(
        entry.path, rows, detection, entry.weight, entry.rows, entry.split, template=entry.chat_template,
        ranking_pairs=entry.ranking_pairs, stamp=stamp,
    )  # fmt: skip


def refuse_problems(path: str, detection: Detection, on_bad_row: str) -> None:
    """Raises `DataError` where no row of a source can be read, or one cannot and that is to end everything."""
    hopeless = detection.format is None or (detection.bad and detection.bad >= detection.looked)
    if hopeless or (detection.problems and on_bad_row == "error"):
        raise DataError(detection.problems[0], path="" if visible(path) in detection.problems[0] else visible(path))


def stamp_of(path: str) -> tuple[int, int, int] | None:
    """Size, date and number of a file; None for what is no file on this machine."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def source_rows(
    path: str,
    own_split: str | None = None,
    split: str = "train",
    seed: int = 0,
    on_progress: Progress | None = None,
    source: Mapping[str, Any] | None = None,
    *,
    by_parts: bool = False,
) -> Rows:
    """Rows of a file, here or elsewhere, a saved data set, a built-in one, which `source` may give its size, or a data set on
    the hub, of which what is needed is fetched first unless it can be read `by_parts`."""
    if path in BUILTIN_ROWS:
        from engine.builtin import GENERATED

        wanted = own_split or ("train" if split == "train" else "eval")
        made = GENERATED[path].of(source or {}, wanted, seed)
        return ListRows(path, made, content=repr(made) if GENERATED[path].sized else "")
    if path.startswith("builtin/"):
        raise DataError(f"no such built-in data set; there are {' and '.join(BUILTIN_ROWS)}", path=visible(path))
    if scheme_of(path):
        from engine.data.remote import local_copy

        copy = local_copy(path, on_progress)
        rows = open_rows(copy.file)
        rows.path, rows.copy = path, copy
        return rows
    local = Path(path)
    if local.is_dir() and ((local / "state.json").exists() or (local / "dataset_dict.json").exists()):
        from engine.data.columnar import SavedRows

        return SavedRows(path, split=own_split or (None if split == "train" else "test"))
    if is_hub_set(path):
        about = source or {}
        wanted = own_split or ("train" if split == "train" else "test")
        on_hub = about.get("subset"), about.get("revision")
        if by_parts and (parts := rows_by_parts(path, wanted, *on_hub)) is not None:
            return parts
        return hub_rows(path, wanted, *on_hub, about.get("rows"), on_progress)
    return open_rows(path)


class ListRows(CountedRows):
    """Rows that are already here, or made as they are asked for: generated ones."""

    kind = "generated"

    def __init__(self, path: str, rows: Sequence[Any], content: str = "") -> None:
        self.path, self._rows = path, rows
        self.content = content
        """All that decides which rows these are, where that can be told without reading them."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def error(self, index: int, message: str, hint: str = "") -> DataError:
        return DataError(f"row {index}: {message}", hint, path=self.path)


def nothing_named(split: str) -> DataError:
    """That a split has no rows, and how it gets some."""
    share = " or let data.val_set_size hold out a part of the training rows" if split == "eval" else ""
    return DataError(f"data.{split} names no rows", f"Add a source with its path{',' if share else ''}{share}.")


def template_of(config: RunConfig, processing_class: Any) -> tuple[str | None, str]:
    """The chat template's text and a name for it in messages; no text where there is none."""
    return named_template(config.model.chat_template, processing_class)


def named_template(
    wanted: str | None, processing_class: Any, setting: str = "model.chat_template"
) -> tuple[str | None, str]:
    """The text of the template that a setting names, the processing class's own where it names none, and its name."""
    if not wanted:
        return own_template(processing_class)
    own = _own_templates(processing_class)
    if wanted == "none":
        return None, "none"
    shown = f"the chat template {visible(str(wanted))}"
    if isinstance(own, dict) and wanted in own:
        return own[wanted], shown
    if "/" not in wanted and (TEMPLATES / f"{wanted}.jinja").is_file():
        return (TEMPLATES / f"{wanted}.jinja").read_text("utf-8").rstrip("\n"), shown
    file = Path(wanted)
    # A name is made absolute like a file when the config is read; its last part is still the name.
    if not file.is_file() and file.is_absolute() and (TEMPLATES / f"{file.name}.jinja").is_file():
        return (TEMPLATES / f"{file.name}.jinja").read_text("utf-8").rstrip("\n"), f"the chat template {file.name}"
    try:
        refuse_special(file)
        return file.read_text("utf-8"), shown
    except (OSError, UnicodeDecodeError) as problem:
        known = [path.stem for path in sorted(TEMPLATES.glob("*.jinja"))]
        guess = nearest(file.name, known)
        hint = f"Did you mean {guess}?" if guess else f"Known names: {', '.join(known)}; or name a file."
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8"
        raise WorkbenchError(f"{setting}: {visible(wanted)} cannot be read ({reason})", hint) from None


def own_template(processing_class: Any) -> tuple[str | None, str]:
    """The chat template that the processing class brings, and a name for it; of several the default one."""
    own = _own_templates(processing_class)
    if isinstance(own, dict):
        own = own.get("default") or next(iter(own.values()))
    return own, "the tokenizer's chat template"


def _own_templates(processing_class: Any) -> Any:
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return getattr(processing_class, "chat_template", None) or getattr(tokenizer, "chat_template", None)


def use_template(config: RunConfig, processing_class: Any) -> None:
    """Give the processing class the chosen template, so that samples and the saved tokenizer speak the same."""
    text, _ = template_of(config, processing_class)
    if text is not None and config.model.chat_template:
        processing_class.chat_template = text
        if hasattr(processing_class, "tokenizer"):
            processing_class.tokenizer.chat_template = text


def check_fit(source: Source, method: str) -> None:
    """Raises `DataError` for rows of a kind that the method does not learn from."""
    section, found = METHODS[method], source.detection.format
    if found in section.formats or (section.rows == "language" and found in (*LANGUAGE_FORMATS, "text")):
        return
    takers = [kind for kind, other in METHODS.items() if found in other.formats]
    if section.rows == "language":
        holds = NEEDS[METHODS[takers[0]].rows]
        message = f"holds {holds}, which method {method} does not learn from"
        raise DataError(message, f"Choose method.kind {' or '.join(takers)}, or other data.", path=visible(source.path))
    raise DataError(
        f"method {method} needs {NEEDS[section.rows]}; found {source.detection.why}",
        f"Name the columns under columns, bring rows such as {example_row(section)}, or choose another method.",
        path=visible(source.path),
    )
