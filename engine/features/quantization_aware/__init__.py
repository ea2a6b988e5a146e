"""`kernels.quantization_aware`: linear layers compute with FP8 products, or with int8 rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts.counts import known_model
from engine.facts.stored import PACKED
from engine.features import compile
from engine.features.feature import Layers

SETTING = fields.kernels.quantization_aware
AFTER = ()

LEAST_CAPABILITY = (9, 0)
"""The compute capability of the oldest card whose products torchao makes in FP8."""
ROUNDED_TRAINED, ROUNDED_INPUT = 4, 5
"""Bytes more of a rounded weight's number where it is trained, and of a number of its input."""
_OFF = leave_out(SETTING, "turn it off")
_QUANTIZATION, _SCALES = fields.model.quantization, fields.kernels.fp8_recipe_name


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """Rounding to int8 keeps the rounded weights and inputs beside what is kept without it."""
    if config.kernels.quantization_aware is not True:
        return layers
    weight = layers.size + (ROUNDED_TRAINED if config.adapter.kind == "none" else 0)
    rounded = sum(
        count * (wide_in * wide_out * weight + layers.tokens * wide_in * ROUNDED_INPUT)
        for _, wide_in, wide_out, count in layers.model.linears
    )
    return replace(layers, beside=layers.beside + rounded)


refused(
    __name__,
    Refused(
        "fp8-needs-a-gpu",
        SETTING,
        one_of("fp8"),
        "false or true without a GPU",
        "FP8 products are a GPU's, of compute capability 9.0 or more.",
        _OFF,
        gpu=False,
    ),
    Refused(
        "fp8-needs-a-card-that-has-it",
        SETTING,
        one_of("fp8"),
        "false or true on {gpu.name}",
        "It needs compute capability 9.0, as an H100 has it; this card has {has}.",
        _OFF,
        below=LEAST_CAPABILITY,
    ),
    Refused(
        "quantization-aware-needs-torchao",
        SETTING,
        other_than(False),
        "false without the package torchao",
        "Install it with `pip install torchao`, or turn it off.",
        _OFF,
        without="torchao",
    ),
    Refused(
        "fp8-needs-bfloat16",
        fields.model.dtype,
        other_than("bfloat16"),
        "bfloat16 while kernels.quantization_aware is fp8",
        "Results of FP8 products are bfloat16: take that, or set kernels.quantization_aware to false.",
        take(fields.model.dtype, "bfloat16"),
        beside={SETTING: one_of("fp8")},
    ),
    Refused(
        "int8-rounding-needs-plain-weights",
        SETTING,
        one_of(True),
        "false while model.quantization is {config.model.quantization}",
        "Weights held as {config.model.quantization} are rounded already: keep one of the two.",
        _OFF,
        beside={_QUANTIZATION: other_than("none")},
    ),
    Refused(
        "fp8-needs-plain-weights",
        SETTING,
        one_of("fp8"),
        "false while model.quantization is {config.model.quantization}",
        "FP8 products are made of bfloat16 weights, not of {config.model.quantization}: keep one of the two.",
        _OFF,
        beside={_QUANTIZATION: other_than("none")},
    ),
    Refused(
        "fp8-scales-need-fp8",
        _SCALES,
        other_than(_SCALES.default),
        "left out while kernels.quantization_aware is not fp8",
        "It says how FP8 products are scaled, and there are none: remove it, or set quantization_aware to fp8.",
        leave_out(_SCALES, "remove it"),
        beside={SETTING: other_than("fp8")},
    ),
)


@rule(reads=(SETTING, fields.model.name, fields.adapter.kind))
def weights_stored_in_fp8_are_not_rounded_again(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if model is None or model.stored not in ("fp8", *PACKED) or config.adapter.kind != "lora":
        return
    if config.kernels.quantization_aware is not False:
        held = "FP8" if model.stored == "fp8" else f"packed integers ({model.stored})"
        todo = f"Under an adapter they stay as stored, in {held}, and are not rounded another time."
        rule_text = f"false for {config.model.name}, whose weights are stored in {held}"
        yield must(SETTING.path, rule_text, config.kernels.quantization_aware, todo, fix=_OFF)


@rule(
    reads=(
        SETTING,
        fields.kernels.torch_compile,
        fields.kernels.torch_compile_options,
        fields.kernels.kernel_auto_compose,
    )
)
def fp8_wants_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    kernels, path = config.kernels, fields.kernels.torch_compile.path
    compiled = compile.in_force(config, facts) in (True, "auto")
    if kernels.quantization_aware == "fp8" and not compiled:
        todo = "Uncompiled, rounding takes more time than FP8 saves: 2.2 times bfloat16's step with LoRA on an H200."
        fix = Fix("compile the layers", {path: True})
        rule_text = "true for kernels.quantization_aware: fp8 to be quick"
        yield must(path, rule_text, kernels.torch_compile, todo, severity="warning", fix=fix)
