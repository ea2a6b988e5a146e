"""Rules about rows that are streamed: what has to be known of them before, and what nobody can count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.config.facts import Facts
from engine.config.files import COMPRESSIONS
from engine.config.findings import Finding, Fix, must, notice
from engine.config.rule import rule
from engine.config.tree import RunConfig, fields
from engine.errors import visible
from engine.rules.sources import sources

_STEPS = 1000
_IN_ORDER = (*COMPRESSIONS, ".csv", ".tsv")
"""Files whose rows are found from their beginning alone."""


@rule(reads=(fields.data.streaming, fields.data.train, fields.data.packing, fields.optim.max_steps))
def streams_of_unknown_length_need_max_steps(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.data.streaming or config.optim.max_steps is not None:
        return
    path, fix = fields.optim.max_steps.path, Fix(f"train {_STEPS:,} steps", {fields.optim.max_steps.path: _STEPS})
    packed = next((name for entry in config.data.train if (name := _in_order(entry.path, facts))), "")
    if packed:
        todo = f"How many rows {visible(packed)} has is known once it was read to its end, so the steps must be said."
        yield must(path, "set while this source is streamed", None, todo, fix=fix)
    elif any(entry.format == "multimodal_pretrain" for entry in config.data.train):
        todo = "How many rows with images are left out is known once all were read, so the steps must be said."
        yield must(path, "set while text with images is streamed", None, todo, fix=fix)
    elif any(entry.ranking_pairs != "best_worst" for entry in config.data.train):
        todo = "How many pairs the rankings give is known once all were read, so the steps must be said."
        yield must(path, "set while several pairs of each ranking are streamed", None, todo, fix=fix)
    elif config.data.packing:
        todo = "How many packs the rows fill is known once all are packed, so the steps must be said."
        yield must(path, "set while packed rows are streamed", None, todo, fix=fix)


@rule(reads=(fields.data.streaming, fields.data.train, fields.data.eval))
def folders_of_files_are_streamed(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for place, entry, known in sources(config, facts):
        streamed = place.startswith(fields.data.train.path)
        if known is None or not known.several or (streamed and config.data.streaming):
            continue
        fix = Fix("stream the rows", {fields.data.streaming.path: True}) if streamed else None
        todo = "Name one of its files; several are several sources." + (" A stream reads them as one." if fix else "")
        yield must(f"{place}.path", "one file, or a data set that was saved", entry.path, todo, fix=fix)


@rule(reads=(fields.data.streaming, fields.data.train))
def resuming_reads_again_what_is_read_in_order(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.data.streaming:
        return
    for index, entry in enumerate(config.data.train):
        if name := _in_order(entry.path, facts):
            sentence = (
                f"{visible(Path(name).name)} can be read from its beginning alone: its rows are mixed only near one "
                "another, and a resume reads it up to its place again. JSONL or Parquet files have neither limit."
            )
            yield notice(f"{fields.data.train.path}.{index}.path", sentence, severity="hint")


@rule(reads=(fields.data.streaming, fields.data.train))
def streamed_rows_are_not_counted(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.data.streaming and facts.data is not None and facts.data.counted == "sample":
        looked = facts.data.read or 0
        sentence = (
            f"rows are streamed, and {looked:,} of them were looked at: rows that are too long, masked or cannot be read "
            "are found in the others when training comes to them."
        )
        yield notice(fields.data.streaming.path, sentence, severity="hint")


@rule(reads=(fields.data.streaming, fields.method.kind, fields.method.reference))
def streams_have_no_precomputed_reference(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.data.streaming and getattr(config.method, "reference", None) == "precompute":
        path = fields.method.reference.path
        todo = "Its values are computed over all rows before training, and a stream has no rows before training."
        fix = Fix("leave it to the default", unset=(path,))
        yield must(path, "copy or adapter_off while rows are streamed", "precompute", todo, fix=fix)


@rule(reads=(fields.data.streaming, fields.data.streaming_disk))
def disk_for_a_stream_needs_one(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.data.streaming_disk
    if config.data.streaming_disk != spec.default and not config.data.streaming:
        fix = Fix("stream the rows", {fields.data.streaming.path: True})
        todo = "Without it all rows are prepared before training, whatever disk they take."
        yield must(spec.path, "left out while data.streaming is false", config.data.streaming_disk, todo, fix=fix)


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


def _in_order(path: str, facts: Facts) -> str:
    """The first file of a source whose rows are found from its beginning alone; empty where none is known to be such."""
    if _suffix(path) in _IN_ORDER:
        return path
    source = (facts.sources or {}).get(path)
    return source.in_order if source is not None else ""
