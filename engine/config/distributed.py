"""The distributed section: how the processes of a run divide its work and its memory."""

from typing import Annotated, Literal

from engine.config.section import Advanced, Auto, Expert, Ge, Le, Section, Source, Title, Unit, Words


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

    nodes: Annotated[int, Ge(1), Le(1024), Title("Nodes"), Advanced, Source("torch: torchrun")] = 1
    """On how many machines the run works, each with as many devices as `run.devices` says. Above 1 the run's folder lies where
    all of them see it, and each is told its place: `workbench train FILE --nodes 2 --node-rank 1 --rdzv-endpoint HOST:PORT`,
    or `workbench submit FILE --nodes 2` for all at once. Each device takes batches of its own, as on one machine."""

    dp_replicate_size: Annotated[
        int,
        Ge(1),
        Le(65536),
        Title("Replicas"),
        Advanced,
        Source("accelerate: ParallelismConfig; torch: fully_shard"),
    ] = 1
    """With fsdp2, how many groups of processes hold the whole model between them, each process a share of its group's (hybrid
    sharding, HSDP). Layers are put together within a group, gradients averaged over all: less is sent between groups, and
    each process holds more. On several machines as many as `nodes` keeps the shares of a group on one machine. 1: one group."""

    dp_shard_size: Annotated[
        Annotated[int, Ge(1), Le(65536)] | None,
        Title("Shares of a replica"),
        Advanced,
        Source("accelerate: ParallelismConfig; torch: fully_shard"),
    ] = None
    """With fsdp2, over how many processes each replica is shared out. Times `dp_replicate_size` it is the number of all
    processes. Empty: as many as there are for each replica."""

    ddp_timeout: Annotated[
        int,
        Ge(5),
        Le(1_000_000_000),
        Title("Longest wait"),
        Unit("seconds"),
        Expert,
        Source("transformers: TrainingArguments"),
    ] = 1800
    """For how long a process may wait for the others in one collective (averaging gradients, putting a layer together). Then
    the run is ended, the process that is waited for is named with where it is, and `run.max_restarts` may start it again.
    Raise it where one of them alone does something long, such as preparing very many rows."""

    reshard_after_forward: Annotated[
        bool | Auto,
        Title("Reshard after forward"),
        Expert,
        Source("torch: fully_shard; ZeRO-3 and 2, arXiv:1910.02054"),
    ] = "auto"
    """With fsdp2, let go of a layer's weights after its forward pass and put them together again for the backward pass.
    Off keeps them in between: half of the messages, and the memory of all layers' weights. `auto` keeps them where the
    estimate then fills each GPU to 85 % at most, after what is computed again was chosen. The step is the same."""

    cpu_offload: Annotated[bool, Title("Shares in main memory"), Expert, Source("torch: CPUOffloadPolicy")] = False
    """With fsdp2 on GPUs, keep each process's share of weights, gradients and optimizer states in main memory, where the
    optimizer also steps. A GPU then holds the layers that are computed and their activations alone; each layer is copied
    to it twice a step, and a step takes longer by that and by the optimizer's on the CPU."""

    context_parallel_size: Annotated[
        int,
        Ge(1),
        Le(1024),
        Title("GPUs a row"),
        Advanced,
        Source("torch: context_parallel (ring attention); arXiv:2310.01889"),
    ] = 1
    """Over how many GPUs the tokens of each row are divided (context parallelism). Each computes its part of the row and
    keeps the activations of that part alone; keys and values go round between them in each layer, so that every token sees
    all that it would on one GPU. For rows too long for one: SFT and pretraining, unpacked, in bfloat16. The loss is that of
    one GPU. It divides the number of all processes; groups of so many take the batches that single GPUs would."""

    expert_parallel_size: Annotated[
        int,
        Ge(1),
        Le(1024),
        Title("Devices that share experts"),
        Advanced,
        Source("transformers: DistributedConfig, expert parallelism; arXiv:2006.16668"),
    ] = 1
    """Over how many devices the experts of a mixture are divided (expert parallelism). Each holds so many fewer of each layer's
    experts, and of the adapters on them, and everything else whole; it takes batches of its own, and its tokens go to the
    devices that hold their experts and come back. The step is that of one device at the same global batch. With
    `ddp`, for LoRA and full weights, experts in few bits among them: the experts of Qwen3-30B-A3B in bfloat16 take 58 GB, and 29 GB a device with 2. It divides the number of experts and
    that of all processes; with fewer than all, groups of so many hold all experts each."""
