"""Which linear layers `model.quantization: fp8` computes in FP8, and what it needs of a card: one rule for the loader, the
findings and the estimate.

A layer is served where its products in FP8, forward and for its input's gradient, gain clearly more than rounding costs.
Compiled after its norm, 8,192 tokens, one H100, ratio to bfloat16: 1024 to 1024 0.968, 2560 to 1024 0.906, 1024 to 3072
0.907, 2048 to 2048 0.857; the smallest that gains a tenth is the least. An 8B model, all of whose layers lie above, took
0.69 of bfloat16's step (H200, compiled).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts.counts import known_model
from engine.features import compile
from engine.features.feature import Layers

SETTING = fields.model.quantization
AFTER = ("compile",)
"""The layer that is measured at the first batch is called as it is called in training."""

LEAST_CAPABILITY = (8, 9)
"""The compute capability of the oldest card with FP8 products that have a scale for each row (Ada)."""
MULTIPLE = 16
"""Both sizes of a weight must be a multiple of this."""
SCALE = 4
"""Bytes of a row's scale."""
LEAST_NUMBERS = 2560 * 1024
"""Numbers of the smallest weight that is worth it."""
_OFF = leave_out(SETTING, "keep full precision")
ROUTERS = ("gate", "router")
"""Names of layers whose few results decide where a token goes: rounding them would send it elsewhere."""

refused(
    __name__,
    Refused(
        "fp8-base-needs-a-gpu",
        SETTING,
        one_of("fp8"),
        "none without a GPU",
        "Products in 8 bits are a GPU's, of compute capability 8.9 or more.",
        _OFF,
        gpu=False,
    ),
    Refused(
        "fp8-base-needs-a-card-that-has-it",
        SETTING,
        one_of("fp8"),
        "none, nf4, fp4 or int8 on {gpu.name}",
        "It needs compute capability 8.9; this card has {has}. nf4 runs on it and takes less room still.",
        take(SETTING, "nf4", "take 4-bit weights"),
        below=LEAST_CAPABILITY,
    ),
    Refused(
        "fp8-base-needs-bfloat16",
        fields.model.dtype,
        other_than("bfloat16"),
        "bfloat16 while model.quantization is fp8",
        "What comes of these products is bfloat16: take that, or set model.quantization to none.",
        take(fields.model.dtype, "bfloat16"),
        beside={SETTING: one_of("fp8")},
    ),
    Refused(
        "fp8-base-takes-plain-lora",
        fields.adapter.use_dora,
        bool,
        "false while model.quantization is fp8",
        "DoRA measures plain weights in every step: take plain LoRA, or set model.quantization to none.",
        leave_out(fields.adapter.use_dora, "take plain LoRA"),
        beside={SETTING: one_of("fp8"), fields.adapter.kind: one_of("lora")},
    ),
)


def why_not(name: str, rows: int, columns: int, *, least: int | None = None) -> str | None:
    """Why a layer of this name and shape stays as it is, in words that follow a count, or None where it is served."""
    least = LEAST_NUMBERS if least is None else least
    if name in ROUTERS:
        return "router"
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"of sizes that are no multiple of {MULTIPLE}"
    if rows * columns < least:
        return f"of fewer than {least:,} numbers, which would gain little"
    return None


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """Layers that are served hold a byte a number, and a scale for each row."""
    if not _requested(config):
        return layers
    saved = sum(
        count * wide_out * (wide_in * (layers.size - 1) - SCALE)
        for name, wide_in, wide_out, count in layers.model.linears
        if why_not(name, wide_out, wide_in) is None
    )
    return replace(layers, linears=layers.linears - saved)


def _requested(config: RunConfig) -> bool:
    return config.model.quantization == "fp8"


@rule(reads=(SETTING, fields.model.name))
def fp8_base_needs_layers_that_gain(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Where the model's shape is known, and it has no linear layer that would be computed in FP8."""
    model = known_model(config, facts)
    if not _requested(config) or model is None or not model.linears:
        return
    if all(why_not(name, wide_out, wide_in) for name, wide_in, wide_out, _ in model.linears):
        largest = max(wide_in * wide_out for _, wide_in, wide_out, _ in model.linears)
        todo = (
            f"Layers gain from {LEAST_NUMBERS:,} numbers on, in sizes that are multiples of {MULTIPLE}; "
            f"its largest has {largest:,}."
        )
        yield must(SETTING.path, f"none for {model.name}, whose layers are too small for it", "fp8", todo, fix=_OFF)


@rule(
    reads=(
        SETTING,
        fields.kernels.torch_compile,
        fields.kernels.torch_compile_options,
        fields.kernels.kernel_auto_compose,
    )
)
def fp8_base_wants_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, asked = fields.kernels.torch_compile.path, config.kernels.torch_compile
    if not _requested(config) or (asked is not False and facts.machine is None):
        return
    if compile.in_force(config, facts) is False:
        todo = "Uncompiled, each layer rounds its input by itself, in operations of their own."
        fix = Fix("compile the layers", {path: True})
        rule_text = "true for model.quantization: fp8 to be quick"
        yield must(path, rule_text, asked, todo, severity="warning", fix=fix)
