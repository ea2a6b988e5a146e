"""The `workbench` command: a lazy group, so that `--help` imports nothing but click.

Each command lives in `workbench/cli/<name>.py` as a click command called `command`; it is imported when it is run.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from importlib import import_module

import click

from engine.errors import WorkbenchError, nearest
from workbench.cli.ending import ended_by, ends_are_interrupts
from workbench.cli.output import document, echo, refuse
from workbench.crash import crashed
from workbench.home import NEED_NONE, provide_home

# name -> (module, what it does); the help text stands here so that `--help` imports no command.
COMMANDS: dict[str, tuple[str, str]] = {
    "new": ("new", "Write a config from a recipe."),
    "import": ("take_over", "Take over a config of another tool."),
    "export-config": ("export_config", "Write a config for another tool."),
    "check": ("check", "Find everything wrong with a config."),
    "preview": ("preview", "Show the batch that training will see."),
    "estimate": ("estimate", "Memory, steps, disk and time before launch."),
    "train": ("train", "Start a run and watch it."),
    "submit": ("submit", "Hand a run over to a cluster."),
    "queue": ("queue", "Show the runs that wait, and change their order."),
    "sweep": ("sweep", "Runs for several values of settings, in one table."),
    "runs": ("runs", "List runs."),
    "watch": ("watch", "Watch a run."),
    "stop": ("stop", "Ask a run to stop."),
    "checkpoint": ("checkpoint", "Ask a run for a checkpoint."),
    "stack": ("stack", "Show where a run's worker is."),
    "resume": ("resume", "Go on from the newest whole checkpoint."),
    "receipt": ("receipt", "What was really done in a run."),
    "evaluate": ("evaluate", "Measure a checkpoint on held-out rows."),
    "merge": ("merge", "Merge a run's adapter into its base."),
    "export": ("export", "Take a trained model along: safetensors, adapter, GGUF, Modelfile."),
    "verify": ("verify", "Whether an exported model is still the one compared."),
    "push": ("push", "Push a trained model to a hub."),
    "prune": ("prune", "Remove checkpoints, never the newest or the best."),
    "compare": ("compare", "What differs between runs."),
    "cache": ("cache", "List, size and prune prepared data."),
    "chat": ("chat", "Talk to a run's model, beside its base."),
    "doctor": ("doctor", "What this machine can do."),
    "explain": ("explain", "Explain a setting or a term."),
    "recipes": ("recipes", "List the ready configs."),
    "demo": ("demo", "Train the built-in tiny model; no network needed."),
    "guide": ("guide", "A guided first run, on your own rows."),
    "mcp": ("mcp", "Serve configs and runs to a coding assistant."),
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
    if name not in NEED_NONE and not {"--help", "-h"} & set(sys.argv[1:]) and (words := provide_home()):
        echo(words, err=True)
    if name is None:
        return ctx.invoke(import_module("workbench.cli.app").command, runs=runs)
    if runs is not None:
        command = cli.get_command(ctx, name)
        if command is not None and "runs" not in [param.name for param in command.params]:
            raise click.UsageError(f"--runs: must be left out with `{name}`, which looks at no runs.")
        ctx.default_map = {name: {"runs": runs}}
    return None


def main() -> None:
    """Entry point: every error is one sentence on stderr, with `--json` also a document on stdout, and its exit code."""
    # Nothing that is imported becomes garbage, and looking for it is a tenth of a short command; what runs for long
    # (the app, following a run) turns it on again.
    gc.disable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no ✓ gets its escape, not a traceback
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in sys.argv[1:]
    try:
        # A document is owed whatever happens; without one a signal ends a short command as the system would.
        with ends_are_interrupts() if as_json else contextlib.nullcontext():
            code = _run(as_json=as_json)
    except BrokenPipeError:
        # The reader of our output left (`workbench runs | head`): no traceback, and none at interpreter exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    # The interpreter looks for garbage among all of it once more as it ends, which takes a fifth of a check; none is needed.
    gc.freeze()
    sys.exit(code)


def _run(*, as_json: bool) -> int:
    """Run the command that was called; the exit code. Asked for by the words alone, JSON answers a wrong call too."""
    usage = ""
    try:
        result = cli.main(prog_name="workbench", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        sentence, code = ended_by()
        if as_json:
            document(WorkbenchError(sentence, exit_code=code))
        return code
    except click.ClickException as wrong:
        context = wrong.ctx if isinstance(wrong, click.UsageError) else None
        close = nearest(context.info_name or "", COMMANDS) if context else None
        hint = f"Try `{context.command_path} --help`." if context else ""
        if (
            isinstance(wrong, click.MissingParameter)
            and wrong.param is not None
            and wrong.param.human_readable_name == "RUN"
        ):
            hint = f"`workbench runs` lists them. {hint}"
        if close and context and context.info_name not in COMMANDS:
            hint = f"Did you mean the command `workbench {close}`?"
        elif context:
            usage = context.get_usage()
        problem = WorkbenchError(wrong.format_message(), hint, exit_code=wrong.exit_code)
    except WorkbenchError as found:
        problem = found
        if problem.exit_code == 130:
            problem.exit_code = ended_by()[1]
    except BrokenPipeError:
        raise
    except Exception as crash:  # noqa: BLE001  the commands' boundary
        problem = crashed(crash)
    refuse(problem, usage)
    if as_json:
        document(problem)
    return problem.exit_code


if __name__ == "__main__":
    main()
