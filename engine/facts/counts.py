"""What can be counted before a run: rows, batches, steps, parameters, tokens. Pure, quick, and honest about gaps.

Counts of rows, batches, steps and parameters are `None` while a fact they need is unknown; tokens are then a guess within
the limit that the config sets. What all of it weighs is `engine.planning.memory_model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config.facts import Facts, ModelFacts
from engine.config.tree import RunConfig
from engine.facts.stored_linears import MAMBA
from engine.facts.unfrozen import matrices_by_name, trained_by_name


def device_count(config: RunConfig) -> int:
    """How many devices the run would use, over all its nodes."""
    return devices_a_node(config) * config.distributed.nodes


def shard_count(config: RunConfig) -> int:
    """Over how many devices a model is shared out: those of one replica with fsdp2, else one."""
    asked = config.distributed
    if asked.strategy != "fsdp2":
        return 1
    return asked.dp_shard_size or max(1, device_count(config) // asked.dp_replicate_size)


def devices_a_node(config: RunConfig) -> int:
    """How many devices the run would use on one machine."""
    devices = config.run.devices
    if isinstance(devices, list):
        return max(1, len(devices))
    return devices if isinstance(devices, int) else 1


def batch_count(config: RunConfig) -> int:
    """How many batches are computed at once: one on each device, or on each group of those that divide rows."""
    return max(1, device_count(config) // config.distributed.context_parallel_size)


def effective_batch(config: RunConfig) -> int:
    """Rows (or packs) that one optimizer step sees over all devices."""
    optim = config.optim
    return optim.per_device_train_batch_size * optim.gradient_accumulation_steps * batch_count(config)


def train_rows(config: RunConfig, facts: Facts) -> int | None:
    """Rows of one epoch: as prepared where that is known, else as the files say."""
    if facts.data is not None and facts.data.rows is not None:
        return facts.data.rows
    if facts.sources is None or not config.data.train:
        return None
    total, read = 0.0, 0
    for entry in config.data.train:
        source = facts.sources.get(entry.path)
        if source is None or source.rows is None:
            return None
        rows = source.rows if entry.rows is None else min(entry.rows, source.rows)
        total += rows * entry.weight
        read += rows
    held = config.data.val_set_size
    if held and not config.data.eval and read:
        total *= max(0, 1 - held_out_of(held, read) / read)
    return round(total)


def held_out_of(size: float, rows: int) -> int:
    """How many of so many rows `data.val_set_size` asks to hold out: a share below 1, else a number."""
    return max(1, round(size * rows)) if size < 1 else round(size)


def not_counted(config: RunConfig, facts: Facts) -> str:
    """That the rows are not counted yet, for whoever would read silence as all being well; empty once they are."""
    if not config.data.train or (facts.data is not None and facts.data.holds_for(config) and facts.data.counted):
        return ""
    return "rows not counted"


def eval_rows(config: RunConfig, facts: Facts) -> int | None:
    """Held-out rows: as prepared where that is known, else as the files say; 0 where none are."""
    if not config.data.evaluates:
        return 0
    if facts.data is not None and facts.data.eval_rows is not None:
        return facts.data.eval_rows
    entries = config.data.eval or config.data.train
    known = [(entry, (facts.sources or {}).get(entry.path)) for entry in entries]
    counts = [
        source.rows if entry.rows is None else min(entry.rows, source.rows)
        for entry, source in known
        if source is not None and source.rows is not None
    ]
    if len(counts) < len(known):
        return None
    size = config.data.val_set_size
    return sum(counts) if config.data.eval else held_out_of(size, sum(counts))


def batches_per_epoch(config: RunConfig, facts: Facts) -> int | None:
    """Batches of one device in one epoch; packing makes fewer, fuller ones, known once tokens are counted."""
    rows = train_rows(config, facts)
    if rows is None:
        return None
    if config.data.packing:
        if facts.data is None or facts.data.tokens is None:
            return None
        # best-fit packing fills about 97 % of each pack
        rows = math.ceil(facts.data.tokens / (0.97 * config.data.max_length))
    batch = config.optim.per_device_train_batch_size * batch_count(config)
    if config.method.rows == "prompts":
        return _sampled_batches(config, rows, batch)
    return math.ceil(rows / batch)


def _sampled_batches(config: RunConfig, prompts: int, batch: int) -> int:
    """Batches of answers that one epoch of prompts gives; prompts that do not fill a sampling are left out."""
    method, together = config.method, sampled_together(config)
    each = max(1, batch * together // getattr(method, "num_generations", 1))
    return prompts // each * together * getattr(method, "num_iterations", 1)


def sampled_together(config: RunConfig) -> int:
    """Batches whose answers are sampled at once."""
    return getattr(config.method, "steps_per_generation", None) or config.optim.gradient_accumulation_steps


def always_new(config: RunConfig) -> bool:
    """Whether all answers are used up before the weights move, as TRL reckons it, and none comes back later."""
    if getattr(config.method, "replay_buffer_size", 0) and not getattr(config.method, "replay_recompute_logps", True):
        return False
    uses = sampled_together(config) * getattr(config.method, "num_iterations", 1)
    return config.optim.gradient_accumulation_steps % uses == 0


def steps_a_sampling(config: RunConfig) -> int:
    """Optimizer steps that are trained on the answers of one sampling; 1 where a method samples none."""
    if config.method.rows != "prompts":
        return 1
    uses = sampled_together(config) * getattr(config.method, "num_iterations", 1)
    return max(1, math.ceil(uses / config.optim.gradient_accumulation_steps))


def rehearsed_steps(config: RunConfig) -> int:
    """The first step and those that one sampling serves, of which at most eight."""
    return 1 + min(8, steps_a_sampling(config))


def steps_per_epoch(config: RunConfig, facts: Facts) -> int | None:
    """Optimizer steps of one epoch."""
    batches = batches_per_epoch(config, facts)
    return None if batches is None else max(1, math.ceil(batches / config.optim.gradient_accumulation_steps))


def steps_between(times: int, steps: int) -> int:
    """Steps from one time to the next where something happens so many times in an epoch of so many steps."""
    return max(1, round(steps / times))


def total_steps(config: RunConfig, facts: Facts) -> int | None:
    """Optimizer steps of the whole run."""
    if config.optim.max_steps is not None:
        return config.optim.max_steps
    per_epoch = steps_per_epoch(config, facts)
    if per_epoch is None:
        return None
    return max(1, math.ceil(per_epoch * config.optim.num_train_epochs))


def known_model(config: RunConfig, facts: Facts) -> ModelFacts | None:
    """The model's facts, if they are those of the model that the config names now."""
    return facts.model if facts.model is not None and facts.model.name == config.model.name else None


def mlp_width(model: ModelFacts) -> int:
    """The width of a layer's MLP: the usual one where the model's files do not say."""
    return model.intermediate_size or 4 * (model.hidden_size or 0)


def products(model: ModelFacts) -> list[tuple[int, int]]:
    """Inner size and width of each matrix product of a dense decoder layer."""
    hidden, wide, width = model.hidden_size or 0, mlp_width(model), model.head_dim or 0
    q, kv = width * (model.heads or 0), width * (model.kv_heads or 0)
    return [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, wide), (hidden, wide), (wide, hidden)]


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many numbers are trained, and of which kind."""

    base: int
    trained_base: int
    adapter: int
    matrices: tuple[tuple[int, int, int], ...] = ()
    """Those of them that are matrices inside the layers, as (rows, columns, how many)."""
    on_experts: int = 0
    """Those of them that are experts, or adapters on them."""

    @property
    def trained(self) -> int:
        """All trained parameters."""
        return self.trained_base + self.adapter


def parameters(config: RunConfig, facts: Facts) -> Parameters | None:
    """Base, trained base and adapter parameters; nothing while the model's shape is unknown."""
    model = known_model(config, facts)
    if model is None or model.parameters is None:
        return None
    adapter = config.adapter
    if adapter.kind == "none":
        named = trained_by_name(model, adapter.unfrozen_parameters) if adapter.unfrozen_parameters else None
        if named is not None:
            return Parameters(model.parameters, named, 0, matrices_by_name(model, adapter.unfrozen_parameters))
        whole = tuple((wide_out, wide_in, count) for _, wide_in, wide_out, count in model.linears)
        on_experts = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.expert_weights)
        return Parameters(model.parameters, model.parameters, 0, whole, on_experts * (model.experts or 0))
    if not model.linears:
        return None
    trained, on_experts, factors = 0, 0, []
    for name, wide_in, wide_out, count in (*model.linears, *_that_see(config, model)):
        if adapter.target_modules == "all-linear" and name == "out_proj" and model.model_type in MAMBA:
            continue
        if _is_target(name, adapter.target_modules):
            trained += count * adapter.r * (wide_in + wide_out)
            factors += [(adapter.r, wide_in, count), (wide_out, adapter.r, count)]
            if adapter.use_dora:
                trained += count * wide_out
    for name, wide_in, wide_out, count in model.expert_weights:
        if any(target.rpartition(".")[2] == name for target in adapter.target_parameters):
            # PEFT gives each expert a pair of its own; those of a layer lie side by side.
            rank = adapter.r * (model.experts or 1)
            on_experts += count * rank * (wide_in + wide_out)
            factors += [(rank, wide_in, count), (wide_out, rank, count)]
    saved = sum(_whole_module(name, model) for name in adapter.modules_to_save)
    return Parameters(model.parameters, 0, trained + on_experts + saved, tuple(factors), on_experts)


def _that_see(config: RunConfig, model: ModelFacts) -> tuple[tuple[str, int, int, int], ...]:
    """Linear layers of the parts that see beside which adapters are put."""
    projector = model.projector if config.model.train_vision != "none" else ()
    return (*projector, *model.tower) if config.model.train_vision == "all" else projector


def _is_target(name: str, targets: str | list[str]) -> bool:
    import re

    if targets == "all-linear":
        return True
    if isinstance(targets, list):
        return any(name == target or target.endswith(f".{name}") or name.endswith(f".{target}") for target in targets)
    try:
        pattern = re.compile(targets)
    except re.error:
        return False
    block = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return any(pattern.fullmatch(full) for full in (name, f"model.layers.0.{block}.{name}", f"layers.0.{block}.{name}"))


def _whole_module(name: str, model: ModelFacts) -> int:
    if name in ("embed_tokens", "lm_head", "wte") and model.vocab_size and model.hidden_size:
        return model.vocab_size * model.hidden_size
    return 0


def longest_row(config: RunConfig, facts: Facts) -> int:
    """Tokens of the longest row of a batch: a pack is full, a prompt has its longest answer, otherwise
    as counted, else a guess within the limit."""
    limit = config.data.max_length
    if config.method.rows == "prompts":
        prompt = min(limit, facts.data.longest) if facts.data is not None and facts.data.longest else limit
        return prompt + int(getattr(config.method, "max_completion_length", 0))
    if config.data.packing or config.method.kind == "pretrain":
        return limit
    if facts.data is not None and facts.data.longest:
        return min(limit, facts.data.longest)
    return limit


def tokens_and_length(config: RunConfig, facts: Facts) -> tuple[int, int]:
    """Tokens of a batch that gradients flow through on one device, and of its longest sequence."""
    method, length = config.method, longest_row(config, facts)
    # The other half of a batch of rated answers only measures the drift, without gradients.
    sequences = 1 if method.rows == "rated" else method.sequences
    # Of devices that divide rows each has as many pieces of a row as every other.
    own = math.ceil(length / config.distributed.context_parallel_size)
    return config.optim.per_device_train_batch_size * own * sequences, length


def batch_tokens(config: RunConfig, facts: Facts) -> int:
    """Tokens of the largest batch that gradients flow through."""
    return tokens_and_length(config, facts)[0]
