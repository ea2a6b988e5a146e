"""Rules about faster kernels: each needs a machine, a model or another setting that lets it act."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.defaults import resolved
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.kernels import COMPILE_OPTIONS, KERNEL_CAPABILITY, NORM_ROPE_MODELS, ROPE_MODELS
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields
from engine.errors import nearest


@rule(reads=(fields.kernels.fused_attn_kernel,))
def fused_attention_needs_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.kernels.fused_attn_kernel.path
    if config.kernels.fused_attn_kernel is True and facts.machine is not None and not facts.machine.gpus:
        todo = "The kernel runs on a GPU; a CPU has torch's own operations."
        yield must(path, "false or auto without a GPU", True, todo, fix=Fix("let it be chosen", unset=(path,)))


@rule(reads=(fields.kernels.fused_attn_kernel,))
def fused_attention_needs_a_card_of_today(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, gpus = fields.kernels.fused_attn_kernel.path, facts.machine.gpus if facts.machine else ()
    old = next((gpu for gpu in gpus if gpu.capability < KERNEL_CAPABILITY), None)
    if config.kernels.fused_attn_kernel is True and old is not None:
        least, own = (".".join(map(str, each)) for each in (KERNEL_CAPABILITY, old.capability))
        todo = f"The kernel is compiled for compute capability {least} and above, and this card has {own}."
        yield must(path, f"false or auto on {old.name}", True, todo, fix=Fix("let it be chosen", unset=(path,)))


@rule(reads=(fields.kernels.fused_attn_kernel, fields.model.name))
def fused_attention_knows_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, model = fields.kernels.fused_attn_kernel.path, facts.model
    if config.kernels.fused_attn_kernel is not True or model is None or model.name != config.model.name:
        return
    served = NORM_ROPE_MODELS + ROPE_MODELS
    if model.model_type and model.model_type not in served:
        todo = f"Its attention does not norm and rotate queries and keys as the kernels do, which serve {', '.join(served)}."
        rule_text = f"false or auto for the model type {model.model_type}"
        yield must(path, rule_text, True, todo, fix=Fix("let it be chosen", unset=(path,)))


@rule(reads=(fields.kernels.fused_attn_kernel, fields.kernels.torch_compile, fields.model.name))
def rotation_alone_is_left_to_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, model = fields.kernels.fused_attn_kernel.path, facts.model
    if config.kernels.fused_attn_kernel is not True or model is None or model.name != config.model.name:
        return
    if model.model_type in ROPE_MODELS and resolved(config, facts).kernels.torch_compile is True:
        todo = (
            "Compiled layers make the rotation by themselves, which was measured faster there: the kernel serves passes that "
            "are not compiled, as in sampling."
        )
        rule_text = f"false or auto in compiled layers for the model type {model.model_type}, which has no norms there"
        yield must(path, rule_text, True, todo, severity="hint", fix=Fix("let it be chosen", unset=(path,)))


_LORA = fields.kernels.fused_lora


@rule(reads=(_LORA, fields.adapter.kind))
def fused_lora_needs_an_adapter(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.fused_lora is True and config.adapter.kind != "lora":
        todo = "Without an adapter there are no projections of LoRA to compute."
        yield must(_LORA.path, "false or auto without adapter.kind lora", True, todo, fix=_unset(_LORA.path))


@rule(reads=(_LORA, fields.adapter.kind, fields.adapter.use_dora))
def fused_lora_is_plain_lora(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.fused_lora is True and config.adapter.kind == "lora" and config.adapter.use_dora:
        todo = "DoRA scales the whole weight with its adapter, which PEFT computes."
        yield must(_LORA.path, "false or auto with adapter.use_dora", True, todo, fix=_unset(_LORA.path))


@rule(reads=(_LORA, fields.model.dtype))
def fused_lora_has_no_mixed_precision(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.fused_lora is True and config.model.dtype == "float16":
        todo = "float16 trains under autocast, which chooses formats by itself; bfloat16 and float32 are served."
        yield must(_LORA.path, "false or auto with model.dtype float16", True, todo, fix=_unset(_LORA.path))


@rule(reads=(_LORA, fields.adapter.kind, fields.model.quantization, fields.kernels.quantization_aware))
def fused_lora_reads_the_weights(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.fused_lora is not True or config.adapter.kind != "lora":
        return
    rounded = config.kernels.quantization_aware is True
    if rounded or config.model.quantization == "int8":
        beside = fields.kernels.quantization_aware.path if rounded else f"{fields.model.quantization.path} int8"
        todo = (
            "PEFT computes adapters beside weights in int8; plain and nf4 weights, and those stored in FP8, are served."
        )
        yield must(_LORA.path, f"false or auto with {beside}", True, todo, fix=_unset(_LORA.path))


@rule(reads=(_LORA, fields.kernels.torch_compile, fields.kernels.torch_compile_options))
def fused_lora_is_not_compiled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.fused_lora is True and resolved(config, facts).kernels.torch_compile is True:
        todo = "Compiled layers take adapters together themselves, and the compiler chooses what they keep."
        yield must(_LORA.path, "false or auto with kernels.torch_compile", True, todo, fix=_unset(_LORA.path))


def _unset(path: str) -> Fix:
    return Fix("let it be chosen", unset=(path,))


@rule(reads=(fields.kernels.torch_compile_options,))
def torch_compile_options_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for key in config.kernels.torch_compile_options:
        if key not in COMPILE_OPTIONS:
            path = f"{fields.kernels.torch_compile_options.path}.{key}"
            close = nearest(str(key), COMPILE_OPTIONS)
            todo = f"Did you mean {close}?" if close else "Remove it."
            yield must(path, f"one of {', '.join(COMPILE_OPTIONS)}", key, todo)


@rule(reads=(fields.kernels.torch_compile_options,))
def torch_compile_options_are_switches(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for key, value in config.kernels.torch_compile_options.items():
        if key in COMPILE_OPTIONS and not isinstance(value, bool):
            yield must(
                f"{fields.kernels.torch_compile_options.path}.{key}", "true or false", value, "Each option is a switch."
            )


@rule(reads=(fields.kernels.torch_compile_options, fields.kernels.torch_compile))
def torch_compile_options_need_torch_compile(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.kernels.torch_compile_options
    options = config.kernels.torch_compile_options
    if options and config.kernels.torch_compile is False:
        todo = "They act on compiled layers alone: set torch_compile to true, or remove them."
        fix = Fix("compile the layers", {fields.kernels.torch_compile.path: True})
        yield must(spec.path, "empty while kernels.torch_compile is false", options, todo, fix=fix)


@rule(reads=(fields.kernels.torch_compile_options, fields.data.packing))
def cuda_graphs_need_one_shape(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    options = config.kernels.torch_compile_options
    if options.get("triton.cudagraphs") is True:
        batches = "packs differ in their documents" if config.data.packing else "batches differ in their longest row"
        todo = f"A graph is recorded for one shape, and {batches}: each new shape is recorded anew and held in memory."
        path = f"{fields.kernels.torch_compile_options.path}.triton.cudagraphs"
        yield must(path, "false unless all batches have one shape", True, todo, severity="warning")


@rule(
    reads=(
        fields.kernels.torch_compile,
        fields.kernels.torch_compile_options,
        fields.adapter.kind,
        fields.adapter.use_dora,
    )
)
def dora_breaks_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, options = fields.kernels.torch_compile.path, fields.kernels.torch_compile_options.path
    if (
        config.adapter.kind == "lora"
        and config.adapter.use_dora
        and resolved(config, facts).kernels.torch_compile is True
    ):
        todo = (
            "Numbers stay the same, but torch's compiler cannot follow how PEFT takes the lengths of DoRA's weights: four "
            "layers fell into 44 graphs with 46 breaks under DPO, where plain LoRA has none."
        )
        fix = Fix("leave them uncompiled", {path: False}, unset=(options,))
        yield must(path, "false with use_dora to be of use", True, todo, severity="hint", fix=fix)


_COMPOSE = fields.kernels.kernel_auto_compose
_TIMED = (fields.kernels.use_cut_ce, fields.kernels.fused_attn_kernel, _LORA, fields.kernels.torch_compile)


@rule(reads=(_COMPOSE, *_TIMED, fields.kernels.torch_compile_options))
def kernel_auto_compose_has_a_choice(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    kernels = resolved(config, facts).kernels
    # Kernels that are on have tiles to be timed on a card.
    tiles = True in (kernels.use_cut_ce, kernels.fused_attn_kernel, kernels.fused_lora)
    left = "auto" in [getattr(kernels, spec.name) for spec in _TIMED]
    if config.kernels.kernel_auto_compose and not left and not (tiles and (not facts.machine or facts.machine.gpus)):
        todo = f"There is nothing to choose: leave one of {', '.join(spec.name for spec in _TIMED)} at auto."
        fix = Fix("remove it", unset=(_COMPOSE.path,))
        yield must(_COMPOSE.path, "false while every kernel is set by hand", True, todo, fix=fix)


@rule(reads=(_COMPOSE, fields.memory.layer_offloading))
def kernel_auto_compose_needs_the_layers_on_the_card(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.kernel_auto_compose and config.memory.layer_offloading:
        todo = "Kernels are timed before the layers stream, while their weights wait on the host: set them by hand."
        fix = Fix("remove it", unset=(_COMPOSE.path,))
        yield must(_COMPOSE.path, "false with memory.layer_offloading", True, todo, fix=fix)
