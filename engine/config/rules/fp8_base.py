"""Rules about frozen layers that are computed in FP8 (`model.quantization: fp8`): the card, format, layers and adapter."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import fp8
from engine.config.counted import known_model
from engine.config.defaults import resolved
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields

_SPEC = fields.model.quantization
_OFF = Fix("keep full precision", unset=(_SPEC.path,))


def _asked(config: RunConfig) -> bool:
    return config.model.quantization == "fp8"


@rule(reads=(_SPEC,))
def fp8_base_needs_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if _asked(config) and facts.machine is not None and not facts.machine.gpus:
        todo = "Products in 8 bits are a GPU's, of compute capability 8.9 or more."
        yield must(_SPEC.path, "none without a GPU", "fp8", todo, fix=_OFF)


@rule(reads=(_SPEC,))
def fp8_base_needs_a_card_that_has_it(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not _asked(config) or facts.machine is None:
        return
    old = next((gpu for gpu in facts.machine.gpus if gpu.capability < fp8.LEAST_CAPABILITY), None)
    if old:
        has = ".".join(map(str, old.capability))
        todo = f"It needs compute capability 8.9; this card has {has}. nf4 runs on it and takes less room still."
        fix = Fix("take 4-bit weights", {_SPEC.path: "nf4"})
        yield must(_SPEC.path, f"none, nf4, fp4 or int8 on {old.name}", "fp8", todo, fix=fix)


@rule(reads=(_SPEC, fields.model.dtype))
def fp8_base_needs_bfloat16(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, dtype = fields.model.dtype.path, config.model.dtype
    if _asked(config) and dtype != "bfloat16":
        todo = "What comes of these products is bfloat16: take that, or set model.quantization to none."
        fix = Fix("take bfloat16", {path: "bfloat16"})
        yield must(path, "bfloat16 while model.quantization is fp8", dtype, todo, fix=fix)


@rule(reads=(_SPEC, fields.adapter.kind, fields.adapter.use_dora))
def fp8_base_takes_plain_lora(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if _asked(config) and config.adapter.kind == "lora" and config.adapter.use_dora:
        spec = fields.adapter.use_dora
        todo = "DoRA measures plain weights in every step: take plain LoRA, or set model.quantization to none."
        fix = Fix("take plain LoRA", unset=(spec.path,))
        yield must(spec.path, "false while model.quantization is fp8", True, todo, fix=fix)


@rule(reads=(_SPEC, fields.model.name))
def fp8_base_needs_layers_that_gain(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Where the model's shape is known, and it has no linear layer that would be computed in FP8."""
    model = known_model(config, facts)
    if not _asked(config) or model is None or not model.linears:
        return
    if all(fp8.why_not(name, wide_out, wide_in) for name, wide_in, wide_out, _ in model.linears):
        largest = max(wide_in * wide_out for _, wide_in, wide_out, _ in model.linears)
        todo = (
            f"Layers gain from {fp8.LEAST_NUMBERS:,} numbers on, in sizes that are multiples of {fp8.MULTIPLE}; "
            f"its largest has {largest:,}."
        )
        yield must(_SPEC.path, f"none for {model.name}, whose layers are too small for it", "fp8", todo, fix=_OFF)


@rule(
    reads=(
        _SPEC,
        fields.kernels.torch_compile,
        fields.kernels.torch_compile_options,
        fields.kernels.kernel_auto_compose,
    )
)
def fp8_base_wants_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, asked = fields.kernels.torch_compile.path, config.kernels.torch_compile
    if not _asked(config) or (asked is not False and facts.machine is None):
        return
    if resolved(config, facts).kernels.torch_compile is False:
        todo = "Uncompiled, each layer rounds its input by itself, in operations of their own."
        fix = Fix("compile the layers", {path: True})
        rule_text = "true for model.quantization: fp8 to be quick"
        yield must(path, rule_text, asked, todo, severity="warning", fix=fix)
