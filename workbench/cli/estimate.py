"""`workbench estimate FILE [KEY=VALUE ...]`: memory by class, steps, disk and time before launch, in closed form or rehearsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from engine.errors import UsageError, redact, visible
from engine.figures import brief, large, percent, size
from workbench.cli.ending import ends_are_interrupts
from workbench.cli.output import clear, echo, print_json, rewrite
from workbench.cli.places import PATH

if TYPE_CHECKING:
    from engine.config.facts import Facts
    from engine.config.findings import Finding
    from engine.config.tree import RunConfig
    from engine.planning.estimate import Estimate
    from workbench.cli.reading import Ask

_CLASSES = {
    "weights": "weights",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "images": "activations of images",
    "logits": "scores of the vocabulary",
    "reference": "reference model",
    "kept images": "decoded images kept",
    "generation": "sampling beside it",
    "cache": "keys and values of sampled answers",
    "overhead": "driver and fragments",
}
# Where there is no card, what lies beside the model is the process with its libraries.
_ON_CPU = {**_CLASSES, "overhead": "the process and fragments"}


@click.command(short_help="Memory, steps, disk and time before launch.")
@click.argument("file", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--for", "machine", metavar="MACHINE", help="For another machine, such as 1xH100-80GB, 2x8xH100-80GB or cpu."
)
@click.option("--rehearse", is_flag=True, help="Also train a few steps of the longest rows here, and measure them.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(file: Path, overrides: tuple[str, ...], machine: str | None, rehearse: bool, as_json: bool) -> int:
    """Estimate memory, steps, disk and time of the config FILE from its numbers alone.

    \b
    workbench estimate my.yaml
    workbench estimate my.yaml data.max_length=4096 --for 1xH100-80GB
    """
    from engine.facts.counts import longest_row
    from engine.session.consequences import consequences
    from workbench.cli.reading import asking

    if rehearse and machine:
        raise UsageError(f"--rehearse: measures on this machine, not on {visible(machine)}.", "Leave --for out.")
    known = foresee(file, overrides, machine, ask=asking(quiet=as_json), rehearse=rehearse)
    clear()
    if known.problem:
        echo(f"! {known.problem}", err=True)
    if as_json:
        print_json(known.as_json())
        return 0
    for finding in known.errors:
        echo(f"x {redact(finding.message)}", err=True, hang=2)
    rows = lines(known.estimated, known.facts, longest_row(known.config, known.facts))
    if known.measured is not None:
        rows += rehearsed(known.measured, known.estimated)
    before, now = known.compared or (None, known.estimated)
    changed = {each.name: each.change for each in consequences(now, before) if each.change}
    for label, value in rows:
        echo(f"{label:<28}{value:>18}{_beside(changed.pop(_NAMES.get(label, ''), ''))}")
    return 0


class Foreseen(NamedTuple):
    """All that `estimate` says of a config."""

    config: RunConfig
    facts: Facts
    estimated: Estimate
    errors: Sequence[Finding]
    measured: Any
    """The rehearsal, where there is one."""
    compared: tuple[Estimate, Estimate] | None
    """The file without and with the settings beside it, where there are some."""
    problem: str
    """Why the rows could not be counted."""

    def as_json(self) -> dict[str, Any]:
        """The document of `estimate --json`."""
        changes = {"changes": self.compared[1].changes(self.compared[0])} if self.compared is not None else {}
        document: dict[str, Any] = {**self.estimated.as_json(), **changes}
        document["machine"] = self.facts.machine.name if self.facts.machine else None
        document["rehearsal"] = self.measured.as_json() if self.measured else None
        return {**document, "findings": [each.as_json() for each in self.errors]}


def foresee(
    file: Path, overrides: tuple[str, ...], machine: str | None = None, *, ask: Ask, rehearse: bool = False
) -> Foreseen:
    """What the config FILE will take with these settings beside it; `ask` counts rows that nothing has counted yet.

    Raises ConfigUnreadable, UsageError, and WorkbenchError for a rehearsal of what could not be launched.
    """
    from engine.config.facts import DataFacts
    from engine.data.gather_facts import gather_facts
    from engine.hardware import parse_machine
    from engine.planning.estimate import estimate
    from engine.rules import read
    from engine.run.rehearsed import last
    from workbench.cli.reading import beside_the_file, load_own, with_overrides

    target = parse_machine(machine) if machine else None
    mapping = with_overrides(load_own(file).mapping, file.resolve().parent, overrides)
    reading = read(mapping)
    facts = gather_facts(reading.config, file.resolve().parent, target)
    reading = read(mapping, facts)
    facts, problem = _with_counts(mapping, reading, facts, ask)
    reading = read(mapping, facts)
    measured = _rehearse(file, reading, facts) if rehearse else None
    if measured is None and target is None:
        measured = last(reading.config, facts)
    if measured is not None:
        # The rows are known now: the formula need not assume that one reaches data.max_length.
        facts = replace(facts, data=replace(facts.data or DataFacts(), longest=measured.longest))
    estimated = estimate(reading.config, facts)
    compared = beside_the_file(file, reading.config, facts) if overrides else None
    return Foreseen(reading.config, facts, estimated, reading.errors, measured, compared, problem)


# What is written in a line of the estimate, by the name of the number.
_NAMES = {
    "effective batch": "effective_batch",
    "optimizer steps": "steps",
    "trained parameters": "trainable_parameters",
    "tokens per epoch": "tokens_per_epoch",
    "rows too long": "truncated_share",
    "nothing to learn in": "masked_rows",
    "rows left out": "dropped_rows",
    "packs are full to": "packing_efficiency",
    "images per epoch": "images",
    "tokens of images": "image_tokens",
    "memory in all": "memory_total",
    "one checkpoint": "checkpoint_bytes",
    "checkpoints at most": "checkpoints_bytes",
    "comm wait a step, roughly": "communication_seconds",
    "sent by each GPU a step": "communication_bytes",
    "time, very roughly": "seconds_left",
    "tokens a second": "tokens_per_second",
}


def _beside(change: str) -> str:
    return f"  ({change})" if change else ""


SAMPLE = 512
"""Rows that are tokenized for an estimate where nothing has counted them all."""


def _with_counts(mapping: Any, reading: Any, facts: Any, ask: Ask) -> tuple[Any, str]:
    """The facts with what is known of the rows: as they were counted before, else by a sample of them; and why none could be
    counted."""
    from engine.data.gather_facts import countable
    from engine.facts.counts import not_counted
    from workbench.cli.reading import counts

    model = facts.model
    here = model is not None and not model.missing and not model.remote
    if not here or not countable(reading.findings) or not not_counted(reading.config, facts):
        return facts, ""
    # Paths are absolute here already.
    data, problem = counts(mapping, Path.cwd(), ask, sample=SAMPLE)
    return replace(facts, data=data) if data is not None else facts, problem


def _rehearse(file: Path, reading: Any, facts: Any) -> Any:
    """Measure; phases are told on a terminal. Raises WorkbenchError for a config that could not be launched."""
    from engine.run.rehearsal import rehearse
    from workbench.cli.findings import require_no_errors

    require_no_errors(reading.errors, str(file), "nothing was measured")
    try:
        with ends_are_interrupts():
            return rehearse(reading.config, facts, rewrite)
    finally:
        clear()


def lines(estimated: Any, facts: Any, longest: int) -> list[tuple[str, str]]:
    """The estimate as label and value, numbers with units; what is not known says why. Memory is that of rows of
    `longest` tokens."""
    on_gpu = facts.machine is None or bool(facts.machine.gpus)
    names = _CLASSES if on_gpu else _ON_CPU
    model = "unknown until the model is here"
    data = "unknown until rows are counted"
    rows = [
        ("effective batch", f"{estimated.effective_batch:,} rows"),
        ("optimizer steps", _number(estimated.steps, data)),
        ("steps per epoch", _number(estimated.steps_per_epoch, data)),
        ("trained parameters", _number(estimated.trainable_parameters, model)),
        ("of all parameters", _number(estimated.total_parameters, model)),
    ]
    if estimated.eval_rows != 0:
        rows += [
            ("held-out rows", _number(estimated.eval_rows, data)),
            ("evaluations", _number(estimated.evaluations, data)),
        ]
    of = f" of {facts.data.source_rows:,} rows looked at" if estimated.counted == "sample" else ""
    share = f"{estimated.truncated_share:.1%}{of}" if estimated.truncated_share is not None else data
    rows += [("rows too long", share), ("nothing to learn in", _number(estimated.masked_rows, data))]
    rows.append(("rows left out", _number(estimated.dropped_rows, data)))
    if estimated.tokens_per_epoch is not None:
        rows.append(("tokens per epoch", f"{estimated.tokens_per_epoch:,}"))
    if estimated.images:
        rows += [
            ("images per epoch", f"{estimated.images:,}"),
            ("tokens of images", _number(estimated.image_tokens, data)),
        ]
    if estimated.packing_efficiency is not None:
        rows.append(("packs are full to", f"{estimated.packing_efficiency:.1%}"))
    if estimated.memory:
        rows.append(("memory for rows of", f"{longest:,} tokens"))
        rows += [(f"  {names[name]}", size(amount)) for name, amount in estimated.memory.items()]
    rows.append(("memory in all", size(estimated.memory_total) if estimated.memory_total is not None else model))
    if estimated.device_bytes is not None:
        where = "of the card" if facts.machine and facts.machine.gpus else "of this machine"
        rows.append((where, size(estimated.device_bytes)))
    rows.append(
        ("one checkpoint", size(estimated.checkpoint_bytes) if estimated.checkpoint_bytes is not None else model)
    )
    rows.append(
        ("checkpoints at most", size(estimated.checkpoints_bytes) if estimated.checkpoints_bytes is not None else model)
    )
    if estimated.communication_seconds is not None:
        rows.append(
            ("comm wait a step, roughly", f"{brief(estimated.communication_seconds)} ({estimated.communication_by})")
        )
    if estimated.communication_bytes:
        rows.append(("sent by each GPU a step", size(estimated.communication_bytes)))
    if estimated.seconds_left is not None:
        cores = 1.0 if on_gpu or facts.machine is None else facts.machine.cpu_share
        beside = f", with {percent(cores)} of this busy machine's cores" if cores < 1 else ""
        rows.append(("time, very roughly", f"{brief(estimated.seconds_left)}{beside}"))
    if estimated.tokens_per_second is not None:
        rows.append(("tokens a second", f"{large(estimated.tokens_per_second)}, {estimated.seconds_by}"))
    return rows


def rehearsed(measured: Any, estimated: Any) -> list[tuple[str, str]]:
    """A rehearsal beside the estimate: what was measured, and how far the formula lies from it."""
    import time

    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(measured.t))
    rows = [
        ("rehearsed", when),
        ("  longest row", f"{measured.longest:,} tokens"),
        ("  memory, measured", size(measured.memory_peak)),
        ("  memory, by formula", size(measured.estimated) if measured.estimated else "unknown"),
    ]
    if measured.error is not None:
        rows.append(("  the formula is", f"{abs(measured.error):.0%} too {measured.side}"))
    rows.append(("  a step of longest rows", brief(measured.seconds_per_step)))
    if estimated.steps is not None:
        rows.append(("  all steps, at most", brief(measured.seconds_per_step * estimated.steps)))
    return rows


def _number(value: int | None, unknown: str) -> str:
    return unknown if value is None else f"{value:,}"
