"""`optim.bf16_full_eval`: held-out rows are computed with bfloat16 weights."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import rule
from engine.config.tree import RunConfig, fields

SETTING = fields.optim.bf16_full_eval
AFTER = ()


@rule(
    reads=(SETTING, fields.data.eval, fields.data.val_set_size, fields.model.dtype, fields.model.quantization),
)
def bf16_eval_needs_float32_and_held_out_rows(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, fix = SETTING.path, Fix("leave it out", unset=(SETTING.path,))
    if not config.optim.bf16_full_eval:
        return
    if config.model.dtype != "float32" or config.model.quantization != "none":
        held = config.model.quantization if config.model.quantization != "none" else config.model.dtype
        todo = "It is for weights that are trained in float32; others are computed as they are."
        yield must(path, f"left out with {held} weights", True, todo, fix=fix)
    elif not config.data.evaluates:
        yield must(
            path,
            "left out without held-out data",
            True,
            "Name data.eval, give data.val_set_size, or remove it.",
            fix=fix,
        )
    elif facts.machine is not None and any(gpu.capability < (8, 0) for gpu in facts.machine.gpus):
        name = facts.machine.gpus[0].name
        yield must(path, f"left out on {name}", True, "Only cards since 2020 compute bfloat16.", fix=fix)
