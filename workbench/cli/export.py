"""`workbench export RUN --to FORM`: a trained model as folders and files that other programs open."""

from __future__ import annotations

from pathlib import Path

import click

from engine.errors import UsageError, as_argument
from engine.export.places import FORMS, places, refuse_existing
from engine.export.process import request
from engine.run import store
from workbench.cli.output import echo
from workbench.cli.places import PATH
from workbench.cli.taking_along import absolute, ended, followed


@click.command(short_help="Take a trained model along.")
@click.argument("name", metavar="RUN")
@click.option("--to", "forms", multiple=True, type=click.Choice(list(FORMS)), help="May be given often.")
@click.option(
    "--checkpoint", "step", type=int, metavar="N", help="The checkpoint of step N; else the newest whole one."
)
@click.option("-o", "--output", "output", type=PATH, help="The folder; else RUN-export here.")
@click.option(
    "--quant",
    default="F16",
    metavar="FORMAT",
    help="Of a GGUF: F16, BF16, Q8_0, F32; of a base with experts in it MXFP4; with llama.cpp also Q4_K_M and others.",
)
@click.option("--per-expert", is_flag=True, help="Of an adapter on a mixture: one for each expert, as vLLM reads them.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    name: str,
    forms: tuple[str, ...],
    step: int | None,
    output: Path | None,
    quant: str,
    per_expert: bool,
    runs: str | None,
    as_json: bool,
) -> int:
    """Write the model for other programs; each part is opened again and compared with the trained one.

    \b
    workbench export my-0001 --to safetensors
    workbench export my-0001 --to gguf --quant Q4_K_M --to modelfile
    workbench export my-0001 --to adapter -o small
    workbench export my-0001 --to adapter --per-expert
    """
    if not forms:
        raise UsageError(f"--to: must be given: {', '.join(FORMS)}.", "It may be given often.")
    if per_expert and "adapter" not in forms:
        raise UsageError("--per-expert: is for an adapter.", "Add --to adapter, or leave it out.")
    run = store.find(name, store.runs_dir(runs))
    quant = quant.upper()
    where = places(run, forms, absolute(output, f"{run.id}-export"), quant)
    for place in where.values():
        refuse_existing(place)
    asked = request("export", run.path, checkpoint=step, places=where, quant=quant, per_expert=per_expert)
    result = followed(asked, as_json=as_json)
    code = ended(result, as_json=as_json)
    if not as_json and "modelfile" in forms and code == 0:
        echo(f"Next: `ollama create {run.id} -f {as_argument(where['modelfile'])}`")
    return code
