"""The files of a stream: every source that a config names with all its files, their formats, and how each is cut.

Files are opened when a shard of theirs is read, a few at a time, so a source of thousands of files takes no more room than
one of a few.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.files import COMPRESSIONS, scheme_of
from engine.config.kinds import BUILTIN_ROWS
from engine.config.method import METHODS
from engine.config.tree import RunConfig
from engine.data.cache import own_parts, tokens_parts
from engine.data.detect import detect
from engine.data.hub_sets import MANY, HubFile, RangeFile, hub_files, is_hub_set, is_part, kind_of, read_by_parts
from engine.data.mapped import CLIP, CountedRows, DerivedRows
from engine.data.parsing import Row
from engine.data.parts import columns_of
from engine.data.plan import Plan, Source, check_fit, plan_of, refuse_problems, source_rows, stamp_of
from engine.data.remote import Copy, local_copy
from engine.data.streaming.cuts import BYTES, FILE, PLACE, Cut, cut_far, cut_file, cut_rows
from engine.data.streaming.folders import paths_of
from engine.data.streaming.order import Lane
from engine.errors import DataError, visible

OPEN = 16
"""Files that are open at once."""
HEAD = 1 << 20
FOOTERS = MANY
"""Files of a data set on the hub up to which each is asked how many rows it has."""
LOOKED = 4
"""Files of a source, and shards of a file, that are looked at before training."""


@dataclass
class StreamFile:
    """One file or data set of a stream."""

    path: str
    entry: Any
    """The source in the config that it belongs to."""
    count: int | None = None
    units: Sequence[int] | None = None
    size: int = 0
    rows: int | None = None
    """Its rows, where their number is known at once."""
    copy: Copy | None = None
    """What is read in place of a file that lies elsewhere."""
    far: HubFile | None = None
    """The file on the hub that it is, read where it lies."""
    limit: int | None = None
    """So many of its first rows are taken; None where all are."""
    whole: bool = False
    """Whether it is a data set of the hub that is read whole since the hub does not answer."""
    makes: int | None = 1
    """Rows to learn from that each of its rows gives; None where they give as many as they hold answers."""


@dataclass
class Files:
    """All files of a stream in order. `cut` opens one."""

    split: str
    seed: int
    files: list[StreamFile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What whoever starts a run should know of how they are read."""
    _open: OrderedDict[int, Cut] = field(default_factory=OrderedDict)

    def cut(self, number: int) -> Cut:
        """The file's shards, opened now unless it is open."""
        if number not in self._open:
            while len(self._open) >= OPEN:
                self._open.popitem(last=False)[1].rows.close()
            file = self.files[number]
            self._open[number] = _cut(file, self.split, self.seed)
        self._open.move_to_end(number)
        self._drop_groups(self.files[number])
        return self._open[number]

    def _drop_groups(self, taken: StreamFile) -> None:
        """Leave of as many far files of a source something in memory as lanes read it: the row groups, or the blocks, of those
        used last."""
        if taken.far is None:
            return
        lanes = math.ceil(taken.entry.weight)
        for number, cut in reversed(self._open.items()):
            if self.files[number].entry is taken.entry:
                lanes -= 1
                if lanes < 0:
                    cut.rows.drop()

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].rows.close()

    def reopened(self) -> Files:
        """The same files, none of them open: for another process."""
        return Files(self.split, self.seed, self.files, self.warnings)

    def lanes(self) -> list[Lane]:
        """What an epoch reads of each source: as often as its weight says."""
        lanes: list[Lane] = []
        for members in self._by_entry():
            files = [self.files[number] for number in members]
            weight = files[0].entry.weight
            for copy in range(math.ceil(weight)):
                guess = max(1, sum(file.size for file in files) // BYTES)
                counts, units = tuple(file.count for file in files), tuple(file.units for file in files)
                lanes.append(Lane(len(lanes), members, counts, units, copy, min(1.0, weight - copy), guess))
        return lanes

    def rows(self) -> int | None:
        """Rows to learn from in an epoch before any is left out, which may take a pass over the files; None where some are not
        known."""
        total = 0.0
        for number, file in enumerate(self.files):
            length = file.rows
            if length is None and file.count is not None:
                length = self.cut(number).length()
            if length is None or file.makes is None:
                return None
            total += length * file.makes * file.entry.weight
        return round(total)

    def layout(self) -> str:
        """A digest of what a place in the stream is counted in: the files that lanes read, their shards and units. Local
        files count by their names, so that a folder may be moved."""
        told = [
            (
                [
                    file.far.url if file.far else Path(file.path).name
                    for file in map(self.files.__getitem__, lane.files)
                ],
                list(lane.counts),
                [None if unit is None else list(unit) for unit in lane.units],
            )
            for lane in self.lanes()
        ]
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()

    def without_hub(self) -> str:
        """The first data set of the hub that is read whole since the hub does not answer; empty where there is none."""
        return next((file.path for file in self.files if file.whole), "")

    def bases(self) -> tuple[int, ...]:
        """The number of each file's first row: counted through where all of them know their rows at once."""
        known = [file.rows for file in self.files if file.rows is not None]
        if len(known) < len(self.files):
            return tuple(PLACE + FILE * number for number in range(len(self.files)))
        return tuple(sum(known[:number]) for number in range(len(known)))

    def _by_entry(self) -> Iterator[tuple[int, ...]]:
        """The numbers of the files of each source."""
        begun = 0
        while begun < len(self.files):
            after = begun
            while after < len(self.files) and self.files[after].entry is self.files[begun].entry:
                after += 1
            yield tuple(range(begun, after))
            begun = after


class First(DerivedRows, CountedRows):
    """Rows of a few shards of a file by number, for whoever looks at some before all are read."""

    def __init__(self, cut: Cut, most: int = 1) -> None:
        self.path, self.kind, self.note, self._rows = cut.rows.path, cut.rows.kind, cut.rows.note, cut.rows
        self.copy = cut.rows.copy
        count = 1 if cut.count is None else min(most, cut.count)
        spread = [0] if cut.count is None else [place * cut.count // count for place in range(count)]
        self._places = cut.some_places(spread)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Row:
        return self._rows[self._places[index]]

    def _at(self, index: int) -> int:
        return self._places[index]

    def text(self, index: int, limit: int = CLIP) -> str:
        return self._rows.text(self._places[index], limit)


def streamed_plan(config: RunConfig, processing_class: Any, *, tolerant: bool = False) -> tuple[Plan, Files]:
    """The plan of streamed rows, a source for each file, and the files. Raises `DataError` for a source that cannot be
    opened or read. Rows of the plan's sources are there once a shard of theirs is."""
    plan = plan_of(config, processing_class, "train", open_all=False)
    policy = "skip" if tolerant else config.data.on_bad_row
    files = Files("train", config.run.seed)
    for entry in config.data.train:
        members, warning = _members(entry, files.split)
        files.warnings += [warning] if warning else []
        detection = rows = None
        unseen = _are_many(members)
        for file in members:
            stamp = stamp_of(file.path)
            if rows is None or detection is None or not unseen:
                cut = _cut(file, files.split, files.seed)
                rows = cut.rows
                if detection is None:
                    columns = columns_of(entry.columns, entry.properties, entry.roles)
                    detection = detect(First(cut), columns, entry.format)
                    refuse_problems(file.path, detection, policy)
                if not unseen:
                    file.count, file.units, file.rows = cut.count, cut.units, cut.known_rows
                rows.close()
            file.size, file.makes = _guessed_size(file), _makes(plan.method, detection.format, entry)
            files.files.append(file)
            plan.sources.append(
                Source(
                    file.path, rows, detection, split=entry.split, template=entry.chat_template,
                    ranking_pairs=entry.ranking_pairs, stamp=stamp,
                )
            )  # fmt: skip
        check_fit(plan.sources[-1], plan.method)
    plan.bases = files.bases()
    return plan, files


def _members(entry: Any, split: str) -> tuple[list[StreamFile], str]:
    """The files of a source, and a warning where they are one data set of the hub that is fetched whole. Raises `DataError`
    where they cannot be told, or its first rows are asked for and they are several."""
    if is_hub_set(entry.path):
        return _of_hub(entry, split)
    members = [StreamFile(path, entry, limit=entry.rows) for path in paths_of(entry.path)]
    for file in members:
        file.copy = local_copy(file.path) if scheme_of(file.path) else None
    if entry.rows is not None and len(members) > 1:
        raise DataError(
            "is a folder of several files, of which the first rows cannot be taken while they are streamed",
            "Name one of its files, or remove rows from this source.",
            path=visible(entry.path),
        )
    return members, ""


def _of_hub(entry: Any, split: str) -> tuple[list[StreamFile], str]:
    """`_members` of a data set of the hub."""
    far = None if is_part(entry.split) else hub_files(entry.path, entry.split or split, entry.subset, entry.revision)
    if far is not None and read_by_parts(far):
        if entry.rows is None or len(far) == 1:
            members = [StreamFile(file.url, entry, far=file, limit=entry.rows) for file in far]
            if not _are_many(members):
                _read_footers(far)
                members = _with_rows(entry, members)
            return members, ""
        if all(kind_of(file.url)[0] == ".parquet" for file in far):
            return _first_files(entry, far), ""
    without_hub = far is None and not is_part(entry.split)
    what = (
        f"the split {visible(entry.split)} is not one whole split" if is_part(entry.split)
        else "the hub does not answer, so it comes from the cache" if far is None
        else "only of Parquet it is known in which file the first rows end" if read_by_parts(far)
        else "its files are neither Parquet nor lines of JSON"
    )  # fmt: skip
    whole = StreamFile(entry.path, entry, limit=entry.rows, whole=without_hub)
    return [whole], f"{visible(entry.path)}: is read whole before training, not by parts: {what}"


def _with_rows(entry: Any, members: list[StreamFile]) -> list[StreamFile]:
    """The files that hold rows: what writes shards leaves empty Parquet files among them. Raises `DataError` where none does."""
    from engine.data.columnar import ParquetRows

    kept = [
        file
        for file in members
        if file.far is None
        or kind_of(file.far.url)[0] != ".parquet"
        or len(ParquetRows(file.path, RangeFile(file.far)))
    ]
    if not kept:
        raise DataError("the data set holds no rows", "Name another split or subset.", path=visible(entry.path))
    return kept


def _first_files(entry: Any, far: Sequence[HubFile]) -> list[StreamFile]:
    """The Parquet files that hold the first rows of a data set, the last one as far as it is taken."""
    from engine.data.columnar import TOGETHER, ParquetRows

    members: list[StreamFile] = []
    left = entry.rows
    for start in range(0, len(far), TOGETHER):
        some = far[start : start + TOGETHER]
        _read_footers(some)
        for file in some:
            if left > 0:
                limit = min(left, len(ParquetRows(file.url, RangeFile(file))))
                members += [StreamFile(file.url, entry, far=file, limit=limit)] if limit else []
                left -= limit
        if left <= 0:
            break
    return _with_rows(entry, members)


def _are_many(members: Sequence[StreamFile]) -> bool:
    """Whether files are so many, and each a request away, that their lengths are not asked for: each file is then read from its
    beginning to its end, the files in a mixed order."""
    return len(members) > FOOTERS and members[0].far is not None


def _read_footers(far: Sequence[HubFile]) -> None:
    """Ask for the footers of Parquet files side by side; they are kept for those who open the files."""
    from engine.data.columnar import FarRows

    files = {file.url: RangeFile(file) for file in far if file.url.lower().endswith(".parquet")}
    if len(files) > 1:
        FarRows(far[0].url, files)


def _makes(method: str, form: str | None, entry: Any) -> int | None:
    """Rows to learn from that a row of a source gives; None where that hangs on the row."""
    rows = METHODS[method].rows
    if rows == "rated" and form in ("preference", "ranking"):
        return 2  # its good answer, and its bad one
    return None if rows == "pairs" and form == "ranking" and entry.ranking_pairs != "best_worst" else 1


def looked_at_plan(config: RunConfig, processing_class: Any, *, tolerant: bool = False) -> Plan:
    """The plan of a look at streamed rows: some shards of some files of each source, spread over it."""
    plan, files = streamed_plan(config, processing_class, tolerant=tolerant)
    chosen: list[Source] = []
    for members in files._by_entry():
        count = min(LOOKED, len(members))
        for number in (members[place * len(members) // count] for place in range(count)):
            source = plan.sources[number]
            file = files.files[number]
            source.rows = First(_cut(file, "train", files.seed), LOOKED)
            source.weight = 1.0
            chosen.append(source)
    plan.sources, plan.bases = chosen, ()
    return plan


def stream_parts(plan: Plan, files: Files, processing_class: Any) -> dict[str, Any]:
    """All that decides what the shards of a stream hold: what makes tokens of a row, and the files by size, date, beginning
    and end. Their weights, seed and order decide only how shards are read."""
    content = [
        {
            "content": _content(source, file, files.seed),
            "format": source.detection.format,
            "columns": dict(source.detection.columns),
            "limit": file.limit,
            "split": file.entry.split,
            **own_parts(source, processing_class),
        }
        for source, file in zip(plan.sources, files.files, strict=True)
    ]
    return {**tokens_parts(plan, processing_class), "stream": BYTES, "sources": content}


def _cut(file: StreamFile, split: str, seed: int) -> Cut:
    path, entry = file.path, file.entry
    if file.far is not None:
        return cut_far(file.far, file.limit)
    if file.copy is not None:
        cut = cut_file(str(file.copy.file), file.limit)
        cut.rows.path, cut.rows.copy = path, file.copy
        return cut
    if Path(path).is_file():
        return cut_file(path, file.limit)
    return cut_rows(source_rows(path, entry.split, split, seed, source=entry.model_dump()), file.limit)


def _guessed_size(file: StreamFile) -> int:
    """Bytes that a file has when it is unpacked, for a guess of its shards."""
    path = str(file.copy.file) if file.copy else file.path
    found = (file.far.size,) if file.far is not None else stamp_of(path)
    packed = Path(path).suffix.lower() in COMPRESSIONS
    return (found[0] * (4 if packed else 1)) if found else BYTES


def _content(source: Source, file: StreamFile, seed: int) -> str:
    """What tells a file from another version of it, at once whatever its size."""
    if file.copy is not None:
        return file.copy.version
    if file.far is not None:
        return file.far.url  # its commit is in it
    if source.stamp is None:
        dataset = getattr(source.rows, "_dataset", None)
        if dataset is not None:
            return str(dataset._fingerprint)
        if source.path in BUILTIN_ROWS:
            entry = file.entry
            return repr((source.path, entry.split, seed, entry.tokens, entry.min_tokens))
        return repr((source.path, file.count))
    size, date, _ = source.stamp
    digest = hashlib.blake2b(f"{size} {date}".encode())
    with Path(source.path).open("rb") as opened:
        for start in (0, max(size - HEAD, 0)):
            opened.seek(start)
            digest.update(opened.read(HEAD))
    return digest.hexdigest()
