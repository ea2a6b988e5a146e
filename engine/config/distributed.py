"""The distributed section: how the processes of a run divide its work and its memory."""

from typing import Annotated, Literal

from pydantic import Field

from engine.config.section import Advanced, Auto, Expert, Section, Source, Title, Words


class Distributed(Section):
    """What several processes share. `run.devices` says how many there are; one alone has nothing to share."""

    strategy: Annotated[
        Literal["ddp", "fsdp2"] | Auto,
        Title("Strategy"),
        Words(ddp="ddp: each holds the whole model", fsdp2="fsdp2: each holds a share"),
        Advanced,
        Source("arXiv:2006.15704, arXiv:2304.11277"),
    ] = "auto"
    """How the processes hold the model. `ddp` (DistributedDataParallel): each holds all of it, and they average gradients.
    `fsdp2` (torch's fully_shard): each holds its share of weights, gradients and optimizer states, and layers are put
    together as they are needed, which costs messages. Same step, to rounding. `auto` takes ddp where the estimate fits into
    each device and fsdp2 where it does not."""

    nodes: Annotated[int, Field(ge=1, le=1024), Title("Nodes"), Advanced, Source("torch: torchrun")] = 1
    """On how many machines the run works, each with as many devices as `run.devices` says. Above 1 the run's folder lies where
    all of them see it, and each is told its place: `workbench train FILE --nodes 2 --node-rank 1 --rdzv-endpoint HOST:PORT`,
    or `workbench submit FILE --nodes 2` for all at once. Each device takes batches of its own, as on one machine."""

    reshard_after_forward: Annotated[bool, Title("Reshard after forward"), Expert, Source("torch: fully_shard")] = True
    """With fsdp2, let go of a layer's weights after its forward pass and put them together again for the backward pass.
    Off keeps them in between: fewer messages, and the memory of all layers' weights."""
