"""What a config will do, as a paragraph for people: this model, these rows, learned this way, this long, this much, this is kept.

One text for the review of app and notebook and for the commands. Every figure is the estimate's or a fact's; what is not
known is called so, with what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.config.adapter import Lora
from engine.config.data import DataSource
from engine.config.facts import Facts
from engine.config.files import short_path
from engine.config.tree import RunConfig
from engine.errors import redact, visible
from engine.facts.counts import device_count, train_rows
from engine.features.packed_experts import EXPERTS_ALONE
from engine.figures import brief, count, large, number, percent, size, size_of
from engine.planning import sharding
from engine.planning.estimate import Estimate

NAMED = 2
"""So many sources are named; of more their number is said."""


def paragraph(config: RunConfig, facts: Facts, estimate: Estimate, runs_dir: Path | None = None) -> str:
    """The sentences, in one line. `runs_dir` is where the run would go, if that is known."""
    sentences = [_learns(config, facts), _trained(config, estimate), _long(config, facts, estimate)]
    sentences += [_devices(config, facts), _memory(facts, estimate), _kept(config, facts, estimate, runs_dir)]
    sentences.append(_pushed(config))
    return redact(" ".join(filter(None, sentences)))


def _learns(config: RunConfig, facts: Facts) -> str:
    method = config.method
    aim = method.description.partition(": ")[2] or method.called
    known = facts.model.parameters if facts.model is not None else None
    size_ = f" ({large(known)} parameters)" if known else " (its size is not known yet)" if config.model.name else ""
    name = visible(config.model.name) or "A model that is still to be named"
    how = "is made into" if method.called.startswith(("a ", "an ")) else "is trained with"
    return f"{name}{size_} {how} {method.called} ({aim}) on {_rows(config, facts)}."


def _rows(config: RunConfig, facts: Facts) -> str:
    train, data = config.data.train, facts.data
    if not train:
        return "rows that are still to be named"
    counted = data is not None and data.holds_for(config) and data.counted is not None
    if not counted or data is None or data.rows is None:
        rows = "the rows, not counted yet,"
    else:
        about = "about " if data.counted == "sample" else ""
        rows = f"{about}{_many(data.rows, 'pack' if config.data.packing else 'row')}"
    known = data.eval_rows if counted and data is not None else None
    return f"{rows} of {_names(train)}{_held_out_clause(config, known)}"


def _held_out_clause(config: RunConfig, known: int | None) -> str:
    """Which rows are held out, and how many where that is `known`; nothing where none are."""
    if config.data.eval:
        held = f"{_many(known, 'held-out row')}" if known else "held-out rows"
        return f" and judged by {held} of {_names(config.data.eval)}"
    if part := config.data.val_set_size:
        share = f"{number(100 * part)} %" if part < 1 else count(int(part))
        return f" and judged by {f'{count(known)} others' if known else f'{share} of them'}, held out"
    return ""


def _names(sources: Sequence[DataSource]) -> str:
    """The sources by name; of many how many there are."""
    names = list(dict.fromkeys(short_path(visible(source.path)) for source in sources))
    return " and ".join(names) if len(names) <= NAMED else f"{len(names)} sources"


def _trained(config: RunConfig, estimate: Estimate) -> str:
    trained, total = estimate.trainable_parameters, estimate.total_parameters
    how_many = "" if trained is None else large(trained)
    if isinstance(config.adapter, Lora):
        share = f", {percent(trained / total, 1)} of all" if trained and total else ""
        held = {"nf4": ", held in 4 bits,", **dict.fromkeys(EXPERTS_ALONE, ", its experts held in 4 bits,")}
        bits = held.get(config.model.quantization, "")
        size_ = f"{how_many} parameters" if how_many else "how many parameters is not known yet"
        lora = f"LoRA, rank {config.adapter.r}: {size_}{share}"
        path = config.adapter.path
        of = f" of {short_path(visible(path))}, which go on from there" if path else ""
        return f"The model{bits} stays as it is; what learns are small matrices beside it{of} ({lora})."
    if trained is not None and total is not None and trained < total:
        return f"{how_many} of its {large(total)} parameters learn."
    return f"All of its parameters learn{f' ({how_many})' if trained is not None else ''}."


def _many(value: int, what: str) -> str:
    return f"{count(value)} {what}{'' if value == 1 else 's'}"


def _long(config: RunConfig, facts: Facts, estimate: Estimate) -> str:
    machine = facts.machine
    where = "" if machine is None else " on the GPU" if machine.gpus else " on the CPU"
    if config.optim.max_steps is not None:
        steps = f"It takes {_many(config.optim.max_steps, 'step')}"
    elif estimate.steps is not None:
        epochs = config.optim.num_train_epochs
        steps = f"It takes {_many(estimate.steps, 'step')}, {'once' if epochs == 1 else f'{number(epochs)} times'} over the rows"
    else:
        steps = "How many steps it takes is not known until the rows are counted"
    many, rows = estimate.effective_batch, None if config.data.packing else train_rows(config, facts)
    # A batch holds no more rows than there are.
    fewer = many is not None and rows is not None and 0 < rows < many
    all_rows = "the only row" if rows == 1 else f"all {_many(rows or 0, 'row')}"
    batch = f", {all_rows} each" if fewer else f", {_many(many, 'row')} each" if many else ""
    if estimate.seconds_left is None:
        return f"{steps}{batch}; how long is not known yet."
    by = f", {estimate.seconds_by}" if estimate.seconds_by else ""
    return f"{steps}{batch}: roughly {brief(estimate.seconds_left)}{where}{by}."


def _devices(config: RunConfig, facts: Facts) -> str:
    """How several devices hold the model, and why."""
    many, strategy = device_count(config), config.distributed.strategy
    if many == 1:
        return ""
    taken, why = (strategy, "") if strategy != "auto" else sharding.chosen(config, facts)
    how = "each holds a share of the model (fsdp2)" if taken == "fsdp2" else "each holds the whole model (ddp)"
    if taken == "fsdp2" and (replicas := config.distributed.dp_replicate_size) > 1:
        how = f"every {many // replicas} hold one of {replicas} replicas of the model between them (fsdp2)"
    if (shared := config.distributed.expert_parallel_size) > 1:
        how, why = "each holds its part of the experts and all else of the model (ddp)", ""
    if config.distributed.cpu_offload and taken == "fsdp2":
        how += ", in main memory"
    sentence = f"Of {many} devices {how}{f': {why}' if why else ''}."
    if (ring := config.distributed.context_parallel_size) > 1:
        sentence += f" {'All' if ring == many else f'Every {ring}'} divide the tokens of each row between them."
    if shared > 1:
        sentence += f" {'All' if shared == many else f'Every {shared}'} divide the experts between them."
    return sentence


def _memory(facts: Facts, estimate: Estimate) -> str:
    need, room = estimate.memory_total, estimate.device_bytes
    if need is None:
        return "How much memory it needs is not known yet."
    if room is None:
        return f"It needs about {size(need)} of memory."
    what = "of the card" if facts.machine is not None and facts.machine.gpus else "of memory"
    fits = "" if need <= room else ", more than there is"
    return f"It needs about {size_of(need, room)} {what}{fits}."


def _kept(config: RunConfig, facts: Facts, estimate: Estimate, runs_dir: Path | None) -> str:
    many = f"the newest {config.run.save_total_limit} checkpoints"
    if estimate.checkpoints_bytes is not None and estimate.checkpoints_bytes == estimate.checkpoint_bytes:
        many = "the checkpoint of its end"  # nothing is saved before
    each = " each" if many.endswith("s") else ""
    each_bytes = f" ({size(estimate.checkpoint_bytes)}{each})" if estimate.checkpoint_bytes is not None else ""
    need = estimate.checkpoints_bytes
    disk = f"up to {size(need)} of disk" if need is not None else "how much disk they take is not known yet"
    free = facts.machine.disk_free_bytes if facts.machine is not None else None
    room = f", {size(free)} are free" if free is not None else ""
    where = f" in {short_path(visible(str(runs_dir)))}" if runs_dir is not None else ""
    return f"Kept are {many}{each_bytes}, curves, samples and log{where}: {disk}{room}."


def _pushed(config: RunConfig) -> str:
    """Where checkpoints are sent to, and who can read them there."""
    run = config.run
    if not run.push_to_hub or not run.hub_model_id:
        return ""
    what = "Its last checkpoint is sent" if run.hub_strategy == "end" else "Its checkpoints are sent while it trains"
    kind = "a private repository" if run.hub_private_repo else "open to everybody unless it is there and private"
    return f"{what} to {visible(run.hub_model_id)} on the hub, {kind}."
