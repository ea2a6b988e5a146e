"""`workbench import FILE --from TOOL [-o OUT]`: another tool's config as one of ours, with a ledger of every key.

The ledger goes to standard error; the config to OUT, which is never one that exists, or else to standard output.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from engine.errors import visible
from workbench.cli.places import PATH, to_read, to_write


@click.command(short_help="Take over a config of another tool.")
@click.argument("file", type=PATH)
@click.option("--from", "tool", metavar="TOOL", help="axolotl, llamafactory or trl; left out where the file shows it.")
@click.option("-o", "--output", "output", type=PATH, help="The new file; without it the config is printed.")
@click.option("--method", metavar="KIND", help="The method, where the file does not say it, as TRL's do not.")
@click.option("--data-dir", "lists", type=PATH, help="Where LLaMA-Factory's dataset_info.json lies.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    file: Path, tool: str | None, output: Path | None, method: str | None, lists: Path | None, as_json: bool
) -> int:
    """Write a config from FILE, a config of Axolotl, LLaMA-Factory or TRL, and say what became of every key.

    \b
    workbench import qlora.yml --from axolotl -o my.yaml
    workbench import sft.yaml --from trl --method sft
    """
    from engine.bridge.detect import TITLES, detect
    from engine.bridge.tools import take_over, tool_named
    from engine.config.files import load
    from workbench.cli.ledger import deliver
    from workbench.cli.output import echo, styled

    place = to_write(output) if output is not None else None
    known = tool_named(tool) if tool is not None else None
    to_read(file, "a config of Axolotl, LLaMA-Factory or TRL", "Name the file that the other tool trains from.")
    if lists is not None:
        to_read(
            lists / "dataset_info.json", "a folder with dataset_info.json", "Name LLaMA-Factory's.", flag="--data-dir"
        )
    document = load(file)
    ledger = take_over(document, known, out=place.parent if place else Path.cwd(), method=method, lists=lists)
    deliver(
        ledger, output, place, as_json=as_json, after=f" Next: `workbench check {shlex.quote(visible(str(output)))}`"
    )
    seen = detect(document.mapping)
    if known is not None and seen is not None and seen != known.name and not as_json:
        words = f"{visible(str(file))} looks like a config of {TITLES[seen]}: with --from {seen} it is read as one."
        echo(styled(words, fg="yellow"), err=True)
    return 0
