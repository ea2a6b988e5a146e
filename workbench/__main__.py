"""The `workbench` command: a lazy group, so that `--help` imports nothing but click.

Each command lives in `workbench/cli/<name>.py` as a click command called `command`; it is imported when it is run.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

import click

from engine.errors import WorkbenchError

# name -> (module, what it does); the help text stands here so that `--help` imports no command.
COMMANDS: dict[str, tuple[str, str]] = {
    "new": ("new", "Write a config from a recipe."),
    "check": ("check", "Find everything wrong with a config."),
    "preview": ("preview", "Show the batch that training will see."),
    "estimate": ("estimate", "Memory, steps, disk and time before launch."),
    "train": ("train", "Start a run and watch it."),
    "runs": ("runs", "List runs."),
    "watch": ("watch", "Watch a run."),
    "stop": ("stop", "Ask a run to stop."),
    "checkpoint": ("checkpoint", "Ask a run for a checkpoint."),
    "resume": ("resume", "Go on from the newest whole checkpoint."),
    "receipt": ("receipt", "What was really done in a run."),
    "compare": ("compare", "What differs between runs."),
    "doctor": ("doctor", "What this machine can do."),
    "explain": ("explain", "Explain a setting or a term."),
    "recipes": ("recipes", "List the ready configs."),
    "demo": ("demo", "Train the built-in tiny model; no network needed."),
}


class LazyGroup(click.Group):
    """Commands by name; anything else that is a run's name or folder opens the app on it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            return import_module(f"workbench.cli.{COMMANDS[name][0]}").command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            return name, import_module("workbench.cli.app").command, args
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="finetuning-workbench")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.pass_context
def cli(ctx: click.Context, runs: str | None) -> object:
    """Fine-tune language models: build a config, see the tokens, start the run, watch it.

    \b
    workbench                 open the app
    workbench demo            train a tiny model on this machine, now
    workbench new -o my.yaml  write a config to edit
    workbench train my.yaml   start it; Ctrl-C leaves it running
    workbench RUN             open a run in the app
    """
    name = ctx.invoked_subcommand
    if name is None:
        return ctx.invoke(import_module("workbench.cli.app").command, runs=runs)
    if runs is not None:
        command = cli.get_command(ctx, name)
        if command is not None and "runs" not in [param.name for param in command.params]:
            raise click.UsageError(f"--runs: must be left out with `{name}`, which looks at no runs.")
        ctx.default_map = {name: {"runs": runs}}
    return None


def main() -> None:
    """Entry point: every error a user can cause is one sentence on stderr and the right exit code."""
    # Nothing that is imported becomes garbage, and looking for it is a tenth of a short command; what runs for long
    # (the app, following a run) turns it on again.
    gc.disable()
    try:
        result = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except WorkbenchError as problem:
        click.echo(f"Error: {problem.message}", err=True)
        if problem.hint:
            click.echo(f"  {problem.hint}", err=True)
        sys.exit(problem.exit_code)
    except BrokenPipeError:
        # The reader of our output left (`workbench runs | head`): no traceback, and none at interpreter exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
