"""`distributed.expert_parallel_size`: what several devices that divide a mixture's experts serve, and what not.

All passes of a layer are taken by all devices of a group together: as many on each, in one order. What is left out here
either makes passes of its own on some of them, needs whole weights, or was not shown to equal one device.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, must
from engine.config.rule import Refused, Test, leave_out, must_divide, one_of, other_than, refused, rule, several, take
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.facts.counts import device_count, known_model
from engine.features.packed_experts import kind_of

SETTING = fields.distributed.expert_parallel_size
AFTER = ("fused_experts", "router_load")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")
"""Those whose step takes each number by itself, so that an adapter on some experts is enough to it."""
_LEFT_OUT = leave_out(SETTING, "all experts on each device")
_TOGETHER = "All devices of a group make the same passes together, and"


_NOT: tuple[tuple[str, FieldSpec, Test, str, str], ...] = (
    ("fsdp2", fields.distributed.strategy, one_of("fsdp2"), "with distributed.strategy fsdp2",
     "It shares all experts out over all devices itself: take ddp."),
    ("rows-in-parts", fields.distributed.context_parallel_size, several, "with distributed.context_parallel_size",
     "Both say which tokens a device computes."),
    ("weights-computed-in-fp8", fields.model.quantization, one_of("fp8"), "with model.quantization fp8",
     "It narrows plain numbers once they are there, and was not tried beside experts that are divided."),
    ("float16", fields.model.dtype, one_of("float16"), "with float16",
     "Its gradient scaler would leave steps out on one device alone; bfloat16 needs none."),
    ("modules-to-save", fields.adapter.modules_to_save, bool, "with adapter.modules_to_save",
     "A copy that is trained whole was not tried beside experts that are divided."),
    ("timed-kernels", fields.kernels.kernel_auto_compose, one_of(True), "with kernels.kernel_auto_compose",
     f"{_TOGETHER} each times kernels by itself."),
    ("quantization-aware", fields.kernels.quantization_aware, other_than(False), "with kernels.quantization_aware",
     "Rounded weights were not tried beside experts that are divided."),
    ("tiles", fields.memory.tiled_mlp, one_of(True), "with memory.tiled_mlp",
     f"{_TOGETHER} the number of tiles follows each device's own tokens."),
    ("offloaded-layers", fields.memory.layer_offloading, one_of(True), "with memory.layer_offloading",
     "Both say where a layer's experts are."),
    ("offloaded-activations", fields.memory.activation_offloading, other_than(None),
     "with memory.activation_offloading", "Moving what a layer keeps was not tried beside experts that are divided."),
    ("optimizers-of-matrices", fields.optim.optim, other_than(*OPTIMIZERS), "with optim.optim {config.optim.optim}",
     f"Its step needs whole weights or states of another shape; take one of {', '.join(OPTIMIZERS)}."),
)  # fmt: skip

refused(
    __name__,
    *(
        Refused(
            f"expert-parallel-without-{name}", SETTING, several, f"1 {words}", because, _LEFT_OUT, beside={spec: test}
        )
        for name, spec, test, words, because in _NOT
    ),
    *(
        Refused(
            f"tiers-without-compiled-pieces-{name}",
            fields.memory.gradient_checkpointing,
            one_of("selective", "medium"),
            "true or false where layers whose experts are divided are compiled",
            "Such a layer is compiled in pieces, of whose products no tier chooses.",
            take(fields.memory.gradient_checkpointing, True, "compute layers again whole"),
            beside={SETTING: several, spec: test},
        )
        for name, spec, test in (
            ("asked-for", fields.kernels.torch_compile, one_of(True)),
            ("by-options", fields.kernels.torch_compile_options, bool),
        )
    ),
)


@rule(reads=(SETTING, fields.run.devices, fields.distributed.nodes))
def experts_are_divided_over_the_processes(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    todo = "Groups of so many devices each hold all experts, and no device may be left over."
    yield from must_divide(SETTING, SETTING.value(config), device_count(config), todo)


@rule(reads=(SETTING, fields.model.name, fields.model.quantize_moe_experts, fields.adapter.kind))
def experts_divide(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, size = known_model(config, facts), SETTING.value(config)
    if model is None or not model.model_type or size == 1:
        return
    if not model.experts:
        todo = "This model is no mixture of experts: there is nothing to divide."
        yield must(SETTING.path, f"1 for the model type {model.model_type}", size, todo, fix=_LEFT_OUT)
    elif model.experts % size:
        devices = device_count(config)
        fewer = max(many for many in range(1, size) if model.experts % many == devices % many == 0)
        todo = "Each device holds as many as the others."
        yield must(
            SETTING.path, f"a divisor of the model's {model.experts} experts", size, todo, fix=take(SETTING, fewer)
        )
    elif model.stored and not _divided_as_stored(config, model.stored):
        todo = "Experts are divided as they are read: plain ones, those in MXFP4, and those in FP8 that stay so under LoRA."
        yield must(SETTING.path, f"1 with weights stored in {model.stored}", size, todo, fix=_LEFT_OUT)
    elif model.processor:
        todo = "Parts that see were not tried beside experts that are divided."
        yield must(SETTING.path, "1 with a model that sees images", size, todo, fix=_LEFT_OUT)


def _divided_as_stored(config: RunConfig, stored: str) -> bool:
    """Whether each process reads its experts alone from files that hold weights so."""
    return stored == "mxfp4" or (stored == "fp8" and bool(kind_of(config, stored)))


@rule(reads=(SETTING, fields.model.quantization, fields.model.quantize_moe_experts))
def experts_are_packed_as_they_are_divided(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    kind, spec = config.model.quantization, fields.model.quantize_moe_experts
    if SETTING.value(config) > 1 and kind not in ("none", "fp8") and not config.model.quantize_moe_experts:
        todo = "Each process packs its own experts as it reads them; plain ones beside packed layers were not tried."
        yield must(spec.path, f"true with {SETTING.path} and {kind}", False, todo, fix=leave_out(spec))
