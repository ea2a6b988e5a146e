"""`kernels.use_liger_kernel`: norms, rotary embeddings and gates by the kernels of the package liger-kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from engine.config.coercion import coerce
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.kernels import LIGER_PARTS
from engine.config.rule import Refused, leave_out, one_of, refused, rule
from engine.config.tree import RunConfig, fields
from engine.errors import nearest
from engine.features import compile
from engine.features.feature import TIMED, no_mixed_precision
from engine.kernels.requirements import CAPABILITY

SETTING, PARTS = fields.kernels.use_liger_kernel, fields.kernels.liger_kernel_config
AFTER = ("auto_compose", "fp32_norms", "fused_norm_rope", "quantization_aware", "tiled_mlp")
"""What others compute by then is left to them."""
PACKAGE = "liger-kernel"
INSTALL = f"pip install {PACKAGE}"
EARNS = 1.03
"""So many times as fast as the best without it must a combination with it be, to be chosen by timing."""
_UNSET = leave_out(SETTING, "let it be chosen")

refused(
    __name__,
    Refused(
        "liger-kernel-needs-a-gpu",
        SETTING,
        one_of(True),
        "false or auto without a GPU",
        "Its kernels run on a GPU; a CPU has torch's own operations.",
        _UNSET,
        gpu=False,
    ),
    Refused(
        "liger-kernel-needs-a-card-of-today",
        SETTING,
        one_of(True),
        "false or auto on {gpu.name}",
        f"Triton compiles its kernels for compute capability {'.'.join(map(str, CAPABILITY))} and above, and this card has {{has}}.",
        _UNSET,
        below=CAPABILITY,
    ),
    Refused(
        "liger-kernel-needs-its-package",
        SETTING,
        one_of(True),
        f"false or auto without the package {PACKAGE}",
        f"Install it with `{INSTALL}`, or leave the setting out.",
        _UNSET,
        without=PACKAGE,
    ),
    Refused(
        "liger-kernel-needs-the-layers-on-the-card",
        SETTING,
        one_of(True),
        "false or auto with memory.layer_offloading",
        "Each layer is held to its class before the first step, while its weights wait on the host.",
        _UNSET,
        beside={fields.memory.layer_offloading: bool},
    ),
    no_mixed_precision("liger-kernel-has-no-mixed-precision", SETTING),
)


def parts(config: RunConfig) -> tuple[str, ...]:
    """The parts that are to be Liger's where they have a place."""
    return tuple(part for part in LIGER_PARTS if config.kernels.liger_kernel_config.get(part, True))


def of_other_settings(part: str, config: RunConfig) -> str | None:
    """The setting that computes this part or does not go with it, as the reason why it is not Liger's; None where none is."""
    if part == "rope":
        if config.kernels.fused_attn_kernel is True:
            return "kernels.fused_attn_kernel computes it"
        if config.memory.gradient_checkpointing in ("selective", "medium"):
            return f"it writes over products that memory.gradient_checkpointing {config.memory.gradient_checkpointing} keeps"
    if part in ("swiglu", "geglu"):
        if config.kernels.fused_lora is True and config.adapter.kind == "lora":
            return "kernels.fused_lora computes it"
        if config.memory.tiled_mlp:
            return "memory.tiled_mlp computes it"
    if part == "rms_norm" and config.memory.fp32_norms:
        return "memory.fp32_norms computes it"
    return None


def in_force(config: RunConfig, facts: Facts) -> bool | Literal["auto"]:
    """Whether Liger's kernels are taken; `auto` where that is chosen by timing."""
    asked = config.kernels.use_liger_kernel
    return chosen(config, facts)[0] if asked == "auto" else asked


def chosen(config: RunConfig, facts: Facts) -> tuple[bool | Literal["auto"], str]:
    """What `auto` takes, and why."""
    if not config.kernels.kernel_auto_compose:
        return False, "it is taken where it is asked for"
    if facts.packages is None:
        return False, f"whether the package {PACKAGE} is installed is seen at launch"
    if facts.packages.get(PACKAGE) is None:
        return False, f"the package {PACKAGE} is not installed (`{INSTALL}`)"
    if facts.machine is not None and not facts.machine.gpus:
        return False, "there is no GPU"
    if config.model.dtype == "float16":
        return False, "float16 trains under autocast"
    if compile.in_force(config, facts) is True:
        return False, _COMPILED[0].lower() + _COMPILED[1:]
    return "auto", TIMED


_COMPILED = "Compiled layers make norms, rotations and gates together with what is around them"


@rule(reads=(SETTING, fields.kernels.torch_compile, fields.kernels.torch_compile_options))
def liger_kernel_is_not_compiled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.use_liger_kernel is True and compile.in_force(config, facts) is True:
        rule_text = "false or auto with kernels.torch_compile"
        yield must(SETTING.path, rule_text, True, f"{_COMPILED}: keep one of the two.", fix=_UNSET)


@rule(reads=(SETTING, fields.kernels.torch_compile, fields.kernels.kernel_auto_compose))
def compiled_layers_are_faster_than_liger_kernel(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    kernels = config.kernels
    if kernels.use_liger_kernel is not True or kernels.torch_compile != "auto" or kernels.torch_compile_options:
        return
    without = config.with_values({SETTING: False, fields.kernels.kernel_auto_compose: False})
    if compile.chosen(without, facts)[0] is True:
        todo = (
            "Left out, layers would be compiled, and TRL's steps with Liger took 1.85 times the time of those (LoRA on an 8B, "
            "ragged rows, H200)."
        )
        yield must(SETTING.path, "left out to be quick", True, todo, severity="hint", fix=_UNSET)


@rule(reads=(PARTS,))
def liger_kernel_config_names_parts(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for key, value in config.kernels.liger_kernel_config.items():
        path = f"{PARTS.path}.{key}"
        if key in ("cross_entropy", "fused_linear_cross_entropy"):
            if value is not False:
                todo = "The loss is kernels.use_cut_ce's: remove it."
                yield must(path, "false or left out", value, todo, fix=Fix("remove it", unset=(path,)))
        elif key not in LIGER_PARTS:
            close = nearest(str(key), LIGER_PARTS)
            yield must(
                path, f"one of {', '.join(LIGER_PARTS)}", key, f"Did you mean {close}?" if close else "Remove it."
            )
        elif not isinstance(value, bool):
            switch = coerce(fields.kernels.kernel_auto_compose, value)
            meant = Fix(f"write it as {str(switch).lower()}", {path: switch}) if isinstance(switch, bool) else None
            todo = f"Write {str(switch).lower()}." if meant else "Change it, or leave it out for true."
            yield must(path, "true or false", value, todo, fix=meant)


@rule(
    reads=(
        SETTING,
        PARTS,
        fields.kernels.fused_attn_kernel,
        fields.kernels.fused_lora,
        fields.memory.gradient_checkpointing,
        fields.memory.tiled_mlp,
        fields.memory.fp32_norms,
    )
)
def liger_kernel_has_a_part(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.use_liger_kernel is not True:
        return
    asked = parts(config)
    reasons = {part: of_other_settings(part, config) for part in asked}
    if not asked:
        yield must(SETTING.path, "false where all parts are off", True, f"Name a part in {PARTS.path}.", fix=_UNSET)
    elif all(reasons.values()):
        told = "; ".join(dict.fromkeys(f"{part}: {reason}" for part, reason in reasons.items()))
        yield must(SETTING.path, "false where no part is left to it", True, f"Parts and why: {told}.", fix=_UNSET)
    for part, reason in reasons.items():
        if reason is not None and config.kernels.liger_kernel_config.get(part) is True:
            path = f"{PARTS.path}.{part}"
            todo = f"{reason[0].upper()}{reason[1:]}: keep one of the two."
            yield must(path, "false or left out", True, todo, fix=Fix("remove it", unset=(path,)))
