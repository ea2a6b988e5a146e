"""`workbench export-config FILE --to TOOL [-o OUT]`: a config of ours for another tool, or the names of what it cannot say."""

from __future__ import annotations

from pathlib import Path

import click

from engine.errors import UsageError, WorkbenchError, visible
from workbench.cli.places import PATH, to_write

TARGETS = ("axolotl", "trl")


@click.command(short_help="Write a config for another tool.")
@click.argument("file", type=PATH)
@click.option("--to", "tool", type=click.Choice(TARGETS), help="The tool it is written for.")
@click.option("-o", "--output", "output", type=PATH, help="The new file; without it the config is printed.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(file: Path, tool: str | None, output: Path | None, as_json: bool) -> int:
    """Write the config FILE for Axolotl or TRL, and say what became of every setting.

    What is learned is kept: where the tool cannot say a setting of model, method, adapter, data or optim, nothing is
    written and each is named. Settings of memory, kernels and run that it does not have are left out, which is said.

    \b
    workbench export-config my.yaml --to axolotl -o axolotl.yml
    """
    from engine.bridge.giving import refused
    from engine.bridge.tools import export
    from engine.config.files import load
    from engine.data.gather_facts import inspect_sources
    from engine.rules import read
    from workbench.cli.findings import require_no_errors
    from workbench.cli.ledger import deliver, show

    if tool is None:
        raise UsageError("the tool it is written for must be named.", f"Give --to {' or --to '.join(TARGETS)}.")
    place = to_write(output) if output is not None else None
    reading = read(load(file).mapping)
    name, folder = visible(str(file)), file.resolve().parent
    require_no_errors(reading.errors, name, "nothing was written")
    data = reading.config.data
    seen = inspect_sources([*data.train, *data.eval], folder)
    formats = {path: look.format for path, look in seen.items() if look.format}
    ledger = export(
        reading.config, tool, source=file.name, folder=folder, out=place.parent if place else folder, formats=formats
    )
    missing = refused(ledger)
    if missing:
        if not as_json:
            show(ledger, only=missing)
        names = ", ".join(row.key for row in missing)
        one = len(missing) == 1
        raise WorkbenchError(
            f"{name}: {names} cannot be said in a config of {ledger.title}, and without {'it' if one else 'them'} "
            "something else would be learned; nothing was written.",
            " ".join(f"{row.key}: {row.reason}" for row in missing),
        )
    deliver(ledger, output, place, as_json=as_json)
    return 0
