"""Rows read while training, from shards that a process of their own prepares: in an order that the seed decides, from any
place in it, with nothing read again.

The place of a stream is an epoch, how far each source has been read in it, and a row of the shard there. The first process
of a machine has the shards prepared; the others find them in the same folder.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from engine.config.facts import DataFacts, Facts, counting_limits
from engine.config.tree import RunConfig, fields
from engine.data.cache import Store, about, digest_of
from engine.data.counting import SAMPLE
from engine.data.packing import best_fit, joined
from engine.data.plan import Plan, use_template
from engine.data.prepare import FIXED_ROWS, Prepared, fingerprint
from engine.data.prepared_rows import SHAPES, Row, shape_of
from engine.data.row_counts import NAMED, Counts, nothing_left, too_long_error
from engine.data.streaming.files import Files, stream_parts, streamed_plan
from engine.data.streaming.order import Pick, Walk, generator
from engine.data.streaming.producer import Producer
from engine.data.streaming.shards import Key, Note, ShardFolder, ShardMaker
from engine.data.token_rows import token_rows
from engine.data.tokens import Tokens
from engine.errors import DataError, visible
from engine.facts.counts import total_steps
from engine.run.data_record import RowHashes

STALLED = 120.0
"""Seconds without a word from the process that prepares, after which a source is taken not to answer."""
GIB = 1 << 30


class Left:
    """What was counted of the shards that were read."""

    def __init__(self) -> None:
        self.counts = Counts()

    def add(self, found: dict[str, Any]) -> None:
        """Count a shard."""
        for name in (
            "read",
            "kept",
            "bad",
            "too_long",
            "dropped",
            "truncated",
            "split",
            "masked",
            "identical",
            "packs",
        ):
            setattr(self.counts, name, getattr(self.counts, name) + found[name])
        self.counts.bad_row = self.counts.bad_row or found["bad_row"]
        self.counts.bad_rows += found["bad_rows"][: NAMED - len(self.counts.bad_rows)]
        for what, place in found["first_at"].items():
            self.counts.first_at.setdefault(what, place)
        for name, (number, place) in found["template_flaws"].items():
            before, first = self.counts.template_flaws.get(name, (0, place))
            self.counts.template_flaws[name] = (before + number, first)
        self.counts.notes = sorted({*self.counts.notes, *found["notes"]})

    def sentences(self) -> list[str]:
        """What became of the rows that were read, the bad ones with their places."""
        said = self.counts.sentences()
        if self.counts.bad:
            said[0] += f": {'; '.join(self.counts.bad_rows)}" + ("; ..." if self.counts.bad > NAMED else "")
        return said


class Stream:
    """The rows of `data.train` in order, from where it stands. `next_row` gives None once all epochs are over."""

    def __init__(
        self, walk: Walk, folder: ShardFolder, epochs: int | None, check: Callable[[list[Row]], None] | None = None
    ) -> None:
        self.walk, self.folder, self.epochs = walk, folder, epochs
        self.check = check
        """Given the rows of each shard before they are trained on."""
        self.left = Left()
        self.producer: Producer | None = None
        self.layout = ""
        """A digest of what places are counted in (`Files.layout`)."""
        self.without_hub = ""
        """The data set that is read whole since the hub does not answer."""
        self.accepted = False
        """Whether a person has accepted that the rows are other ones."""
        self.batch = 0
        """Counted up by whoever reads, to say what was read when."""
        self.keep = 1
        """For so many batches a shard that was read is kept, since other processes may be behind."""
        self._held: deque[tuple[int, Key]] = deque()
        self._begun = walk.state()
        self._rows: list[Row] = []
        self._row = 0
        self._skip = 0
        """The row of the next shard to go on with."""
        self._gave = False
        """Whether the epoch gave a row, as far as is known: of one that was gone into in its middle nobody knows."""
        self._counted = walk.epoch
        """The epoch whose rows are counted: each once, however often it is read."""
        self._share = 0.0
        """How much of the epoch lies before the shard that is read."""

    # -- its place -----------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """The place behind the row that was read last, as plain numbers and the layout that they are of."""
        return {**self._begun, "row": self._row, "layout": self.layout}

    def go_to(self, state: dict[str, Any]) -> None:
        """Go on behind the row that was read last when `state` was taken. Raises `DataError` where that was of other files, or
        the same ones cut otherwise; states of before do not say."""
        if state.get("layout", self.layout) != self.layout:
            self._refuse_layout()
        self.walk.go_to(state)
        self._begun, self._rows, self._row = self.walk.state(), [], int(state["row"])
        self._skip = self._row
        self._gave, self._counted = True, self.walk.epoch
        self._update_producer()

    def _refuse_layout(self) -> None:
        if self.without_hub:
            raise DataError(
                "the hub does not answer, and the rows of this run are read there",
                "Resume it where the hub answers.",
                path=visible(self.without_hub),
            )
        if not self.accepted:
            raise DataError(
                "data.train: the place of this stream is one in other files, or in shards that are cut otherwise",
                "Put back the files and settings of data.train that the run began with, or start a new run.",
            )

    def begin_epoch(self) -> None:
        """Go back to the beginning of the epoch."""
        self.walk.begin(self.walk.epoch)
        self.go_to({**self.walk.state(), "row": 0})

    @property
    def epoch(self) -> float:
        """Epochs read so far; about, where the length of a source is not known."""
        if not self._rows:
            return self.walk.epoch + self.walk.share()
        return self.walk.epoch + self._share + (self.walk.share() - self._share) * self._row / len(self._rows)

    @property
    def epochs_over(self) -> int:
        """Epochs of which every row was read."""
        return self.walk.epoch + (bool(self._rows) and self._row >= len(self._rows) and self.walk.next() is None)

    @property
    def over(self) -> bool:
        """Whether every row of all epochs was read."""
        return self.epochs is not None and self.epochs_over >= self.epochs

    # -- rows ----------------------------------------------------------------------------------------------------------
    def next_row(self) -> Row | None:
        """The next row; None at the end. Raises WorkbenchError for a shard that cannot be prepared."""
        while self._row >= len(self._rows):
            if not self._next_shard():
                return None
        self._row, self._gave = self._row + 1, True
        return self._rows[self._row - 1]

    def _next_shard(self) -> bool:
        """Takes up the next shard; False where all epochs are over."""
        pick = self.walk.next()
        if pick is None:
            if not self._gave:
                kept = "a weight below 1 leaves none of so few rows" if self.left.counts.kept else ""
                reasons = "; ".join(filter(None, (kept, *self.left.sentences())))
                raise nothing_left("data.train", reasons or "no rows were read")
            if self.epochs is not None and self.walk.epoch + 1 >= self.epochs:
                return False
            self.walk.begin(self.walk.epoch + 1)
            self._gave, pick = False, self.walk.next()
            assert pick is not None
        self._begun, self._row, self._share = self.walk.state(), self._skip, self.walk.share()
        self._skip = 0
        key = (pick.file, pick.shard)
        self._held.append((self.batch, key))
        while self._held[0][0] < self.batch - self.keep:
            self._held.popleft()
        self._update_producer()
        rows, note = self._waited_for(key)
        if self.walk.epoch == self._counted and self.walk.lanes[pick.lane].copy == 0:
            self.left.add(note.counts)
        if self.check is not None:
            self.check(rows)
        self._rows = self._mixed(pick, rows)
        self.walk.pass_by(pick, note.last)
        return True

    def _mixed(self, pick: Pick, rows: list[Row]) -> list[Row]:
        """The rows of a shard in this epoch's order; of a lane with a share that share of them, the same in each epoch."""
        walk, lane = self.walk, self.walk.lanes[pick.lane]
        if lane.share < 1:
            chances = generator(walk.seed, "share", pick.file, pick.shard).random_sample(len(rows))
            rows = [row for row, chance in zip(rows, chances, strict=True) if chance < lane.share]
        if not walk.shuffle:
            return rows
        order = generator(walk.seed, walk.epoch, "rows", lane.number, pick.file, pick.shard).permutation(len(rows))
        return [rows[place] for place in order]

    def _waited_for(self, key: Key) -> tuple[list[Row], Note]:
        """The rows of a shard once it is there."""
        spoken = time.monotonic()
        while True:
            note = self.folder.note(key)
            rows = self.folder.rows(key) if note is not None else None
            if note is not None and rows is not None:
                return rows, note
            if self.producer is None:
                time.sleep(0.01)
                continue
            if self.producer.wait(0.05):
                spoken = time.monotonic()
            self.producer.refuse(key)
            self._refuse_silence(spoken)

    def _refuse_silence(self, spoken: float) -> None:
        """Raises WorkbenchError where nobody will prepare the shard."""
        assert self.producer is not None
        path = visible(self.producer.reading)
        if (status := self.producer.status) is not None:
            ended = f"by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "by an error"
            raise DataError(
                f"the process that prepares its rows was ended {ended}",
                "Its file may have been cut short meanwhile, or this machine's memory ran out; the run's log may say more.",
                path=path,
            )
        if time.monotonic() - spoken > STALLED:
            raise DataError(
                f"nothing has come from it for {STALLED:.0f} seconds",
                "See whether its disk or server answers, and resume the run.",
                path=path,
            )

    def _update_producer(self) -> None:
        if self.producer is not None:
            self.producer.go_to(self._begun, [key for _, key in self._held])

    def close(self) -> None:
        """End the preparing."""
        if self.producer is not None:
            self.producer.close()
            self.producer = None

    def __iter__(self) -> Iterator[Row]:
        while (row := self.next_row()) is not None:
            yield row


def open_stream(config: RunConfig, processing_class: Any, *, first: bool = True, look: int = FIXED_ROWS) -> Prepared:
    """The rows of `data.train` as a stream, with the first `look` of them as `dataset`: what there is to know before the
    first step. On the `first` process of a machine the shards begin to be prepared now; close the stream after training.

    Raises `DataError` for sources that cannot be opened or whose first rows cannot be read.
    """
    use_template(config, processing_class)
    plan, files = streamed_plan(config, processing_class)
    store = Store(plan.prepared_path)
    key = digest_of(stream_parts(plan, files, processing_class))
    folder = ShardFolder(store, key, about(plan, processing_class))
    epochs = None if config.optim.max_steps else math.ceil(config.optim.num_train_epochs)
    walk = Walk(files.lanes(), config.run.seed, config.data.shuffle)
    stream = Stream(walk, folder, epochs)
    stream.layout, stream.without_hub = files.layout(), files.without_hub()
    if first:
        making, disk = files.reopened(), int(config.data.streaming_disk * GIB)
        stream.producer = Producer(
            lambda: ShardMaker(plan, making, processing_class, folder), walk.copy(), epochs, disk
        )
    try:
        least = SAMPLE if shape_of(plan.method) is SHAPES["rated"] else FIXED_ROWS
        found = _first_rows(plan, files, processing_class, max(look, least))
        # A run of epochs has to know how many steps they are.
        rows = files.rows() if epochs is not None else None
    except BaseException:
        stream.close()
        raise
    finally:
        files.close()
    names = (*shape_of(plan.method).columns, "row")
    fixed = [{name: row[name] for name in names} for row in found[:FIXED_ROWS]]
    hashes = RowHashes()
    for row in fixed:
        hashes.add(row["row"], row)
    return Prepared(
        dataset=_dataset(found, plan),
        facts=DataFacts(rows=rows, limits=counting_limits(config)),
        fingerprint=fingerprint(fixed),
        counts=asdict(Counts()),
        warnings=tuple(files.warnings),
        cached=False,
        fixed=fixed,
        folder=folder.path,
        hashes=hashes,
        sources=tuple(source.path for source in plan.sources),
        stream=stream,
    )


def with_steps(config: RunConfig, facts: DataFacts) -> RunConfig:
    """The config with the steps that its epochs are where rows of a stream are counted before any is left out; those that
    are left out end the run some steps before."""
    if config.optim.max_steps:
        return config
    steps = total_steps(config, Facts(data=facts, sources={})) if facts.rows is not None else None
    if steps is None:
        raise DataError(
            "optim.max_steps: must be set while these rows are streamed; how many there are is known once all are read.",
            "Set it, or set data.streaming to false.",
        )
    return config.with_values({fields.optim.max_steps: steps})


def _first_rows(plan: Plan, files: Files, processing_class: Any, count: int) -> list[Row]:
    """The first rows that training would use, in the order of the files. Raises `DataError` for one that cannot be used."""
    looked = replace(plan, sources=[replace(source) for source in plan.sources])
    tokens, counts, shape = Tokens(looked, processing_class), Counts(), shape_of(plan.method)
    columns = (*shape.columns, "row", "images")
    found: list[Row] = []
    for number, start in _sampled_parts(looked, files):
        for row in token_rows(looked, tokens, [(number, place) for place in start], counts):
            if row.get("rejected_for"):
                raise too_long_error(looked, row["row"], f"{row['length']:,} tokens")
            found.append({name: row[name] for name in columns if name in row})
        if len(found) >= count:
            break
    if not found:
        reasons = "; ".join(counts.sentences()) or "no rows were read"
        raise nothing_left(plan.named, f"of the first {counts.read:,} rows, {reasons}" if counts.read else reasons)
    # How much good and bad rows weigh is told by the first rows.
    if shape is SHAPES["rated"] and (lack := shape.lacking(counts.classes)):
        raise DataError(f"data.train: of the first {len(found):,} rows {lack[0]}", lack[1], path="")
    return found[:count]


def _sampled_parts(plan: Plan, files: Files) -> Iterator[tuple[int, list[int]]]:
    """Places in the first shard of each file, a few at a time."""
    for number, source in enumerate(plan.sources):
        cut = files.cut(number)
        source.rows = cut.rows
        places, _ = cut.places(0)
        for start in range(0, len(places), FIXED_ROWS):
            yield number, places[start : start + FIXED_ROWS]


def _dataset(rows: list[Row], plan: Plan) -> Any:
    """Rows as a data set in memory, with the columns that prepared rows have."""
    from datasets import Dataset

    if plan.packing:
        lengths = [len(row["input_ids"]) for row in rows]
        rows = [
            joined([rows[place] for place in pack], separate=plan.separate)
            for pack in best_fit(lengths, plan.max_length)
        ]
    return Dataset.from_list(rows)
