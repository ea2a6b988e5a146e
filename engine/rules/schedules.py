"""Rules about the schedule of the learning rate: its warm-up, its own settings, schedules that are another under a second name."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.method import LEARNING_RATES
from engine.config.rule import rule
from engine.config.schedules import SCHEDULES
from engine.config.tree import RunConfig, fields
from engine.errors import nearest
from engine.facts.counts import total_steps
from engine.rules.own_settings import own_settings

_SCHEDULE, _OWN = fields.optim.lr_scheduler_type, fields.optim.lr_scheduler_kwargs


@rule(reads=(_SCHEDULE, _OWN))
def lr_scheduler_kwargs_are_the_schedules_own(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    name = config.optim.lr_scheduler_type
    yield from own_settings(_OWN.path, config.optim.lr_scheduler_kwargs, SCHEDULES[name], f"the schedule {name}")


@rule(reads=(_SCHEDULE, _OWN))
def a_schedule_is_no_other_by_a_second_name(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    name, own = config.optim.lr_scheduler_type, config.optim.lr_scheduler_kwargs
    if any(nearest(str(key), SCHEDULES[name]) for key in own if key not in SCHEDULES[name]):
        return  # a misspelt one, which the rule above tells, may be what makes it differ
    if name == "cosine_with_restarts" and own.get("num_cycles", 1) == 1:
        path = f"{_OWN.path}.num_cycles"
        todo = "One cycle is the schedule cosine: give their number, or take that."
        yield must(path, f"2 or more with {name}", 1, todo, fix=Fix("set it to 2", {path: 2}))
    elif name == "polynomial" and own.get("power", 1) == 1 and "lr_end" not in own:
        path = f"{_OWN.path}.power"
        todo = "A power of 1 is the schedule linear: give power or lr_end, or take that."
        yield must(path, f"other than 1 with {name}", own.get("power", 1), todo, fix=Fix("set it to 2", {path: 2.0}))


@rule(reads=(_SCHEDULE, _OWN, fields.optim.learning_rate, fields.method.kind, fields.adapter.kind))
def a_falling_rate_ends_below_its_start(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """transformers refuses such a schedule only when the trainer is built."""
    if config.optim.lr_scheduler_type != "polynomial":
        return
    path, rate = f"{_OWN.path}.lr_end", config.optim.learning_rate
    top = LEARNING_RATES[config.method.kind, config.adapter.kind] if rate == "auto" else rate
    own = SCHEDULES["polynomial"]["lr_end"]
    end = config.optim.lr_scheduler_kwargs.get("lr_end", own.default)
    if own.fits(end) and end >= top:
        todo = "The rate falls from the one to the other."
        fix = Fix("take a tenth of it", {path: top / 10})
        yield must(path, f"below the learning rate {top:g} (optim.learning_rate)", end, todo, fix=fix)


@rule(reads=(fields.optim.lr_scheduler_type, fields.optim.warmup_steps))
def warmup_needs_a_schedule_that_has_it(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, warmup = fields.optim.warmup_steps.path, config.optim.warmup_steps
    schedule = fields.optim.lr_scheduler_type.path
    if warmup and config.optim.lr_scheduler_type == "constant":
        fix = Fix("take constant_with_warmup", {schedule: "constant_with_warmup"})
        yield must(
            path,
            "0 with the schedule constant, which has no warm-up",
            warmup,
            "Take constant_with_warmup, or remove it.",
            fix=fix,
        )
    if not warmup and config.optim.lr_scheduler_type == "constant_with_warmup":
        fix = Fix("take constant", {schedule: "constant"})
        yield must(
            path, "above 0 with the schedule constant_with_warmup", 0, "Give the warm-up, or take constant.", fix=fix
        )


@rule(reads=(fields.optim.warmup_steps,))
def warmup_is_steps_or_a_share(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, warmup = fields.optim.warmup_steps.path, config.optim.warmup_steps
    if warmup > 1 and warmup != int(warmup):
        todo = "Below 1 it is a share of all steps, from 1 on a number of steps."
        yield must(
            path, "a whole number from 1 on", warmup, todo, fix=Fix(f"set it to {round(warmup)}", {path: round(warmup)})
        )


@rule(reads=(fields.optim.warmup_steps, fields.optim.max_steps, fields.optim.num_train_epochs))
def warmup_ends_before_the_run(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, warmup, steps = fields.optim.warmup_steps.path, config.optim.warmup_steps, total_steps(config, facts)
    if steps is not None and warmup >= 1 and warmup >= steps:
        todo = "The learning rate would never reach its value. A share such as 0.03 fits every length."
        yield must(path, f"less than the {steps:,} steps of the run", warmup, todo, fix=Fix("take 3 %", {path: 0.03}))
