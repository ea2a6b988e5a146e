"""`workbench explain`: a setting, a section or a term in plain words, from the schema and the glossary alone."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from engine.errors import UsageError
from workbench.cli.output import echo, print_json

if TYPE_CHECKING:
    from engine.session.explain import Explanation


@click.command(short_help="Explain a setting or a term.")
@click.argument("what", required=False)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(what: str | None, as_json: bool) -> int:
    """Explain a setting (optim.learning_rate), a section (data) or a term (epoch). Without a name all are listed."""
    from engine.session.explain import names

    if what is None:
        listed = names()
        if as_json:
            print_json(listed)
            return 0
        for group, members in listed.items():
            echo(f"{group}:")
            for line in textwrap.wrap(", ".join(members), 100, initial_indent="  ", subsequent_indent="  "):
                echo(line)
        return 0
    explanation = explained(what)
    if as_json:
        print_json(explanation.as_json())
    else:
        echo(explanation.as_text(), lines=True)
    return 0


def explained(what: str) -> Explanation:
    """What this name stands for. Raises UsageError, naming the nearest."""
    from engine.config.findings import shown
    from engine.session.explain import Explanation, explain

    explanation = explain(what)
    if isinstance(explanation, Explanation):
        return explanation
    todo = f"Did you mean {' or '.join(explanation)}?" if explanation else "`workbench explain` lists what there is."
    raise UsageError(
        f"{shown(what)}: must be a setting, a section or a term; this version knows none of that name.", todo
    )
