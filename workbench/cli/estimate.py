"""`workbench estimate FILE`: memory by class, steps, disk and time before launch, in closed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from engine.errors import UsageError, visible

_CLASSES = {
    "weights": "weights",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "scores of the vocabulary",
    "reference": "reference model",
    "overhead": "driver and fragments",
}


@click.command(short_help="Memory, steps, disk and time before launch.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--for", "machine", metavar="MACHINE", help="For another machine, such as 1xH100-80GB or cpu.")
@click.option("--rehearse", is_flag=True, help="Measure one step instead (comes in a later version).")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(file: Path, machine: str | None, rehearse: bool, as_json: bool) -> int:
    """Estimate memory, steps, disk and time of the config FILE from its numbers alone."""
    from engine.config.files import load
    from engine.config.reading import read
    from engine.data.look import look_at
    from engine.hardware import parse_machine
    from engine.memory.estimate import estimate

    if rehearse:
        raise UsageError(
            "--rehearse: this version estimates by formula only.",
            "Leave it out; a short run with optim.max_steps=3 measures.",
        )
    target = parse_machine(machine) if machine else None
    document = load(file)
    reading = read(document.mapping)
    facts = look_at(reading.config, file.resolve().parent, target)
    reading = read(document.mapping, facts)
    found = estimate(reading.config, facts)
    if as_json:
        click.echo(json.dumps({**found.as_json(), "machine": facts.machine.name if facts.machine else None}))
        return 0
    for finding in reading.findings:
        if finding.severity == "error":
            click.echo(f"x {visible(finding.message)}", err=True)
    for label, value in lines(found, facts):
        click.echo(f"{label:<28}{value:>18}")
    return 0


def lines(found: Any, facts: Any) -> list[tuple[str, str]]:
    """The estimate as label and value, numbers with units; what is not known says why."""
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
        rows += [(f"  {_CLASSES[name]}", gib(size)) for name, size in found.memory.items()]
    rows.append(("memory", gib(found.memory_total) if found.memory_total is not None else model))
    if found.device_bytes is not None:
        where = "of the card" if facts.machine and facts.machine.gpus else "of this machine"
        rows.append((where, gib(found.device_bytes)))
    rows.append(("one checkpoint", gib(found.checkpoint_bytes) if found.checkpoint_bytes is not None else model))
    rows.append(("checkpoints at most", gib(found.checkpoints_bytes) if found.checkpoints_bytes is not None else model))
    if found.seconds_left is not None:
        rows.append(("time, very roughly", f"{found.seconds_left / 60:.0f} min"))
    return rows


def _number(value: int | None, unknown: str) -> str:
    return unknown if value is None else f"{value:,}"


def gib(size: int) -> str:
    """Bytes with the unit that keeps the number readable."""
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= unit or name == "KiB":
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"
