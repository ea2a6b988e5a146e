"""`workbench push RUN --to owner/name`: a trained model to a hub, by the hub's own client."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from engine.errors import UsageError, WorkbenchError
from engine.export.process import request
from engine.export.push import refuse_name
from engine.run import store
from workbench.cli.output import echo, print_json
from workbench.cli.taking_along import followed


@click.command(short_help="Push a trained model to a hub.")
@click.argument("name", metavar="RUN")
@click.option("--to", "repository", metavar="OWNER/NAME", help="The repository; it is made where there is none.")
@click.option("--form", type=click.Choice(["safetensors", "adapter"]), default="safetensors", help="What is pushed.")
@click.option(
    "--checkpoint", "step", type=int, metavar="N", help="The checkpoint of step N; else the newest whole one."
)
@click.option("--per-expert", is_flag=True, help="Of an adapter on a mixture: one for each expert, as vLLM reads them.")
@click.option("--public", is_flag=True, help="A new repository is for everybody; else it is private.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    name: str,
    repository: str | None,
    form: str,
    step: int | None,
    per_expert: bool,
    public: bool,
    runs: str | None,
    as_json: bool,
) -> int:
    """Export the model into a folder of its own, compare it, and push it. The token is the hub's own (`hf auth login`).

    \b
    workbench push my-0001 --to me/my-model
    workbench push my-0001 --to me/my-adapter --form adapter --public
    """
    if repository is None:
        raise UsageError("--to: must be given: the repository as owner/name.")
    if per_expert and form != "adapter":
        raise UsageError("--per-expert: is for an adapter.", "Add --form adapter, or leave it out.")
    run = store.find(name, store.runs_dir(runs))
    refuse_name(repository)
    with tempfile.TemporaryDirectory(prefix="workbench-push-") as room:
        where = {form: Path(room) / form}
        more = {"repository": repository, "private": not public, "per_expert": per_expert}
        result = followed(request("push", run.path, checkpoint=step, places=where, **more), as_json=True)
    part = result["parts"][0]
    if not part["ok"]:
        raise WorkbenchError(**part["error"])
    if as_json:
        print_json(
            {
                "ok": True,
                "run": run.id,
                "checkpoint": result["checkpoint"],
                "url": part["url"],
                "parity": part["parity"],
            }
        )
    else:
        echo(f"{run.id} is at {part['url']}")
    return 0
