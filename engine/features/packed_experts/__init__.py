"""`model.quantize_moe_experts`: the experts of a mixture in the bits of `model.quantization`, and a pass that unpacks them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts, ModelFacts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import leave_out, rule
from engine.config.tree import RunConfig, fields
from engine.facts.counts import known_model
from engine.facts.stored import PACKED
from engine.kernels.requirements import EXPERT_BUFFER, LARGEST_EXPERT_RANK

SETTING = fields.model.quantize_moe_experts
AFTER = ()


_GATE = "its gate is none of those that the kernels compute"
EXPERTS_ALONE = "mxfp4", "nvfp4"
"""What of `model.quantization` holds experts and nothing else."""
STORED = "mxfp4", "fp8", *PACKED
"""What files may hold experts in that stays as it is under an adapter."""
UNSERVED = {
    "deepseek_v4": _GATE,
    "glm5_next_text": _GATE,
    "hy_v4": _GATE,
    "hy_v4_vl_text": _GATE,
    "inkling2_loop_text": _GATE,
    "inkling2_text": _GATE,
    "muse_spark_text": "a norm follows each expert",
    "nemotron_h": "its experts have no gate",
}
"""Model types whose experts the kernels do not compute, and why; those of all others that transformers has are served."""


def kind_of(config: RunConfig, stored: str = "") -> str:
    """What experts are packed in, if the model has some; empty where they are not. `stored` is how its files hold weights:
    under an adapter MXFP4, FP8 and packed integers stay as they are."""
    if not config.model.quantize_moe_experts:
        return ""
    if stored in STORED:
        return stored if config.adapter.kind == "lora" else ""
    return config.model.quantization if config.model.quantization in ("nf4", "fp4", "int8", *EXPERTS_ALONE) else ""


def packs(config: RunConfig, model: ModelFacts | None = None) -> bool:
    """Whether experts would be packed, if the model has some."""
    return bool(kind_of(config, "" if model is None else model.stored))


def numbers(model: ModelFacts) -> int:
    """How many numbers all experts of the model have."""
    return (model.experts or 0) * sum(
        wide_in * wide_out * count for _, wide_in, wide_out, count in model.expert_weights
    )


def packed_numbers(config: RunConfig, facts: Facts) -> int:
    """How many numbers would be packed; 0 where that is not known."""
    model = known_model(config, facts)
    return numbers(model) if model is not None and packs(config, model) else 0


def buffer_bytes(config: RunConfig, facts: Facts, size: float) -> float:
    """Bytes of the experts that are unpacked at a time, `size` bytes a number: one of them on a CPU."""
    model = known_model(config, facts)
    if model is None or not packed_numbers(config, facts):
        return 0.0
    one = size * sum(wide_in * wide_out for _, wide_in, wide_out, _ in model.expert_weights)
    on_gpu = facts.machine is None or bool(facts.machine.gpus)
    return max(one, min(one * (model.experts or 1), EXPERT_BUFFER)) if on_gpu else one


def _off(config: RunConfig) -> Fix:
    wide = {} if config.model.quantization in EXPERTS_ALONE else {SETTING.path: False}
    return Fix("leave experts in 16 bits", wide, () if wide else (fields.model.quantization.path,))


@rule(reads=(SETTING, fields.model.name, fields.model.quantization))
def packed_experts_are_computed_here(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if model is None or not model.experts or not packs(config, model) or model.model_type not in UNSERVED:
        return
    todo = f"No pass over packed experts computes them: {UNSERVED[model.model_type]}."
    yield must(SETTING.path, f"false for the model type {model.model_type}", True, todo, fix=_off(config))


@rule(
    reads=(
        SETTING, fields.model.name, fields.model.quantization, fields.adapter.kind, fields.adapter.r,
        fields.adapter.target_parameters,
    )
)  # fmt: skip
def packed_experts_have_adapters_of_small_rank(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, model = config.adapter, known_model(config, facts)
    if model is None or not model.experts or not packs(config, model):
        return
    if adapter.kind == "lora" and adapter.target_parameters and adapter.r > LARGEST_EXPERT_RANK:
        todo = f"The pass over packed experts takes adapters up to rank {LARGEST_EXPERT_RANK}."
        rule_text = f"false with {fields.adapter.r.path} {adapter.r:,} on experts"
        yield must(SETTING.path, rule_text, True, todo, fix=_off(config))


@rule(reads=(SETTING, fields.model.name, fields.model.quantization, fields.kernels.torch_compile))
def packed_experts_are_compiled_on_a_card(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = known_model(config, facts), fields.kernels.torch_compile
    no_card = facts.machine is not None and not facts.machine.gpus
    if (
        no_card
        and config.kernels.torch_compile is True
        and model is not None
        and model.experts
        and packs(config, model)
    ):
        todo = "Without a card packed experts are computed one by one, which breaks a layer into many graphs."
        yield must(spec.path, "false or auto while experts are packed", True, todo, fix=leave_out(spec))


@rule(reads=(fields.model.quantization, fields.model.name))
def formats_of_experts_need_some(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = known_model(config, facts), fields.model.quantization
    kind = config.model.quantization
    if kind in EXPERTS_ALONE and model is not None and model.model_type and not model.experts:
        todo = f"{kind.upper()} is for the experts of a mixture, and this model has none: nf4 holds its layers in four bits."
        fix = Fix("take nf4", {spec.path: "nf4"})
        yield must(spec.path, f"another than {kind} for the model type {model.model_type}", kind, todo, fix=fix)


@rule(reads=(SETTING, fields.model.quantization))
def formats_of_experts_pack_them(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if (kind := config.model.quantization) in EXPERTS_ALONE and not config.model.quantize_moe_experts:
        todo = f"Nothing but experts is held in {kind.upper()}: pack them, or set model.quantization to none."
        yield must(SETTING.path, f"true with model.quantization: {kind}", False, todo, fix=leave_out(SETTING))
