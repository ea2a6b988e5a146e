"""`workbench estimate FILE [KEY=VALUE ...]`: memory by class, steps, disk and time before launch, in closed form or rehearsed."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from engine.errors import UsageError, WorkbenchError, visible
from workbench.panels.figures import brief

_CLASSES = {
    "weights": "weights",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "scores of the vocabulary",
    "reference": "reference model",
    "cache": "keys and values of sampled answers",
    "overhead": "driver and fragments",
}
# Where there is no card, what lies beside the model is the process with its libraries.
_ON_CPU = {**_CLASSES, "overhead": "the process and fragments"}


@click.command(short_help="Memory, steps, disk and time before launch.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--for", "machine", metavar="MACHINE", help="For another machine, such as 1xH100-80GB or cpu.")
@click.option("--rehearse", is_flag=True, help="Also train a few steps of the longest rows here, and measure them.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(file: Path, overrides: tuple[str, ...], machine: str | None, rehearse: bool, as_json: bool) -> int:
    """Estimate memory, steps, disk and time of the config FILE from its numbers alone.

    \b
    workbench estimate my.yaml
    workbench estimate my.yaml data.max_length=4096 --for 1xH100-80GB
    """
    from engine.config.counted import longest_row
    from engine.config.facts import DataFacts
    from engine.config.files import load
    from engine.config.reading import read
    from engine.data.look import look_at
    from engine.hardware import parse_machine
    from engine.memory.estimate import estimate
    from engine.run.rehearsal import last
    from workbench.cli.reading import with_overrides

    if rehearse and machine:
        raise UsageError(f"--rehearse: measures on this machine, not on {visible(machine)}.", "Leave --for out.")
    target = parse_machine(machine) if machine else None
    mapping = with_overrides(load(file).mapping, file.resolve().parent, overrides)
    reading = read(mapping)
    facts = look_at(reading.config, file.resolve().parent, target)
    reading = read(mapping, facts)
    measured = _rehearse(file, reading, facts) if rehearse else None
    if measured is None and target is None:
        measured = last(reading.config, facts)
    if measured is not None:
        # The rows are known now: the formula need not assume that one reaches data.max_length.
        facts = replace(facts, data=replace(facts.data or DataFacts(), longest=measured.longest))
    found = estimate(reading.config, facts)
    if as_json:
        told = {"machine": facts.machine.name if facts.machine else None}
        told["rehearsal"] = measured.as_json() if measured else None
        click.echo(json.dumps({**found.as_json(), **told}))
        return 0
    for finding in reading.findings:
        if finding.severity == "error":
            click.echo(f"x {visible(finding.message)}", err=True)
    rows = lines(found, facts, longest_row(reading.config, facts))
    if measured is not None:
        rows += rehearsed(measured, found)
    for label, value in rows:
        click.echo(f"{label:<28}{value:>18}")
    return 0


def _rehearse(file: Path, reading: Any, facts: Any) -> Any:
    """Measure; phases are told on a terminal. Raises WorkbenchError for a config that could not be launched."""
    from engine.run.rehearsal import rehearse
    from workbench.cli.findings import show
    from workbench.cli.progress import doing, done

    if not reading.ok:
        show(reading.findings, {}, err=True)
        count = sum(finding.severity == "error" for finding in reading.findings)
        raise WorkbenchError(
            f"{visible(str(file))}: the config has {count} error{'s' if count > 1 else ''}; nothing was measured.",
            "`workbench check` shows them with their fixes.",
        )
    try:
        with _ends_are_interrupts():
            return rehearse(reading.config, facts, doing)
    finally:
        done()


@contextlib.contextmanager
def _ends_are_interrupts() -> Iterator[None]:
    """A closed terminal or SIGTERM ends the measuring as Ctrl-C does: with its process and its folder gone."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    ends = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [(number, signal.signal(number, interrupt)) for number in ends]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def lines(found: Any, facts: Any, longest: int) -> list[tuple[str, str]]:
    """The estimate as label and value, numbers with units; what is not known says why. Memory is that of rows of
    `longest` tokens."""
    on_gpu = facts.machine is None or bool(facts.machine.gpus)
    names = _CLASSES if on_gpu else _ON_CPU
    model = "unknown until the model is here"
    data = "unknown until rows are counted"
    rows = [
        ("effective batch", f"{found.effective_batch:,} rows"),
        ("optimizer steps", _number(found.steps, data)),
        ("steps per epoch", _number(found.steps_per_epoch, data)),
        ("trained parameters", _number(found.trainable_parameters, model)),
        ("of all parameters", _number(found.total_parameters, model)),
    ]
    if found.memory:
        rows.append(("memory for rows of", f"{longest:,} tokens"))
        rows += [(f"  {names[name]}", gib(size)) for name, size in found.memory.items()]
    rows.append(("memory in all", gib(found.memory_total) if found.memory_total is not None else model))
    if found.device_bytes is not None:
        where = "of the card" if facts.machine and facts.machine.gpus else "of this machine"
        rows.append((where, gib(found.device_bytes)))
    rows.append(("one checkpoint", gib(found.checkpoint_bytes) if found.checkpoint_bytes is not None else model))
    rows.append(("checkpoints at most", gib(found.checkpoints_bytes) if found.checkpoints_bytes is not None else model))
    if found.seconds_left is not None:
        rows.append(("time, very roughly", brief(found.seconds_left)))
    return rows


def rehearsed(measured: Any, found: Any) -> list[tuple[str, str]]:
    """A rehearsal beside the estimate: what was measured, and how far the formula lies from it."""
    import time

    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(measured.t))
    rows = [
        ("rehearsed", when),
        ("  longest row", f"{measured.longest:,} tokens"),
        ("  memory, measured", gib(measured.memory_peak)),
        ("  memory, by formula", gib(measured.estimated) if measured.estimated else "unknown"),
    ]
    if measured.error is not None:
        rows.append(("  the formula is", f"{abs(measured.error):.0%} too {measured.side}"))
    rows.append(("  a step of longest rows", f"{measured.seconds_per_step:,.2f} s"))
    if found.steps is not None:
        rows.append(("  all steps, at most", f"{measured.seconds_per_step * found.steps / 60:,.0f} min"))
    return rows


def _number(value: int | None, unknown: str) -> str:
    return unknown if value is None else f"{value:,}"


def gib(size: int) -> str:
    """Bytes with the unit that keeps the number readable."""
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= unit or name == "KiB":
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"
