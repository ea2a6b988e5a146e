"""`workbench merge RUN`: the adapter of a run merged into its base, or shares of its weights, as one model folder."""

from __future__ import annotations

from pathlib import Path

import click

from engine.errors import WorkbenchError
from engine.export.places import refuse_existing
from engine.export.process import request
from engine.run import store
from workbench.cli.output import print_json
from workbench.cli.places import PATH
from workbench.cli.taking_along import absolute, followed, part_line


@click.command(short_help="Merge a run's adapter, or its shares of weights, into one model.")
@click.argument("name", metavar="RUN")
@click.option(
    "--checkpoint", "step", type=int, metavar="N", help="The checkpoint of step N; else the newest whole one."
)
@click.option(
    "-o",
    "--output",
    "output",
    type=PATH,
    help="The new folder; else RUN-merged or RUN-packed here.",
)
@click.option(
    "--packed", is_flag=True, help="Into a base's own packed format (FP8, MXFP4, NVFP4, GPTQ, AWQ), rounded anew."
)
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(name: str, step: int | None, output: Path | None, packed: bool, runs: str | None, as_json: bool) -> int:
    """Merge the adapter into the base, in the base's number format, and check that it answers alike; a base that others
    quantized becomes one in 16 bits, or with --packed stays in its format, and it is told what rounding to it did. Full weights
    that the processes of a run wrote in shares (fsdp2) are put together into one folder.

    \b
    workbench merge my-0001
    workbench merge my-0001 --checkpoint 200 -o my-model
    workbench merge my-0001 --packed
    """
    run = store.find(name, store.runs_dir(runs))
    place = absolute(output, f"{run.id}-{'packed' if packed else 'merged'}")
    refuse_existing(place)
    asked = request("merge", run.path, checkpoint=step, places={"packed" if packed else "safetensors": place})
    result = followed(asked, as_json=True)
    part = result["parts"][0]
    if not part["ok"]:
        raise WorkbenchError(**part["error"])
    if as_json:
        print_json({"ok": True, "run": result["run"], "checkpoint": result["checkpoint"]} | {
            key: part[key] for key in ("path", "bytes", "parity")
        })  # fmt: skip
    else:
        part_line({**part, "form": "merged"})
    return 0
