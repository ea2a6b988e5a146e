"""`model.quantize_moe_experts`: the experts of a mixture in the bits of `model.quantization`, and a pass that unpacks them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts, ModelFacts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import leave_out, rule
from engine.config.tree import RunConfig, fields
from engine.facts.counts import known_model
from engine.features.fused_experts import UNSERVED
from engine.kernels.requirements import EXPERT_BUFFER, LARGEST_EXPERT_RANK

SETTING = fields.model.quantize_moe_experts
AFTER = ()
_OFF = Fix("leave experts in 16 bits", {SETTING.path: False})


def packs(config: RunConfig) -> bool:
    """Whether experts would be packed, if the model has some."""
    return config.model.quantize_moe_experts and config.model.quantization in ("nf4", "fp4", "int8")


def numbers(model: ModelFacts) -> int:
    """How many numbers all experts of the model have."""
    return (model.experts or 0) * sum(
        wide_in * wide_out * count for _, wide_in, wide_out, count in model.expert_weights
    )


def packed_numbers(config: RunConfig, facts: Facts) -> int:
    """How many numbers would be packed; 0 where that is not known."""
    model = known_model(config, facts)
    return numbers(model) if model is not None and packs(config) else 0


def buffer_bytes(config: RunConfig, facts: Facts, size: float) -> float:
    """Bytes of the experts that are unpacked at a time, `size` bytes a number: one of them on a CPU."""
    model = known_model(config, facts)
    if model is None or not packed_numbers(config, facts):
        return 0.0
    one = size * sum(wide_in * wide_out for _, wide_in, wide_out, _ in model.expert_weights)
    on_gpu = facts.machine is None or bool(facts.machine.gpus)
    return max(one, min(one * (model.experts or 1), EXPERT_BUFFER)) if on_gpu else one


@rule(reads=(SETTING, fields.model.name, fields.model.quantization))
def packed_experts_are_computed_here(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if model is None or not model.experts or not packs(config) or model.model_type not in UNSERVED:
        return
    todo = f"No pass over packed experts computes them: {UNSERVED[model.model_type]}."
    yield must(SETTING.path, f"false for the model type {model.model_type}", True, todo, fix=_OFF)


@rule(
    reads=(
        SETTING, fields.model.name, fields.model.quantization, fields.adapter.kind, fields.adapter.r,
        fields.adapter.target_parameters,
    )
)  # fmt: skip
def packed_experts_have_adapters_of_small_rank(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, model = config.adapter, known_model(config, facts)
    if model is None or not model.experts or not packs(config):
        return
    if adapter.kind == "lora" and adapter.target_parameters and adapter.r > LARGEST_EXPERT_RANK:
        todo = f"The pass over packed experts takes adapters up to rank {LARGEST_EXPERT_RANK}."
        rule_text = f"false with {fields.adapter.r.path} {adapter.r:,} on experts"
        yield must(SETTING.path, rule_text, True, todo, fix=_OFF)


@rule(reads=(SETTING, fields.model.name, fields.model.quantization, fields.memory.layer_offloading))
def packed_experts_do_not_stream(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = known_model(config, facts), fields.memory.layer_offloading
    streams = config.memory.layer_offloading and (facts.machine is None or bool(facts.machine.gpus))
    if streams and model is not None and model.experts and packs(config):
        todo = "Packed experts, most of such a model, stay on the card."
        yield must(spec.path, "false while experts are packed", True, todo, fix=leave_out(spec))


@rule(reads=(SETTING, fields.model.name, fields.model.quantization, fields.kernels.torch_compile))
def packed_experts_are_not_compiled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = known_model(config, facts), fields.kernels.torch_compile
    if config.kernels.torch_compile is True and model is not None and model.experts and packs(config):
        todo = "Which experts are unpacked is known while a layer computes, so it would break into many graphs."
        yield must(spec.path, "false or auto while experts are packed", True, todo, fix=leave_out(spec))
