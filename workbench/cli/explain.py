"""`workbench explain`: a setting, a section or a term in plain words, from the schema and the glossary alone."""

from __future__ import annotations

import json
import textwrap

import click

from engine.errors import UsageError, visible


@click.command(short_help="Explain a setting or a term.")
@click.argument("what", required=False)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(what: str | None, as_json: bool) -> int:
    """Explain a setting (optim.learning_rate), a section (data) or a term (epoch). Without a name all are listed."""
    from engine.config.explain import Explanation, explain, names

    if what is None:
        listed = names()
        if as_json:
            click.echo(json.dumps(listed))
            return 0
        for group, members in listed.items():
            click.echo(f"{group}:")
            click.echo(textwrap.fill(", ".join(members), 100, initial_indent="  ", subsequent_indent="  "))
        return 0
    found = explain(what)
    if isinstance(found, Explanation):
        click.echo(json.dumps(found.as_json(), default=str) if as_json else found.as_text())
        return 0
    todo = f"Did you mean {' or '.join(found)}?" if found else "`workbench explain` lists what there is."
    raise UsageError(
        f"{visible(what)}: must be a setting, a section or a term; this version knows none of that name.", todo
    )
