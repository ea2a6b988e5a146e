"""The memory section: what is traded for memory, and at which price in time."""

from typing import Annotated, Literal

from engine.config.section import Auto, Expert, Ge, Le, Section, Source, Title, Unit, Words


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
    products too; choosing takes the host about 5 ms a layer, so on a card they pay for large layers and for compiled
    ones, where the choice is made once. `auto` takes the cheapest that the estimate says will fit; a run chooses again once
    its rows are counted, and where others hold memory of the card."""

    recompute_num_layers: Annotated[
        Annotated[int, Ge(1), Le(10_000)] | Auto | None, Title("Layers computed again"), Unit("layers"), Expert
    ] = None
    """How many layers `gradient_checkpointing` is for, counted from the first; the layers behind them keep everything. Empty:
    all. Gradients are the same. Each of them costs what it keeps. Since the last layers are differentiated first, one of them costs
    no memory at the peak where a layer takes more than the head's scores (`kernels.cut_ce_workspace`). `auto` leaves out as
    many as fill the card to 85 % by the estimate; of compiled layers none where that is less than an eighth, since layers
    that keep everything are compiled once more."""

    activation_offloading: Annotated[Literal["cpu", "disk"] | None, Expert] = None
    """Move intermediate results until they are needed: `cpu` to the host's memory, beside the computation, and `disk` to a
    private file in the run folder (or below $WORKBENCH_SCRATCH, where that names a faster disk), which costs the time that
    the disk takes."""

    layer_offloading: Annotated[bool, Expert] = False
    """Keep the frozen weights of the layers, packed experts among them, in the host's memory and bring them to the card one
    layer ahead, forward and backward: two layers' weights on the card in place of all. What is trained stays there. Costs no time where a batch
    computes a layer longer than the bus moves one: on an H100 from about 6,000 tokens on with 16-bit weights, 10,000 where
    layers are compiled, a quarter of that with 4-bit ones. Generation brings every layer in for every token."""

    tiled_mlp: Annotated[bool, Title("Tiled MLP"), Expert, Source("arXiv:2506.13996")] = False
    """Compute the feed-forward blocks in tiles of the batch's tokens and again in the backward pass, so that only one
    tile's intermediate results are held: for very long rows. Same gradients. Beside full checkpointing it costs no time.
    Packed experts are unpacked once for all tiles."""

    tiled_mlp_tokens: Annotated[
        Annotated[int, Ge(16), Le(2**24)] | None, Title("Tokens a tile"), Unit("tokens"), Expert
    ] = None
    """The most tokens of a tile. Empty: 32,768, or a quarter of the batch where it has no more than that. Smaller tiles
    hold less at nearly the same speed down to some thousand tokens: on an H200 4,096 take one percent longer than 32,768
    where the block is frozen, four percent where it is trained."""

    tiled_mlp_fp32_sums: Annotated[bool, Title("Sums of tiles in float32"), Expert] = False
    """Add the gradients of a block's tiles in float32, for four bytes more per trained weight of one block. Otherwise they
    are added in the weights' own format, as gradients of batches are."""

    fp32_norms: Annotated[bool, Title("Norms in float32"), Expert] = False
    """Hold the weights of normalisation layers in float32 and compute there, between layers of 16 bits: steps that are too
    small for a bfloat16 weight still count, and a norm's result is rounded once. A model has few such weights, each two
    bytes longer. Checkpoints hold them in float32; a model that is loaded anew in bfloat16 rounds them."""
