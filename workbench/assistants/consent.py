"""What a person is asked before an assistant starts or stops a run, and what happens where nobody can be asked.

The question goes to the person through the client (elicitation). A client that cannot ask gets the command to type instead,
unless the server was started with `--allow-launch`; a config that names Python code is never started unasked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context, Elicit, Resolve
from pydantic import BaseModel, Field

from engine.config.files import as_mapping
from engine.config.reward_specs import reward_specs
from engine.errors import UsageError, WorkbenchError, as_argument, host_of, visible
from engine.run.from_config import refuse_push_without_token, secrets_of
from engine.run.store import RunFolder
from workbench.assistants.desk import Desk
from workbench.assistants.jobs import Job, Tell
from workbench.calling import program
from workbench.cli.train import Start

Ctx = Context[Desk, Any]
How = Literal["stop", "save", "end_of_epoch", "now"]
WAYS = {
    "stop": ("stop", "after its step; steps after its newest checkpoint are lost"),
    "save": ("save_stop", "after its step, with a checkpoint"),
    "end_of_epoch": ("end_of_epoch", "at the end of this epoch, with a checkpoint"),
    "now": ("stop", "at once, by ending its process; steps after its newest checkpoint are lost"),
}
"""Each way to stop: what is asked of the run, and what it means."""
LONGEST, OF_THE_RUN, MOST_ASKED = 4000, 1500, 50
"""Characters of a question and of the run's own paragraph in it, and questions that nobody has answered yet whose words are kept."""


class StartIt(BaseModel):
    """A person's answer."""

    start: bool = Field(False, title="Start the run", description="Whether this run may start now.")


class StopIt(BaseModel):
    """A person's answer."""

    stop: bool = Field(False, title="Stop the run", description="Whether this run is to stop.")


@dataclass(frozen=True)
class Launch:
    """A run that is asked for: how it would start, the files of code that it would execute, and the command that starts it."""

    plan: Start
    code: dict[str, str]
    """The SHA-256 of each."""
    queue: bool
    command: str
    digest: str
    """Of all that was read to plan it."""


def desk_of(ctx: Ctx) -> Desk:
    """The server's desk."""
    return ctx.request_context.lifespan_context


def tell_through(ctx: Ctx) -> Tell:
    """Progress to the client that called."""

    async def tell(progress: float, total: float | None, message: str) -> None:
        await ctx.report_progress(progress, total, visible(message))

    return tell


# -- starting ----------------------------------------------------------------------------------------------------------


async def planned(ctx: Ctx, file: str, settings: list[str], queue: bool) -> Launch:
    """The run that is asked for. Raises WorkbenchError where it cannot start."""
    desk = desk_of(ctx)

    def work(job: Job) -> Launch:
        plan = desk.plan(job, file, settings)
        refuse_push_without_token(plan.config)  # before anybody is asked
        code = code_of(plan)
        of = [json.dumps(as_mapping(plan.config), sort_keys=True, default=str), str(plan.place), code, queue, settings]
        digest = hashlib.sha256(json.dumps(of).encode()).hexdigest()
        return Launch(plan, code, queue, _command(desk, plan, settings, queue), digest)

    return await desk.jobs.run(work, tell_through(ctx))


async def ask_start(ctx: Ctx, launch: Annotated[Launch, Resolve(planned)]) -> StartIt | Elicit[StartIt]:
    """The question to the person; without one the answer that `--allow-launch` gives. Raises WorkbenchError."""
    desk = desk_of(ctx)
    if can_ask(ctx):
        # The client may come back with the answer in a second call, and it counts for these very words alone.
        if len(desk.asked) >= MOST_ASKED:
            desk.asked.pop(next(iter(desk.asked)))
        return Elicit(desk.asked.setdefault(launch.digest, question(launch)), StartIt)
    if desk.allow_launch and not launch.code:
        return StartIt(start=True)
    why = "this client cannot ask you whether the run may start"
    if desk.allow_launch:
        why = f"the config names Python code ({', '.join(map(os.path.basename, launch.code))}), which is never run unasked"
    raise UsageError(f"No run was started: {why}.", f"Start it yourself: `{launch.command}`")


def question(launch: Launch) -> str:
    """What a person reads before a run starts: what it is, where, and what of theirs it executes, sends and is given.

    Raises UsageError where that is too long to be read: nothing of it is cut, or long names would hide the rest.
    """
    plan = launch.plan
    wanted = (
        f"An assistant wants to {'queue' if launch.queue else 'start'} a training run of {visible(str(plan.source))}."
    )
    about, lines = visible(plan.summary), []
    for path, digest in launch.code.items():
        named = [each.function for each in _functions(plan) if each.argument == path]
        lines.append(f"It executes Python code of yours: {visible(path)} ({', '.join(named)}; SHA-256 {digest[:16]}).")
    run = plan.config.run
    if run.push_to_hub:
        kind = "a private repository" if run.hub_private_repo else "a repository that everybody may read"
        lines.append(
            f"It sends its checkpoints to {visible(str(run.hub_model_id))} on the hub, {kind}, with your token."
        )
    if run.report_to:
        lines.append(f"It reports to {visible(', '.join(run.report_to))}.")
    if run.notify:
        lines.append(f"It posts to {host_of(run.notify) or 'an address'} how it goes.")
    if given := [name for name in secrets_of(plan.config, plan.facts) if os.environ.get(name)]:
        lines.append(f"Its process is given {', '.join(given)}.")
    about = about if len(about) <= OF_THE_RUN else f"{about[: OF_THE_RUN - 1]}…"
    words = "\n".join([wanted, about, *lines, f"The same in a terminal: {launch.command}"])
    if len(words) > LONGEST:
        raise UsageError(
            "No run was started: what it would execute and send is too long to be asked here.",
            f"Start it yourself: `{launch.command}`",
        )
    return words


def start(launch: Launch) -> RunFolder:
    """Start it as it was asked for. Raises WorkbenchError where its code is another by now, or it cannot start."""
    if code_of(launch.plan) != launch.code:
        raise WorkbenchError(
            "No run was started: the code that it names was changed while the question was open.", "Ask again."
        )
    return launch.plan.launch(queue=launch.queue)


def code_of(plan: Start) -> dict[str, str]:
    """The files of Python code that the config names, each with its SHA-256."""
    return {spec.argument: hashlib.sha256(Path(spec.argument).read_bytes()).hexdigest() for spec in _functions(plan)}


def _functions(plan: Start) -> list[Any]:
    specs = reward_specs(getattr(plan.config.method, "reward_funcs", ()))
    return [spec for spec in specs if spec.kind == "function"]


def _command(desk: Desk, plan: Start, settings: list[str], queue: bool) -> str:
    """The command that a person types for the same run."""
    words = [program(), "train", as_argument(plan.source or plan.name), *map(shlex.quote, settings)]
    words += ["--queue"] if queue else []
    return visible(" ".join([*words, "--runs", as_argument(plan.place)]))


# -- stopping ----------------------------------------------------------------------------------------------------------


async def ask_stop(ctx: Ctx, run: str, how: How) -> StopIt | Elicit[StopIt]:
    """The question to the person; without one the answer that `--allow-launch` gives. Raises WorkbenchError."""
    desk = desk_of(ctx)
    folder = await desk.jobs.run(lambda job: desk.roots.run(run), tell_through(ctx))
    if folder.state in ("finished", "stopped", "failed", "lost"):
        raise WorkbenchError(f"run {folder.id} is {folder.state}; there is nothing to ask of it.")
    if can_ask(ctx):
        return Elicit(f"An assistant wants to stop the run {visible(folder.id)} {WAYS[how][1]}.", StopIt)
    if desk.allow_launch:
        return StopIt(stop=True)
    flag = {"stop": "", "save": " --save", "end_of_epoch": " --end-of-epoch", "now": " --now"}[how]
    raise UsageError(
        f"{folder.id} was not stopped: this client cannot ask you.",
        f"Stop it yourself: `{program()} stop {as_argument(folder.path)}{flag}`",
    )


def can_ask(ctx: Ctx) -> bool:
    """Whether the client can put a form to its person: a client that says no more of it than that it elicits has forms."""
    capabilities = ctx.client_capabilities
    elicits = capabilities.elicitation if capabilities is not None else None
    return elicits is not None and (elicits.form is not None or elicits.url is None)
