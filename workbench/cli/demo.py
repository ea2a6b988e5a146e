"""`workbench demo`: train the built-in tiny model on the built-in dates, here and now, without any network."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from engine.errors import UsageError
from engine.run.index import open_view
from workbench.calling import run_name
from workbench.cli.output import echo
from workbench.cli.places import shown
from workbench.cli.train import attach, hold_container, start_mapping


@click.command(short_help="Train the built-in tiny model; no network needed.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--app", "in_app", is_flag=True, help="Watch it in the app.")
@click.option("--detach", is_flag=True, help="Return once training has begun; the run goes on.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    ctx: click.Context, overrides: tuple[str, ...], in_app: bool, detach: bool, runs: str | None, as_json: bool
) -> int:
    """Teach a tiny model to write dates in ISO form, on this machine, in a few minutes.

    The pinned questions are answered again and again while it learns.
    """
    from engine.config.recipes import recipe_mapping

    if in_app and (detach or as_json):
        raise UsageError("--app excludes --detach and --json; choose one.")
    hold_container(detach=detach)
    run = start_mapping(recipe_mapping("demo"), Path.cwd(), overrides, runs, name="demo")
    if in_app:
        return int(ctx.invoke(import_module("workbench.cli.app").command, run=str(run.path)) or 0)
    if not as_json:
        echo(f"{run.id} in {shown(run.path)}", err=True)
    code = attach(run, detach=detach, as_json=as_json)
    if code == 0 and not detach and not as_json:
        with open_view(run) as watch:
            if watch.view.state == "finished":
                _print_next_steps(run_name(run))
    return code


def _print_next_steps(name: str) -> None:
    echo()
    echo("What now:")
    echo(f"  look at its curves in the app: `workbench {name}`")
    echo(f"  see what was really done: `workbench receipt {name}`")
    echo("  write a config for your own data: `workbench new -o my.yaml`")
    echo("  build one step by step: `workbench`")
