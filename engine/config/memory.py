"""The memory section: what is traded for memory, and at which price in time."""

from __future__ import annotations

from typing import Annotated, Literal

from engine.config.section import Auto, Expert, Later, Section, Source, Title, Words


class Memory(Section):
    """Ways to fit a larger model or longer rows."""

    gradient_checkpointing: Annotated[
        bool | Literal["selective", "medium", "full"] | Auto,
        Title("Checkpointing"),
        Words(
            selective="selective: products are kept",
            medium="medium: narrow products are kept",
            full="full: about 30 % slower",
        ),
        Source("arXiv:1604.06174"),
    ] = "auto"
    """Forget intermediate results and compute them again in the backward pass: much less memory, about 30 % slower.
    `full` keeps the input of each layer alone. `selective` computes only element-wise work again and `medium` the widest
    products too; choosing takes the host about 5 ms a layer, so on a card they pay for large layers only. `auto` takes
    the cheapest that the estimate says will fit."""

    activation_offloading: Annotated[Literal["cpu", "disk"] | None, Expert] = None
    """Move intermediate results until they are needed: `cpu` to the host's memory, beside the computation, and `disk` to a
    private file in the run folder, which costs the time that the disk takes."""

    layer_offloading: Annotated[bool, Later(True), Expert] = False
    """Keep the frozen layers in the host's memory and bring them in one by one."""

    tiled_mlp: Annotated[bool, Title("Tiled MLP"), Later(True), Expert] = False
    """Compute the feed-forward layers in pieces of the sequence, for very long rows."""

    fp32_norms: Annotated[bool, Title("Norms in float32"), Later(True), Expert] = False
    """Keep normalisation layers in float32 under sharded training."""
