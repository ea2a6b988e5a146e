"""`workbench new`: a config from a recipe, on stdout or in a file that is never overwritten unasked."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from engine.errors import UsageError, visible
from workbench.cli.output import echo, print_json
from workbench.cli.places import PATH, to_write


@click.command(short_help="Write a config from a recipe.")
@click.argument("first", required=False, metavar="[RECIPE]")
@click.option("--recipe", "named", metavar="RECIPE", help="Which; see `workbench recipes`.  [default: sft-lora]")
@click.option("-o", "--output", "output", type=PATH, help="The file; without it the config is printed.")
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(first: str | None, named: str | None, output: Path | None, force: bool, as_json: bool) -> int:
    """Write a config from a recipe, with comments that say what to change.

    \b
    workbench new dpo -o my.yaml
    """
    from engine.config.recipes import recipe_text
    from engine.session.draft import write

    if first and named and first != named:
        raise UsageError(f"one recipe at a time; got {visible(first)} and --recipe {visible(named)}.")
    name = first or named or "sft-lora"
    text = recipe_text(name)
    if output is None and as_json:
        print_json({"recipe": name, "path": None, "text": text})
        return 0
    if output is None:
        echo(text.removesuffix("\n"), lines=True)
        return 0
    shown = visible(str(output))
    place = to_write(output, replaces=force, way="Choose another name, or give --force.")
    write(place, text)
    if as_json:
        print_json({"recipe": name, "path": str(place), "text": text})
        return 0
    echo(f"Wrote {shown} from the recipe {name}. Next: `workbench check {shlex.quote(shown)}`", err=True)
    return 0
