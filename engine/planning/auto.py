"""What every `auto` becomes: one table, each entry a value with the reason for it.

A function takes the config and the facts and gives `(value, reason)`. Where the machine is not known yet the careful
value is taken and the reason says that the launch decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine import figures
from engine.config.adapter_folder import adapter_of, open_settings
from engine.config.facts import Facts
from engine.config.method import LEARNING_RATES, METHODS
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.facts import counts
from engine.features import compile, cut_cross_entropy, tiled_mlp
from engine.features.table import FEATURES
from engine.planning import loading, memory_model, sharding

Resolve = Callable[[RunConfig, Facts], tuple[Any, str]]

FIT = memory_model.FIT


def _learning_rate(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    method, adapter = config.method.kind, config.adapter.kind
    weights = "LoRA" if adapter == "lora" else "full weights"
    usual, words = LEARNING_RATES[method, adapter], f"the usual rate for {METHODS[method].called} with {weights}"
    if config.optim.optim.startswith("lion"):
        return usual / 5, f"a fifth of {words}: Lion wants 3 to 10 times less than AdamW (arXiv:2302.06675)"
    return usual, words


def _reference(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    if not getattr(config.method, "beta", 0):
        usual = "copy" if config.adapter.kind == "none" else "adapter_copy" if config.adapter.path else "adapter_off"
        return usual, "no reference is kept while method.beta is 0"
    if config.adapter.kind == "lora" and config.adapter.path:
        return "adapter_copy", "training goes on from an adapter that has learned"
    if config.adapter.kind == "lora":
        return "adapter_off", "the model without its adapter is the reference and costs no memory"
    return "copy", "full weights are trained, so the reference is a frozen copy"


def _cache_implementation(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    if facts.machine is None:
        return "dynamic", "the machine is not known yet; static at launch where there is a GPU"
    if not facts.machine.gpus:
        return "dynamic", "there is no GPU that would replay a token's pass"
    if config.memory.layer_offloading or config.distributed.strategy == "fsdp2":
        return "dynamic", "the layers are not all on one GPU"
    model = counts.known_model(config, facts)
    if model is not None and model.experts:
        return "dynamic", "which experts compute a token is asked by the host"
    return "static", "a token's pass is recorded once a sampling and replayed, which spares the host its launches"


def _skip_zero_advantage(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    if getattr(config.method, "beta", 0):
        return False, "method.beta holds each answer to the reference, also one that teaches nothing"
    model = counts.known_model(config, facts)
    if model is not None and model.experts:
        return False, "a mixture's experts are balanced, and counted, over all tokens"
    if compile.in_force(config, facts) is not False:
        return False, "compiled layers would wait again for fewer rows"
    return True, "their gradient is zero"


def _tf32(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    if facts.machine is None:
        return False, "the machine is not known yet; on at launch where the card has it"
    if not facts.machine.gpus:
        return False, "there is no GPU"
    if all(gpu.capability >= (8, 0) for gpu in facts.machine.gpus):
        return True, f"{facts.machine.gpus[0].name} has it"
    return False, f"{facts.machine.gpus[0].name} does not have it"


# To choose what to keep, the host looks at every operation: 5.5 ms a layer and batch (28 layers, 4 x 2,048 tokens, H200),
# in which the card multiplies this often. A layer that takes less is sooner computed again whole, unless it is compiled:
# then the choice is made once.
TIERS_PAY = 2e12


def _gradient_checkpointing(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    is_compiled = compile.in_force(config, facts) is True
    config = config.with_values({fields.kernels.torch_compile: is_compiled, **_cut(config, facts)})
    plain = memory_model.memory(config, facts, checkpointing=False)
    room = memory_model.device_bytes(config, facts)
    if plain is None or room is None:
        what = "the model's size" if plain is None else "the machine"
        big = facts.machine is None or bool(facts.machine.gpus)
        return (
            big,
            f"{what} is not known yet, so {'the careful choice' if big else 'off, as on a CPU it only costs time'}",
        )
    need = sum(plain.values())
    if need <= FIT * room:
        return False, f"{figures.size(need)} without it fit into {figures.size(room)}"
    without = f"without it {figures.size(need)} would be needed and there are {figures.size(room)}"
    if (
        facts.machine is not None
        and facts.machine.gpus
        and not is_compiled
        and (memory_model.layer_operations(config, facts) or 0) < TIERS_PAY
    ):
        return True, f"{without}; layers of this size are computed again sooner than chosen from"
    in_pieces = is_compiled and config.distributed.expert_parallel_size > 1
    for tier in () if in_pieces else ("selective", "medium"):
        classes = memory_model.memory(config, facts, checkpointing=tier) or {}
        if sum(classes.values()) <= FIT * room:
            return tier, f"{without}; {tier} needs {figures.size(sum(classes.values()))}"
    return True, without


FILLED = 0.85
"""Share of a card up to which layers are spared being computed again, and scores kept: where the estimate errs, a step must
still fit."""
WORTH_COMPILING = 1 / 8
"""Share of the layers that must be spared where they are compiled, since those that keep everything are a graph of their own."""


def _recompute_num_layers(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    tier = _tier(config, facts)
    model, room = counts.known_model(config, facts), memory_model.device_bytes(config, facts)
    if not tier:
        return None, "no layer is computed again"
    if model is None or not model.layers or room is None:
        return None, f"all, as {'the machine' if room is None else 'the model'} is not known yet"
    compiled = compile.in_force(config, facts)
    config = config.with_values({fields.kernels.torch_compile: compiled, **_cut(config, facts)})
    for again in range(1, model.layers):
        held = config.with_values({fields.memory.recompute_num_layers: again})
        need = sum((memory_model.memory(held, facts, tier) or {}).values())
        if need <= FILLED * room:
            break
    else:
        return None, "all: the card has no room for what more of them would keep"
    spared = model.layers - again
    if compiled and spared < WORTH_COMPILING * model.layers:
        return None, f"all: there is room to spare {spared}, which compiling layers twice would not earn"
    return again, f"{spared} of {model.layers} layers keep everything: {figures.size(need)} of {figures.size(room)}"


def _cut_ce_workspace(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    """The largest of the head's sizes that fits beside what the chosen tier keeps: computing layers again costs more than the
    head's scores do."""
    taken = {**_cut(config, facts), fields.kernels.torch_compile: compile.in_force(config, facts)}
    again = _tier(config, facts)
    if config.memory.recompute_num_layers == "auto":
        taken[fields.memory.recompute_num_layers] = _recompute_num_layers(config, facts)[0]
    config = config.with_values(taken)
    sizes, why = cut_cross_entropy.room_sizes(config, facts)
    # Several processes have no second look at what else lies on their cards; the room is that of the smallest.
    of_each = " of each card" if counts.device_count(config) > 1 else ""
    room = memory_model.device_bytes(config, facts)
    for size in sizes:
        held = config.with_values({fields.kernels.cut_ce_workspace: size})
        need = sum((memory_model.memory(held, facts, again) or {}).values())
        if room and 0 < need <= FILLED * room:
            return size, f"{why}; with {size:,} MiB of them {figures.size(need)} fit into {figures.size(room)}{of_each}"
    lacks = f", for which {'not every' if of_each else 'the'} card has {'' if of_each else 'no '}room" if sizes else ""
    return None, f"the usual size: {why}{lacks}"


def _reshard_after_forward(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    """Layers stay together in the room that is left by what saves computing them again, which is worth more of it."""
    spec = fields.distributed.reshard_after_forward
    room = memory_model.device_bytes(config, facts)
    if config.distributed.strategy != "fsdp2":
        return True, "each process holds the whole model"
    if facts.machine is None or room is None:
        return True, "the machine is not known yet, so the careful choice"
    if not facts.machine.gpus:
        return True, "there is no GPU"
    if config.distributed.cpu_offload:
        return True, "shares wait in main memory so that the GPU need not hold them"
    taken = {**_cut(config, facts), fields.kernels.torch_compile: compile.in_force(config, facts), spec: False}
    for of_room, choose in (
        (fields.memory.recompute_num_layers, _recompute_num_layers),
        (fields.kernels.cut_ce_workspace, _cut_ce_workspace),
    ):
        if of_room.value(config) == "auto":
            taken[of_room] = choose(config, facts)[0]
    need = sum((memory_model.memory(config.with_values(taken), facts, _tier(config, facts)) or {}).values())
    if not need:
        return True, "the model's size is not known yet, so the careful choice"
    filled = f"{figures.size(need)} of {figures.size(room)} on each GPU with layers kept together between the passes"
    if need <= FILLED * room:
        return False, f"{filled}, for half of the messages that put them together"
    return True, f"it would be {filled}"


def _tier(config: RunConfig, facts: Facts) -> Any:
    """What is computed again, chosen where that is left to us."""
    asked = config.memory.gradient_checkpointing
    return _gradient_checkpointing(config, facts)[0] if asked == "auto" else asked


def _cut(config: RunConfig, facts: Facts) -> dict[FieldSpec, Any]:
    """What becomes of the head's kernel where that is left to us."""
    spec = cut_cross_entropy.SETTING
    return {spec: cut_cross_entropy.chosen(config, facts)[0]} if spec.value(config) == "auto" else {}


def recomputed_within(room: int, config: RunConfig, facts: Facts) -> tuple[Any, str]:
    """What `memory.gradient_checkpointing: auto` becomes where so many bytes of each card are free."""
    return _gradient_checkpointing(config, _with_room(room, facts))


def spared_within(room: int, config: RunConfig, facts: Facts) -> tuple[Any, str]:
    """What `memory.recompute_num_layers: auto` becomes beside the config's tier where so many bytes of each card are free."""
    return _recompute_num_layers(config, _with_room(room, facts))


def _with_room(room: int, facts: Facts) -> Facts:
    if facts.machine is None:
        return facts
    gpus = tuple(replace(gpu, memory_bytes=min(room, gpu.memory_bytes)) for gpu in facts.machine.gpus)
    return replace(facts, machine=replace(facts.machine, gpus=gpus))


def _ten_times(label: str) -> Resolve:
    def resolve(config: RunConfig, facts: Facts) -> tuple[Any, str]:
        steps = counts.total_steps(config, facts)
        if steps is None:
            return 100, f"{label} every 100 steps while the number of steps is not known"
        every = max(1, round(steps / 10))
        times = steps // every
        return every, f"{label} {'ten' if times == 10 else f'{times:,}'} times in {steps:,} steps"

    return resolve


def _evaluations(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    wanted = config.run.evals_per_epoch
    if not config.data.evaluates:
        return _ten_times("evaluates")(config, facts)[0], "not used: no rows are held out"
    return (
        _ten_times("evaluates")(config, facts) if wanted is None else _in_an_epoch("evaluates", wanted, config, facts)
    )


def _in_an_epoch(label: str, wanted: int, config: RunConfig, facts: Facts) -> tuple[int, str]:
    steps = counts.steps_per_epoch(config, facts)
    times = f"{label} {wanted:,} times an epoch"
    if steps is None:
        return 100, f"{times}, whose steps are counted at launch"
    return counts.steps_between(wanted, steps), f"{times} of {steps:,} steps"


def _devices(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    if facts.machine is None or facts.machine.gpus:
        return 1, "one GPU, the freest at launch"
    return 1, "the CPU, as there is no GPU"


def _image_backend(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    version = None if facts.packages is None else facts.packages.get("torchvision")
    if version:
        return "torchvision", f"torchvision {version} is installed"
    return (
        "pil",
        "torchvision is not installed"
        if facts.packages is not None
        else "which others are installed is seen at launch",
    )


def _loader_processes(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    # The time of a batch hangs on what is computed again.
    return loading.chosen(config.with_values({fields.memory.gradient_checkpointing: _tier(config, facts)}), facts)


def _reads_images(config: RunConfig, facts: Facts) -> bool:
    """Whether images may be read: the model has a processor for them, or it is not known and rows have some."""
    if facts.model is not None and facts.model.name == config.model.name and facts.model.processor is not None:
        return facts.model.processor
    return any(seen.images for seen in (facts.sources or {}).values())


_CHOSEN: dict[FieldSpec, Resolve] = {
    **{feature.SETTING: feature.chosen for feature in FEATURES if feature.SETTING and hasattr(feature, "chosen")},
    fields.kernels.cut_ce_workspace: _cut_ce_workspace,
    fields.data.image_backend: _image_backend,
    fields.data.dataloader_num_workers: _loader_processes,
    fields.method.reference: _reference,
    fields.method.cache_implementation: _cache_implementation,
    fields.method.skip_zero_advantage: _skip_zero_advantage,
    fields.optim.learning_rate: _learning_rate,
    fields.optim.tf32: _tf32,
    fields.memory.gradient_checkpointing: _gradient_checkpointing,
    fields.memory.recompute_num_layers: _recompute_num_layers,
    fields.distributed.strategy: sharding.chosen,
    fields.distributed.reshard_after_forward: _reshard_after_forward,
    fields.run.devices: _devices,
    fields.run.eval_steps: _evaluations,
    fields.run.prompts_steps: _ten_times("samples"),
}
AUTO = {spec: _CHOSEN[spec] for spec in fields if spec in _CHOSEN}
"""Every setting with an `auto`, in the order of the sections; what a feature takes, the feature says."""

OF_IMAGES = (fields.data.image_backend, fields.data.dataloader_num_workers)
"""Those that matter where images are read."""
_RESHARD = fields.distributed.reshard_after_forward
"""It matters where a model is shared out."""


@dataclass(frozen=True, slots=True)
class Effective:
    """A setting that will not be used as it was written: `auto`, or one that the engine must change."""

    path: str
    requested: Any
    effective: Any
    reason: str


def effective(config: RunConfig, facts: Facts | None = None) -> tuple[Effective, ...]:
    """Requested -> effective for every setting that applies and is `auto`, and `max_steps` over epochs."""
    facts = facts or Facts()
    entries = []
    asked, config = config, _with_strategy(config, facts)
    for spec, resolve in AUTO.items():
        if spec in OF_IMAGES and not _reads_images(config, facts):
            continue  # no image is read, so nothing is said of it
        if spec == _RESHARD and config.distributed.strategy != "fsdp2":
            continue
        if spec.applies(asked) and spec.value(asked) == "auto":
            value, reason = resolve(asked if spec == sharding.SPEC else config, facts)
            entries.append(Effective(spec.path, "auto", value, reason))
    entries += _adapter_folder(config, facts)
    checkpointing = config.memory.gradient_checkpointing
    if checkpointing == "full":
        entries.append(
            Effective(fields.memory.gradient_checkpointing.path, "full", True, "every layer is computed again")
        )
    entries += _unused_room(config, facts)
    if config.memory.tiled_mlp and config.memory.tiled_mlp_tokens is None:
        tokens, size = counts.batch_tokens(config, facts), tiled_mlp.tile_tokens(config, facts)
        reason = f"tiles of a batch of at most {tokens:,} tokens"
        entries.append(Effective(fields.memory.tiled_mlp_tokens.path, None, size, reason))
    if (wanted := config.run.saves_per_epoch) is not None:
        every, reason = _in_an_epoch("keeps a checkpoint", wanted, config, facts)
        entries.append(Effective(fields.run.save_steps.path, config.run.save_steps, every, reason))
    if config.optim.per_device_eval_batch_size is None and config.data.evaluates:
        size = config.optim.per_device_train_batch_size
        path = fields.optim.per_device_eval_batch_size.path
        entries.append(Effective(path, None, size, "the training batch size"))
    return tuple(entries)


def _adapter_folder(config: RunConfig, facts: Facts) -> Iterator[Effective]:
    """What an adapter's own folder says it is, and of a run the checkpoint that is its newest one now."""
    known = adapter_of(config, facts)
    if known is None or known.problem:
        return
    spec = fields.adapter.path
    if known.folder != known.path:
        yield Effective(spec.path, known.path, known.folder, "where its files lie: of a run, its newest checkpoint")
    for setting, value in open_settings(known, facts).items():
        if setting.value(config) != value:
            yield Effective(setting.path, setting.value(config), value, "the adapter that training goes on from has it")


def _unused_room(config: RunConfig, facts: Facts) -> Iterator[Effective]:
    """A size of the head's scores beside a `use_cut_ce: auto` that becomes false has nothing to be the size of."""
    spec = fields.kernels.cut_ce_workspace
    asked = spec.value(config)
    if isinstance(asked, int) and config.kernels.use_cut_ce == "auto":
        taken, reason = cut_cross_entropy.chosen(config, facts)
        if taken is False:
            yield Effective(spec.path, asked, None, f"not used, as {cut_cross_entropy.SETTING.path} is false: {reason}")


def _with_strategy(config: RunConfig, facts: Facts) -> RunConfig:
    """The config by which all else is chosen: what fits, and which kernels serve, hangs on how the model is held."""
    if config.distributed.strategy != "auto" or sharding.chosen(config, facts)[0] == "ddp":
        return config
    return config.with_values({sharding.SPEC: "fsdp2"})


def resolved(config: RunConfig, facts: Facts | None = None) -> RunConfig:
    """The config with no `auto` left, but for kernels that are chosen by timing: what a run stores and the worker reads."""
    # Those that nothing is said of become something, too.
    quiet = {
        spec: AUTO[spec](config, facts or Facts())[0] for spec in (*OF_IMAGES, _RESHARD) if spec.value(config) == "auto"
    }
    return config.with_values(quiet | {fields[entry.path]: entry.effective for entry in effective(config, facts)})


def choices(config: RunConfig, facts: Facts | None = None) -> dict[str, dict[str, Any]]:
    """By path, what each setting that is `auto` becomes and why: kept in run.json, so that the receipt can say it."""
    room = fields.kernels.cut_ce_workspace.path  # a size that is given up is a choice, too
    chosen = (entry for entry in effective(config, facts) if entry.requested == "auto" or entry.path == room)
    return {entry.path: {"value": entry.effective, "reason": entry.reason} for entry in chosen}
