"""`kernels.fused_attn_kernel`: the norm and the rotation of queries and keys in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.kernels import NORM_ROPE_MODELS, ROPE_MODELS
from engine.config.rule import Refused, leave_out, one_of, refused, rule
from engine.config.tree import RunConfig, fields
from engine.facts.counts import known_model
from engine.features import compile
from engine.features.feature import TIMED
from engine.kernels.requirements import CAPABILITY

SETTING = fields.kernels.fused_attn_kernel
AFTER = ("auto_compose", "fp32_norms")
"""The kernel reads the norms' weights as they are by then."""
_UNSET = leave_out(SETTING, "let it be chosen")

refused(
    __name__,
    Refused(
        "fused-attention-needs-a-gpu",
        SETTING,
        one_of(True),
        "false or auto without a GPU",
        "The kernel runs on a GPU; a CPU has torch's own operations.",
        _UNSET,
        gpu=False,
    ),
    Refused(
        "fused-attention-needs-a-card-of-today",
        SETTING,
        one_of(True),
        "false or auto on {gpu.name}",
        f"The kernel is compiled for compute capability {'.'.join(map(str, CAPABILITY))} and above, and this card has {{has}}.",
        _UNSET,
        below=CAPABILITY,
    ),
)


def chosen(config: RunConfig, facts: Facts) -> tuple[bool | Literal["auto"], str]:
    """What `auto` takes, and why."""
    return ("auto", TIMED) if config.kernels.kernel_auto_compose else (False, "it is taken where it is asked for")


@rule(reads=(SETTING, fields.model.name))
def fused_attention_knows_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, model = SETTING.path, known_model(config, facts)
    if config.kernels.fused_attn_kernel is not True or model is None:
        return
    served = NORM_ROPE_MODELS + ROPE_MODELS
    if model.model_type and model.model_type not in served:
        todo = f"Its attention does not norm and rotate queries and keys as the kernels do, which serve {', '.join(served)}."
        rule_text = f"false or auto for the model type {model.model_type}"
        yield must(path, rule_text, True, todo, fix=Fix("let it be chosen", unset=(path,)))


@rule(reads=(SETTING, fields.kernels.torch_compile, fields.model.name))
def rotation_alone_is_left_to_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, model = SETTING.path, known_model(config, facts)
    if config.kernels.fused_attn_kernel is not True or model is None:
        return
    if model.model_type in ROPE_MODELS and compile.in_force(config, facts) is True:
        todo = (
            "Compiled layers make the rotation by themselves, which was measured faster there: the kernel serves passes that "
            "are not compiled, as in sampling."
        )
        rule_text = f"false or auto in compiled layers for the model type {model.model_type}, which has no norms there"
        yield must(path, rule_text, True, todo, severity="hint", fix=Fix("let it be chosen", unset=(path,)))
