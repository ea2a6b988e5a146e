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
        found = [{"name": each.name, "title": each.title, "goal": each.goal, "text": each.text} for each in recipes()]
        print_json(found)
        return 0
    width = max(len(each.name) for each in recipes())
    for each in recipes():
        echo(f"{each.name:<{width}}  {each.title}")
    return 0
