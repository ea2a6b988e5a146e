"""Rules about fewer bits: the machine, package and weights that `quantization_aware` needs, and models stored in FP8."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.defaults import resolved
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields

LEAST_CAPABILITY = (9, 0)
_SPEC = fields.kernels.quantization_aware
_OFF = Fix("turn it off", unset=(_SPEC.path,))


@rule(reads=(_SPEC,))
def fp8_needs_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.quantization_aware == "fp8" and facts.machine is not None and not facts.machine.gpus:
        todo = "FP8 products are a GPU's, of compute capability 9.0 or more."
        yield must(_SPEC.path, "false or true without a GPU", "fp8", todo, fix=_OFF)


@rule(reads=(_SPEC,))
def fp8_needs_a_card_that_has_it(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.quantization_aware != "fp8" or facts.machine is None:
        return
    old = next((gpu for gpu in facts.machine.gpus if gpu.capability < LEAST_CAPABILITY), None)
    if old:
        todo = f"It needs compute capability 9.0, as an H100 has it; this card has {old.capability[0]}.{old.capability[1]}."
        yield must(_SPEC.path, f"false or true on {old.name}", "fp8", todo, fix=_OFF)


@rule(reads=(_SPEC,))
def quantization_aware_needs_torchao(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.quantization_aware is False or facts.packages is None:
        return
    if facts.packages.get("torchao", "") is None:
        todo = "Install it with `pip install torchao`, or turn it off."
        yield must(_SPEC.path, "false without the package torchao", config.kernels.quantization_aware, todo, fix=_OFF)


@rule(reads=(_SPEC, fields.model.dtype))
def fp8_needs_bfloat16(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.quantization_aware == "fp8" and config.model.dtype != "bfloat16":
        path, dtype = fields.model.dtype.path, config.model.dtype
        todo = "Results of FP8 products are bfloat16: take that, or set kernels.quantization_aware to false."
        fix = Fix("take bfloat16", {path: "bfloat16"})
        yield must(path, "bfloat16 while kernels.quantization_aware is fp8", dtype, todo, fix=fix)


@rule(reads=(_SPEC, fields.model.quantization))
def int8_rounding_needs_plain_weights(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.quantization_aware is True and config.model.quantization != "none":
        todo = f"Weights held as {config.model.quantization} are rounded already: keep one of the two."
        rule_text = f"false while model.quantization is {config.model.quantization}"
        yield must(_SPEC.path, rule_text, True, todo, fix=_OFF)


@rule(reads=(_SPEC, fields.model.quantization))
def fp8_needs_plain_weights(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.quantization_aware == "fp8" and config.model.quantization != "none":
        todo = f"FP8 products are made of bfloat16 weights, not of {config.model.quantization}: keep one of the two."
        rule_text = f"false while model.quantization is {config.model.quantization}"
        yield must(_SPEC.path, rule_text, "fp8", todo, fix=_OFF)


def _stored_in_fp8(config: RunConfig, facts: Facts) -> bool:
    """Whether the weights stay in FP8: so stored, and frozen under an adapter."""
    model = facts.model
    return bool(model and model.name == config.model.name and model.stored == "fp8" and config.adapter.kind == "lora")


@rule(reads=(_SPEC, fields.model.name, fields.adapter.kind))
def weights_stored_in_fp8_are_not_rounded_again(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.quantization_aware is not False and _stored_in_fp8(config, facts):
        todo = "Under an adapter they stay as stored, in FP8, and are not rounded another time."
        rule_text = f"false for {config.model.name}, whose weights are stored in FP8"
        yield must(_SPEC.path, rule_text, config.kernels.quantization_aware, todo, fix=_OFF)


@rule(reads=(fields.model.quantization, fields.model.name))
def weights_stored_in_fp8_take_no_second_format(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = facts.model, fields.model.quantization
    if model is None or model.name != config.model.name or model.stored != "fp8":
        return
    if config.model.quantization != "none":
        todo = "They have eight bits already: leave it out, and an adapter is trained beside them."
        rule_text = f"none for {model.name}, whose weights are stored in FP8"
        fix = Fix("leave it out", unset=(spec.path,))
        yield must(spec.path, rule_text, config.model.quantization, todo, fix=fix)


@rule(reads=(fields.adapter.kind, fields.adapter.use_dora, fields.model.name))
def weights_stored_in_fp8_take_plain_lora(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.adapter.kind == "lora" and config.adapter.use_dora and _stored_in_fp8(config, facts):
        spec = fields.adapter.use_dora
        todo = "DoRA measures plain weights: take plain LoRA, or the model in bfloat16."
        rule_text = f"false for {config.model.name}, whose weights are stored in FP8"
        yield must(spec.path, rule_text, True, todo, fix=Fix("take plain LoRA", unset=(spec.path,)))


@rule(
    reads=(
        _SPEC,
        fields.kernels.torch_compile,
        fields.kernels.torch_compile_options,
        fields.kernels.kernel_auto_compose,
    )
)
def fp8_wants_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    kernels, path = config.kernels, fields.kernels.torch_compile.path
    compiled = resolved(config, facts).kernels.torch_compile in (True, "auto")
    if kernels.quantization_aware == "fp8" and not compiled:
        todo = "Uncompiled, rounding takes more time than FP8 saves: 2.2 times bfloat16's step with LoRA on an H200."
        fix = Fix("compile the layers", {path: True})
        rule_text = "true for kernels.quantization_aware: fp8 to be quick"
        yield must(path, rule_text, kernels.torch_compile, todo, severity="warning", fix=fix)


@rule(reads=(fields.kernels.fp8_recipe_name, _SPEC))
def fp8_scales_need_fp8(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec, name = fields.kernels.fp8_recipe_name, config.kernels.fp8_recipe_name
    if config.kernels.quantization_aware != "fp8" and name != spec.default:
        todo = "It says how FP8 products are scaled, and there are none: remove it, or set quantization_aware to fp8."
        rule_text = "left out while kernels.quantization_aware is not fp8"
        yield must(spec.path, rule_text, name, todo, fix=Fix("remove it", unset=(spec.path,)))
