"""The consequences of a config in closed form: batch, steps, tokens, parameters, bytes, time. Torch-free, under 1 ms.

Both frontends show it after each edit. Every number is `None` while a fact it needs is not known. The arithmetic is
`engine.facts.counts` and `engine.planning.memory_model`, which the rules use too; here it is put together for showing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from engine.config.facts import DataFacts, Facts
from engine.config.tree import RunConfig
from engine.facts import counts as counted
from engine.planning import memory_model
from engine.planning.auto import resolved
from engine.planning.messages import Exchange, exchange
from engine.planning.speed import card_batch_seconds, operations, streaming_share, time_source

# What a CPU core does, for a first guess at the time.
_CPU_FLOPS_PER_CORE = 2.0e10
_CPU_SLOW_BFLOAT16 = 2.5e9
# Seconds of one core that no size changes: until the libraries are loaded, and of a step and a batch's layer beside the
# products (EPYC, torch 2.13: 6.1 to 7.8 s; 15 ms; 2.1 ms, 2.9 with LoRA).
_CPU_START, _CPU_STEP, _CPU_LAYER = 7.0, 0.015, 0.0025

_OF_ROWS = ("truncated_share", "masked_rows", "dropped_rows", "packing_efficiency", "seconds_left", "tokens_per_second")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What launching this config would mean. Bytes are bytes, time is seconds, `None` is not known yet."""

    effective_batch: int | None = None
    steps: int | None = None
    steps_per_epoch: int | None = None
    tokens_per_epoch: int | None = None
    truncated_share: float | None = None
    eval_rows: int | None = None
    """Rows that are held out; 0 where none are."""
    evaluations: int | None = None
    """How often they are measured in the run."""
    masked_rows: int | None = None
    dropped_rows: int | None = None
    packing_efficiency: float | None = None
    """Share of the packs that is tokens of rows."""
    images: int | None = None
    """Images that an epoch shows; 0 where the rows are text."""
    image_tokens: int | None = None
    """Tokens of them."""
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    checkpoint_bytes: int | None = None
    checkpoints_bytes: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    memory_total: int | None = None
    device_bytes: int | None = None
    communication_seconds: float | None = None
    """What a step takes because devices send each other messages and wait for the slowest; part of `seconds_left`."""
    communication_bytes: int | None = None
    """What one device sends in a step."""
    communication_by: str = ""
    """How, and at which speed, in words."""
    seconds_left: float | None = None
    seconds_by: str = ""
    """What the time on a GPU is told by, in words: steps measured on such a card, or its published speed."""
    tokens_per_second: float | None = None
    """Tokens of rows over that time, on all GPUs together."""
    exact: bool = False
    """Whether rows and tokens were counted rather than guessed."""
    counted: Literal["all", "sample"] | None = None
    """Over which rows the numbers that hang on their tokens are."""

    def as_json(self) -> dict[str, Any]:
        """All numbers as plain data; those that hang on tokens as `shares` has them."""
        values = asdict(self)
        del values["counted"]
        return {**values, **self.shares()}

    def shares(self) -> dict[str, dict[str, Any]]:
        """What becomes of the rows, each with the rows it was counted over: all, a sample, or none yet."""
        known = {name: getattr(self, name) for name in _OF_ROWS}
        return {
            name: {"value": value, "counted": self.counted if value is not None else None}
            for name, value in known.items()
        }

    def changes(self, before: Estimate) -> dict[str, float]:
        """What differs from an earlier estimate, number by number: the change of one edit."""
        differences: dict[str, float] = {}
        for number in fields(self):
            now, then = getattr(self, number.name), getattr(before, number.name)
            if isinstance(now, (int, float)) and isinstance(then, (int, float)) and now != then:
                differences[number.name] = now - then
        return differences


def estimate(config: RunConfig, facts: Facts | None = None) -> Estimate:
    """The consequences of this config by what is known so far."""
    facts = facts or Facts()
    whole = resolved(config, facts)
    data = facts.data
    counts = counted.parameters(whole, facts)
    memory = memory_model.memory(whole, facts, checkpointing=whole.memory.gradient_checkpointing) or {}
    checkpoint = memory_model.checkpoint_bytes(whole, facts)
    steps = counted.total_steps(whole, facts)
    batches = counted.batches_per_epoch(whole, facts)
    per_epoch = -(-batches // whole.optim.gradient_accumulation_steps) if batches else None
    tokens = data.tokens if data else None
    sent = _exchange(whole, facts, counts, per_epoch)
    seconds = _seconds(whole, facts, counts, steps, per_epoch, sent.seconds if sent else 0.0)
    speed = _speed(whole, facts, counts, steps, per_epoch, seconds)
    return Estimate(
        effective_batch=counted.effective_batch(whole),
        steps=steps,
        steps_per_epoch=per_epoch,
        tokens_per_epoch=tokens,
        truncated_share=_too_long(whole, data),
        eval_rows=counted.eval_rows(whole, facts),
        evaluations=_evaluations(whole, steps),
        masked_rows=_of_all(whole, data, data.masked if data else None),
        dropped_rows=_left_out(whole, data),
        images=data.images if data and data.holds_for(whole) else None,
        image_tokens=data.all_image_tokens if data and data.holds_for(whole) else None,
        packing_efficiency=data.packing_efficiency if data and data.holds_for(whole) else None,
        trainable_parameters=counts.trained if counts else None,
        total_parameters=counts.base + counts.adapter if counts else None,
        checkpoint_bytes=checkpoint,
        checkpoints_bytes=_kept(whole, checkpoint, steps),
        memory=memory,
        memory_total=sum(memory.values()) if memory else None,
        device_bytes=memory_model.device_bytes(config, facts),
        communication_seconds=sent.seconds if sent else None,
        communication_bytes=round(sent.sent) if sent else None,
        communication_by=sent.way if sent else "",
        seconds_left=seconds,
        seconds_by=speed[1],
        tokens_per_second=speed[0],
        exact=bool(data and data.exact),
        counted=data.counted if data else None,
    )


def _speed(
    config: RunConfig,
    facts: Facts,
    counts: counted.Parameters | None,
    steps: int | None,
    per_epoch: int | None,
    seconds: float | None,
) -> tuple[float | None, str]:
    """Tokens a second on the GPUs, and what that is told by; nothing where the time is not known or there is no GPU."""
    data = facts.data
    if not seconds or counts is None or not steps or not per_epoch or data is None or not data.tokens:
        return None, ""
    words = time_source(config, facts, counts, data.tokens / (per_epoch * config.optim.gradient_accumulation_steps))
    return (data.tokens * steps / per_epoch / seconds, words) if words else (None, "")


def _evaluations(config: RunConfig, steps: int | None) -> int | None:
    if not config.data.evaluates:
        return 0
    if steps is None or config.run.eval_steps == "auto":
        return None
    # The last step is measured too.
    return -(-steps // config.run.eval_steps)


def _too_long(config: RunConfig, data: DataFacts | None) -> float | None:
    """The share of rows longer than the limit, by their lengths where they were counted for another."""
    if data is None or not data.source_rows:
        return None
    number = data.truncated if data.holds_for(config) else data.longer_than(config.data.max_length)
    return None if number is None else number / data.source_rows


def _of_all(config: RunConfig, data: DataFacts | None, number: int | None) -> int | None:
    """A number of rows looked at, for all rows; None where it was counted under other limits."""
    if data is None or number is None or not data.holds_for(config):
        return None
    return round(number * data.total / data.source_rows) if data.total and data.source_rows else number


def _left_out(config: RunConfig, data: DataFacts | None) -> int | None:
    """Rows that training leaves out for any reason."""
    if data is None or data.dropped is None:
        return None
    return _of_all(config, data, data.dropped + (data.masked or 0) + (data.identical or 0) + (data.bad or 0))


def _kept(config: RunConfig, checkpoint: int | None, steps: int | None) -> int | None:
    """Disk at its fullest: the checkpoints kept, the best one, and the one being written."""
    if checkpoint is None:
        return None
    best = int(config.data.evaluates)
    written = steps // config.run.save_steps + 1 if steps is not None else config.run.save_total_limit + 1
    return checkpoint * (min(written, config.run.save_total_limit + 1) + best)


def _exchange(
    config: RunConfig, facts: Facts, counts: counted.Parameters | None, per_epoch: int | None
) -> Exchange | None:
    """What cards send each other in a step; None where the time of a step is not known."""
    data = facts.data
    if config.method.rows == "prompts" or counts is None or not per_epoch or data is None or not data.tokens:
        return None
    tokens = data.tokens / (per_epoch * config.optim.gradient_accumulation_steps)
    seconds = card_batch_seconds(config, facts, counts, tokens)
    return None if seconds is None else exchange(config, facts, counts, seconds, tokens)


def _seconds(
    config: RunConfig,
    facts: Facts,
    counts: counted.Parameters | None,
    steps: int | None,
    per_epoch: int | None,
    communication: float,
) -> float | None:
    """A first guess: 6 FLOP a parameter and token (8 with checkpointing, a third less for a frozen base), and `communication`
    of cards in each step.

    On a card no less than the host takes to launch the layers; on a CPU it is for a machine as busy as it was when it was
    looked at.
    None for a method that samples answers: how long they will be, which is most of the work, nobody knows before.
    """
    data, machine = facts.data, facts.machine
    if config.method.rows == "prompts":
        return None
    if counts is None or steps is None or not per_epoch or machine is None or data is None or not data.tokens:
        return None
    if not machine.gpus:
        work = operations(config) * counts.base * data.tokens * steps / per_epoch
        work *= 1 + (streaming_share(config, facts) or 0.0)
        slow = machine.slow_bfloat16 and config.model.dtype == "bfloat16"
        batch = _CPU_LAYER * ((facts.model.layers if facts.model else None) or 0)
        fixed = _CPU_START + steps * (_CPU_STEP + config.optim.gradient_accumulation_steps * batch)
        alone = fixed + work / ((_CPU_SLOW_BFLOAT16 if slow else _CPU_FLOPS_PER_CORE) * (machine.cpu_count or 1))
        return alone / machine.cpu_share
    accumulated = config.optim.gradient_accumulation_steps
    seconds = card_batch_seconds(config, facts, counts, data.tokens / (per_epoch * accumulated))
    return None if seconds is None else (seconds * accumulated + communication) * steps
