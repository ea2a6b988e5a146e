"""`workbench new`: a config from a recipe, on stdout or in a file that is never overwritten unasked."""

from __future__ import annotations

from pathlib import Path

import click

from engine.errors import UsageError, visible


@click.command(short_help="Write a config from a recipe.")
@click.option(
    "--recipe", "name", metavar="RECIPE", default="sft-lora", show_default=True, help="Which; see `workbench recipes`."
)
@click.option(
    "-o", "--output", "output", type=click.Path(path_type=Path), help="The file; without it the config is printed."
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def command(name: str, output: Path | None, force: bool) -> int:
    """Write a config from a recipe, with comments that say what to change.

    \b
    workbench new --recipe dpo -o my.yaml
    """
    from engine.config.draft import write
    from engine.config.recipes import recipe_text

    text = recipe_text(name)
    if output is None:
        click.echo(text, nl=False)
        return 0
    shown = visible(str(output))
    if output.is_dir():
        raise UsageError(f"{shown}: must be a file name; got a folder.", f"Name the file in it: {shown}/my.yaml")
    if output.exists() and not force:
        raise UsageError(
            f"{shown}: must be a new file; this one exists and is kept.", "Choose another name, or give --force."
        )
    write(output.absolute(), text)
    click.echo(f"Wrote {shown} from the recipe {name}. Next: workbench check {shown}", err=True)
    return 0
