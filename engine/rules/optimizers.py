"""Rules about the choice of the optimizer: its package, the settings it listens to, and what it cannot go with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import not_

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.optimizers import KINDS, MATRICES_ONLY, PROJECTED, own_value
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, several, take
from engine.config.tree import RunConfig, fields
from engine.facts.counts import known_model
from engine.rules.own_settings import own_settings

_OPTIM, _BETA1 = fields.optim.optim, fields.optim.adam_beta1
_RATIO, _EMBEDDED = fields.adapter.loraplus_lr_ratio, fields.adapter.loraplus_lr_embedding
_ADAMW = leave_out(_OPTIM, "take adamw_torch_fused")

refused(
    __name__,
    *(
        Refused(
            "optimizers-of-packages-need-them",
            _OPTIM,
            one_of(*(name for name, kind in KINDS.items() if kind.package == package)),
            f"an optimizer of torch without the package {package}",
            f"Install it with `pip install {package}`, or take adamw_torch_fused.",
            _ADAMW,
            without=package,
        )
        for package in sorted({kind.package for kind in KINDS.values()} - {""})
    ),
    Refused(
        "paging-needs-a-gpu",
        _OPTIM,
        lambda name: name.startswith("paged_"),
        "an optimizer without paging on a CPU",
        "On a CPU the states are in the host's memory already: take adamw_8bit.",
        take(_OPTIM, "adamw_8bit"),
        gpu=False,
    ),
    Refused(
        "schedule-free-averages-with-beta1",
        _BETA1,
        not_,
        "above 0 with schedule_free_adamw",
        "It weighs the average against the newest weights.",
        leave_out(_BETA1, "take the usual value"),
        beside={_OPTIM: one_of("schedule_free_adamw")},
    ),
    Refused(
        "galore-trains-full-weights",
        _OPTIM,
        one_of(*PROJECTED),
        "an optimizer for adapters while adapter.kind is lora",
        "LoRA's factors are of low rank already: set adapter.kind to none, or take adamw_torch_fused.",
        _ADAMW,
        beside={fields.adapter.kind: one_of("lora")},
    ),
    Refused(
        "faster-second-matrices-need-one-optimizer",
        _RATIO,
        bool,
        "left out with the optimizer {config.optim.optim}",
        "LoRA+ is about Adam's steps, and that one sizes its steps by the matrix; take adamw_torch_fused.",
        _ADAMW,
        beside={_OPTIM: one_of(*MATRICES_ONLY)},
    ),
    Refused(
        "faster-second-matrices-where-experts-are-whole",
        _RATIO,
        bool,
        "left out with distributed.expert_parallel_size {config.distributed.expert_parallel_size}",
        "It was not tried where experts are divided.",
        leave_out(_RATIO),
        beside={fields.distributed.expert_parallel_size: several},
    ),
    Refused(
        "a-rate-of-embeddings-is-part-of-loraplus",
        _EMBEDDED,
        other_than(_EMBEDDED.default),
        "left out while adapter.loraplus_lr_ratio is empty",
        "Embeddings have the rate of all then.",
        leave_out(_EMBEDDED),
        beside={_RATIO: one_of(None)},
    ),
    Refused(
        "projected-layers-need-galore",
        fields.optim.optim_target_modules,
        other_than(fields.optim.optim_target_modules.default),
        "left out with the optimizer {config.optim.optim}, which does not project",
        f"Remove it, or take {' or '.join(sorted(PROJECTED))}.",
        leave_out(fields.optim.optim_target_modules, "remove it"),
        beside={_OPTIM: other_than(*PROJECTED)},
    ),
)


@rule(
    reads=(
        fields.optim.optim,
        fields.optim.adam_beta1,
        fields.optim.adam_beta2,
        fields.optim.adam_epsilon,
        fields.adapter.kind,
    )
)
def adam_settings_need_adam(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    used = () if _matrices_alone(config) else KINDS[config.optim.optim].adam
    for spec in (fields.optim.adam_beta1, fields.optim.adam_beta2, fields.optim.adam_epsilon):
        value = spec.value(config)
        if value != spec.default and spec.name not in used:
            rule_text = f"left out with the optimizer {config.optim.optim}, which does not use it"
            yield must(
                spec.path,
                rule_text,
                value,
                "Remove it, or take adamw_torch_fused.",
                fix=Fix("remove it", unset=(spec.path,)),
            )


def _matrices_alone(config: RunConfig) -> bool:
    """Whether AdamW has nothing to move beside the optimizer: plain LoRA trains matrices inside the layers and no more."""
    adapter = config.adapter
    if config.optim.optim not in MATRICES_ONLY or adapter.kind != "lora" or config.method.kind == "ppo":
        return False
    return not (adapter.modules_to_save or adapter.use_dora or adapter.target_parameters) and adapter.bias == "none"


@rule(reads=(_RATIO, _EMBEDDED, fields.adapter.target_modules))
def a_rate_of_embeddings_needs_an_adapter_on_them(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter = config.adapter
    if (
        adapter.kind != "lora"
        or adapter.loraplus_lr_ratio is None
        or adapter.loraplus_lr_embedding == _EMBEDDED.default
    ):
        return
    targets = adapter.target_modules
    named = targets != "all-linear" and (
        isinstance(targets, str) or any("emb" in name or "wte" in name for name in targets)
    )
    if not named:
        todo = "No adapter is on embeddings, so there is nothing to learn at that rate."
        rule_text = "left out while adapter.target_modules names no embedding"
        yield must(_EMBEDDED.path, rule_text, adapter.loraplus_lr_embedding, todo, fix=leave_out(_EMBEDDED))


@rule(reads=(fields.optim.optim, fields.optim.optim_args))
def optim_args_are_the_optimizers_own(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    name, path = config.optim.optim, fields.optim.optim_args.path
    yield from own_settings(path, config.optim.optim_args, KINDS[name].own, f"the optimizer {name}")


@rule(reads=(fields.optim.optim, fields.optim.lr_scheduler_type))
def schedule_free_has_no_schedule(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, schedule = fields.optim.lr_scheduler_type.path, config.optim.lr_scheduler_type
    if config.optim.optim == "schedule_free_adamw" and not schedule.startswith("constant"):
        flat = "constant_with_warmup" if config.optim.warmup_steps else "constant"
        todo = "It averages its weights in place of a falling rate; a warm-up alone may stand beside it."
        rule_text = "constant or constant_with_warmup with schedule_free_adamw"
        yield must(path, rule_text, schedule, todo, fix=Fix(f"take {flat}", {path: flat}))


@rule(reads=(fields.optim.optim, fields.optim.optim_target_modules))
def projected_layers_are_named(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec, given = fields.optim.optim_target_modules, config.optim.optim_target_modules
    if config.optim.optim not in PROJECTED:
        return
    fix = Fix("all linear layers", unset=(spec.path,))
    if not given or (isinstance(given, str) and not given.strip()):
        yield must(spec.path, "all-linear, names or a regular expression", None, "Name the layers.", fix=fix)
    for pattern in [given] if isinstance(given, str) else given:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            yield must(spec.path, "a regular expression", pattern, "Its brackets or stars do not add up.", fix=fix)


@rule(reads=(fields.optim.optim, fields.optim.optim_args, fields.model.name))
def galore_has_a_low_rank(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, name = known_model(config, facts), config.optim.optim
    if name not in PROJECTED or model is None or not model.linears:
        return
    rank = own_value(name, config.optim.optim_args, "rank")
    side = max(min(wide_in, wide_out) for _, wide_in, wide_out, _ in model.linears)
    if KINDS[name].own["rank"].fits(rank) and rank >= side:
        path, low = f"{fields.optim.optim_args.path}.rank", max(1, side // 4)
        todo = "At a layer's whole width the projection saves nothing."
        rule_text = f"below {side:,}, the shorter side of the model's layers"
        yield must(path, rule_text, rank, todo, fix=Fix(f"take {low}", {path: low}))
