"""`workbench recipes`: the ready configs, one line each."""

from __future__ import annotations

import click

from workbench.cli.output import echo, print_json


@click.command(short_help="List the ready configs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(as_json: bool) -> int:
    """List the ready configs; `workbench new --recipe NAME` writes one."""
    from engine.config.recipes import recipes

    if as_json:
        listed = [
            {"name": recipe.name, "title": recipe.title, "goal": recipe.goal, "text": recipe.text}
            for recipe in recipes()
        ]
        print_json(listed)
        return 0
    width = max(len(recipe.name) for recipe in recipes())
    for recipe in recipes():
        echo(f"{recipe.name:<{width}}  {recipe.title}")
    return 0
