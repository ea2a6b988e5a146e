"""`workbench verify ARTEFACT`: whether an exported model is still the one that was compared with the trained one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from engine.errors import WorkbenchError, redact, visible
from engine.export.record import verify
from engine.figures import size
from workbench.cli.output import clear, echo, print_json, rewrite
from workbench.cli.places import PATH, to_read


@click.command(short_help="Whether an exported model is still the one compared.")
@click.argument("artefact", metavar="FOLDER|FILE", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(artefact: Path, as_json: bool) -> int:
    """Read a model that `export` or `merge` has made, here or copied from elsewhere, and say whether each of its files is the
    one that was compared with the trained model.

    \b
    workbench verify my-0001-export/safetensors
    workbench verify my-model.gguf

    Exit code: 0 where it is, 1 where a file was changed, added or lost.
    """

    to_read(artefact, "a folder or file of a model", "Name one that `workbench export` has made.", folder=True)

    def show(what: str, done: int, total: int) -> None:
        rewrite(f"{what} {size(done)} of {size(total)}")

    try:
        found = verify(artefact, show)
    finally:
        clear()
    if as_json:
        print_json({"ok": not found.changed, "path": str(artefact), **asdict(found)})
        return 1 if found.changed else 0
    shown, origin = visible(redact(str(artefact))), f"{visible(found.checkpoint)} of {visible(found.run)}"
    if found.changed:
        more = f", and {len(found.changed) - 3} more" if len(found.changed) > 3 else ""
        raise WorkbenchError(
            f"{shown}: {', '.join(found.changed[:3])}{more} since it was compared with {origin}.",
            "What was found then says nothing of it; copy or export it again.",
        )
    many = f"{found.files} file{'s' if found.files != 1 else ''}"
    echo(f"{shown}: as it was compared with {origin} ({visible(found.form)}, {many}, {size(found.bytes)}).")
    return 0
