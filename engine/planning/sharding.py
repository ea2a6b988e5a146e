"""`distributed.strategy`: what FSDP2 does not serve, and what `auto` becomes: ddp where the estimate fits, fsdp2 where not.

Each row of the table was left out for a reason of its own; what is not in it is shown to equal one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from engine import figures
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.kinds import reference_of
from engine.config.rule import Refused, Test, leave_out, one_of, other_than, own_findings, refused, rule, take
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.facts.counts import device_count, known_model
from engine.facts.stored import PACKED
from engine.features import packed_experts
from engine.planning import memory_model

SPEC = fields.distributed.strategy
REPLICAS, SHARES = fields.distributed.dp_replicate_size, fields.distributed.dp_shard_size
OFFLOADED = fields.distributed.cpu_offload
_DDP = take(SPEC, "ddp")
_DIVIDED = "experts are divided, and each device holds all else"
_BY_DDP = "Each process holds the whole model there."
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop", "muon")
"""Those whose step takes each number by itself, so that a share of a weight is enough to it, and torch's Muon, whose products
go over all shares."""
_READS = "It reads weights outside of the layer that puts them together."
_NOT: tuple[tuple[str, FieldSpec, Test, str, str], ...] = (
    ("value-head", fields.method.kind, one_of("ppo"), "with ppo",
     "Its value head reads the model outside of the pass that puts its layers together."),
    ("quantized-weights", fields.model.quantization, other_than("none", "nf4", "fp4"),
     "with model.quantization {config.model.quantization}",
     "A share of such a weight lacks its scales; those of nf4 and fp4 stay whole on each process."),
    ("float16", fields.model.dtype, one_of("float16"), "with float16",
     "Its gradient scaler would have to hear of all shares; bfloat16 needs none."),
    ("fused-attention", fields.kernels.fused_attn_kernel, one_of(True), "with kernels.fused_attn_kernel", _READS),
    ("liger-kernels", fields.kernels.use_liger_kernel, one_of(True), "with kernels.use_liger_kernel",
     "Each layer is held to its class before weights are shared out."),
    ("timed-kernels", fields.kernels.kernel_auto_compose, one_of(True), "with kernels.kernel_auto_compose",
     "Kernels are timed before weights are shared out, and most of them do not serve shares."),
    ("quantization-aware", fields.kernels.quantization_aware, other_than(False), "with kernels.quantization_aware",
     "torchao computes with whole weights."),
    ("offloaded-layers", fields.memory.layer_offloading, one_of(True), "with memory.layer_offloading",
     "Both say where a layer's weights are until it is computed."),
    ("offloaded-activations", fields.memory.activation_offloading, other_than(None),
     "with memory.activation_offloading", "It would move weights that were put together with them."),
    ("optimizers-of-matrices", fields.optim.optim, other_than(*OPTIMIZERS), "with optim.optim {config.optim.optim}",
     f"Its step needs whole weights or states of another shape; take one of {', '.join(OPTIMIZERS)}."),
    ("bfloat16-evaluation", fields.optim.bf16_full_eval, one_of(True), "with optim.bf16_full_eval",
     "Held-out rows are computed with what the shares are put together to, in their own format."),
    ("modules-to-save", fields.adapter.modules_to_save, bool, "with adapter.modules_to_save",
     "A module and its trained copy are shared out at different times."),
    ("faster-second-matrices", fields.adapter.loraplus_lr_ratio, other_than(None), "with adapter.loraplus_lr_ratio",
     "It was not tried where weights are shared out."),
    ("dora", fields.adapter.use_dora, one_of(True), "with adapter.use_dora",
     "What is trained of a layer is shared out in one number format, and its magnitudes have another."),
)  # fmt: skip

refused(
    __name__,
    *(
        Refused(
            f"fsdp2-without-{name}", SPEC, one_of("fsdp2"), f"ddp or auto {words}", because, _DDP, beside={spec: test}
        )
        for name, spec, test, words, because in _NOT
    ),
    Refused(
        "fsdp2-without-fp32-norms",
        SPEC,
        one_of("fsdp2"),
        "ddp or auto where norms in float32 are trained",
        "What is trained of a layer is shared out in one number format. With an adapter norms are frozen, and it serves.",
        _DDP,
        beside={fields.memory.fp32_norms: one_of(True), fields.adapter.kind: one_of("none")},
    ),
    *(
        Refused(
            f"fsdp2-without-compiled-4-bit-weights-{name}",
            SPEC,
            one_of("fsdp2"),
            "ddp or auto where layers with weights in 4 bits are compiled",
            "What their shares are put together to gets its scales in the layer's pass, which torch's compiler cannot follow.",
            _DDP,
            beside={spec: test, fields.model.quantization: one_of("nf4", "fp4")},
        )
        for name, spec, test in (
            ("asked-for", fields.kernels.torch_compile, one_of(True)),
            ("by-options", fields.kernels.torch_compile_options, bool),
        )
    ),
    Refused(
        "cpu-offload-without-quantized-weights",
        OFFLOADED,
        one_of(True),
        "left out with model.quantization {config.model.quantization}",
        "Weights in four bits are widened on a GPU alone.",
        leave_out(OFFLOADED),
        beside={fields.model.quantization: other_than("none")},
    ),
    Refused(
        "reshard-needs-fsdp2",
        fields.distributed.reshard_after_forward,
        one_of(False),
        "left out with ddp",
        _BY_DDP,
        leave_out(fields.distributed.reshard_after_forward),
        beside={SPEC: one_of("ddp")},
    ),
    Refused(
        "cpu-offload-needs-fsdp2",
        OFFLOADED,
        one_of(True),
        "left out with ddp",
        f"{_BY_DDP} memory.layer_offloading keeps frozen layers in main memory.",
        leave_out(OFFLOADED),
        beside={SPEC: one_of("ddp")},
    ),
    Refused(
        "cpu-offload-needs-gpus",
        OFFLOADED,
        one_of(True),
        "left out without a GPU",
        "Main memory is where all of it is then.",
        leave_out(OFFLOADED),
        gpu=False,
    ),
    Refused(
        "cpu-offload-steps-with-adam",
        fields.optim.optim,
        other_than("adamw_torch_fused", "adamw_torch", "sgd"),
        "adamw_torch_fused, adamw_torch or sgd with distributed.cpu_offload",
        "The optimizer steps in main memory, where the others were not tried.",
        take(fields.optim.optim, "adamw_torch_fused"),
        beside={OFFLOADED: one_of(True)},
    ),
)


def _requested_sizes(config: RunConfig) -> tuple[FieldSpec, ...]:
    """The sizes that are asked for; they mean something with fsdp2 alone."""
    return tuple(spec for spec in (REPLICAS, SHARES, OFFLOADED) if spec.value(config) != spec.default)


@rule(reads=(SPEC, REPLICAS, SHARES, OFFLOADED, fields.distributed.expert_parallel_size))
def replicas_need_fsdp2(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    taken = config.distributed.strategy
    problem = _unserved(config, facts) if taken == "auto" and _requested_sizes(config) else None
    if taken == "ddp" or problem is not None:
        for spec in _requested_sizes(config):
            todo = _BY_DDP if problem is None else f"fsdp2 does not serve here: {problem}"
            yield must(spec.path, "left out with ddp", spec.value(config), todo, fix=leave_out(spec))


@rule(reads=(SPEC, REPLICAS, SHARES, fields.run.devices, fields.distributed.nodes))
def replicas_divide_the_processes(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.distributed.strategy == "ddp" or not _requested_sizes(config):
        return
    devices, replicas, shares = device_count(config), REPLICAS.value(config), SHARES.value(config)
    processes = f"with {devices} process{'' if devices == 1 else 'es'} (run.devices times distributed.nodes)"
    served = [many for many in range(1, devices // 2 + 1) if devices % many == 0] or [1]
    if replicas not in served:
        fewer = max(many for many in served if many < replicas)
        known = figures.alternatives(served)
        todo = "Each replica is shared out over as many of them, at least two."
        yield must(REPLICAS.path, f"{known} {processes}", replicas, todo, fix=take(REPLICAS, fewer))
    elif shares not in (None, devices // replicas):
        fits = shares > 1 and devices % shares == 0
        todo = "It times dp_replicate_size is their number. Leave it out, and it follows."
        fix = take(REPLICAS, devices // shares, f"take {devices // shares} replicas") if fits else leave_out(SHARES)
        many = f" in {replicas} replicas" if replicas > 1 else ""
        yield must(SHARES.path, f"{devices // replicas} {processes}{many}", shares, todo, fix=fix)


@rule(reads=(OFFLOADED, fields.run.devices, fields.distributed.nodes))
def cpu_offload_needs_several_devices(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.distributed.cpu_offload and device_count(config) == 1:
        todo = "It moves shares of a model, and one device has no share. memory.layer_offloading keeps frozen layers there."
        yield must(OFFLOADED.path, "left out with one device", True, todo, fix=leave_out(OFFLOADED))


@rule(reads=(SPEC, fields.run.devices))
def fsdp2_needs_several_devices(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.distributed.strategy == "fsdp2" and device_count(config) == 1:
        todo = "It shares the model out over them. Set run.devices to how many there are, or leave it out."
        fix = leave_out(SPEC)
        yield must(SPEC.path, "ddp or auto with one device", "fsdp2", todo, fix=fix)


@rule(reads=(SPEC, fields.model.name, fields.model.quantization, packed_experts.SETTING, fields.adapter.kind))
def fsdp2_without_packed_experts(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if config.distributed.strategy != "fsdp2" or model is None or not model.experts:
        return
    if packed_experts.packs(config, model):
        fix = _DDP if model.stored else Fix("leave experts in 16 bits", {packed_experts.SETTING.path: False})
        todo = "A share of experts in few bits would be unpacked; in 16 bits they are shared out like other weights."
        yield must(SPEC.path, "ddp or auto with experts in few bits", "fsdp2", todo, fix=fix)


@rule(reads=(SPEC, fields.model.name, fields.adapter.kind))
def fsdp2_without_stored_fp8(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if model is None or model.stored not in ("fp8", *PACKED) or config.adapter.kind != "lora":
        return
    if config.distributed.strategy == "fsdp2":
        held = "FP8" if model.stored == "fp8" else f"packed integers ({model.stored})"
        todo = "A share of such a weight lacks its scales."
        yield must(SPEC.path, f"ddp or auto with a model whose files hold {held}", "fsdp2", todo, fix=_DDP)


@rule(reads=(SPEC, fields.model.name, fields.model.train_vision))
def fsdp2_without_parts_that_learn_to_see(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = known_model(config, facts), fields.model.train_vision
    if (
        config.distributed.strategy == "fsdp2"
        and model is not None
        and model.processor
        and spec.value(config) != "none"
    ):
        todo = "A row without images never puts them together, and others would wait. Frozen, they stay whole on each process."
        fix = Fix("freeze the parts that see", {spec.path: "none"})
        yield must(SPEC.path, f"ddp or auto with {spec.path}: {spec.value(config)}", "fsdp2", todo, fix=fix)


@rule(reads=(SPEC, fields.adapter.kind, fields.adapter.path, fields.method.kind, fields.method.reference))
def fsdp2_keeps_no_copy_of_an_adapter(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    held = reference_of(config.method) in ("auto", "adapter_copy", "precompute")
    if SPEC.value(config) == "fsdp2" and held and config.adapter.kind == "lora" and config.adapter.path:
        todo = "Shares are made of what is trained, and the adapter as it began is kept beside it. Or merge it into its model first."
        rule_text = f"ddp or auto with adapter.path for {config.method.kind}, which is held to that adapter"
        yield must(SPEC.path, rule_text, "fsdp2", todo, fix=_DDP)


def chosen(config: RunConfig, facts: Facts) -> tuple[Literal["ddp", "fsdp2"], str]:
    """What `auto` takes, and why."""
    devices = device_count(config)
    if devices == 1:
        return "ddp", "one device has nothing to share"
    if config.distributed.expert_parallel_size > 1:
        return "ddp", _DIVIDED
    if _requested_sizes(config):
        if (problem := _unserved(config, facts)) is None:
            return "fsdp2", f"shares are asked for by {' and '.join(spec.path for spec in _requested_sizes(config))}"
        return "ddp", f"fsdp2 does not serve here: {problem}"
    need, room = _needed(config, facts, "ddp"), memory_model.device_bytes(config, facts)
    if need is None or room is None:
        what = "the model's size" if need is None else "the machine"
        return "ddp", f"{what} is not known yet"
    fits = f"{figures.size(need)} of {figures.size(room)} on each device"
    if need <= memory_model.FIT * room:
        return "ddp", f"the whole model takes {fits}"
    if (problem := _unserved(config, facts)) is not None:
        return "ddp", f"the whole model takes {fits}, and fsdp2 does not serve here: {problem}"
    less = _needed(config, facts, "fsdp2")
    return (
        "fsdp2",
        f"the whole model would take {fits}; a share and what is put together at once take {figures.size(less or 0)}",
    )


def _needed(config: RunConfig, facts: Facts, strategy: Literal["ddp", "fsdp2"]) -> int | None:
    """Bytes at the peak on each device, layers computed again where that is left to us."""
    classes = memory_model.memory(config.with_values({SPEC: strategy}), facts, _checkpointing(config))
    return None if classes is None else sum(classes.values())


def _checkpointing(config: RunConfig) -> Any:
    asked = config.memory.gradient_checkpointing
    return True if asked in ("auto", "full") else asked


def _unserved(config: RunConfig, facts: Facts) -> str | None:
    """What the first row that refuses fsdp2 says it must be."""
    if config.distributed.expert_parallel_size > 1:
        return f"{_DIVIDED}."
    asked = config.with_values({SPEC: "fsdp2"})
    findings = own_findings(__name__, asked, facts)
    return next((finding.todo for finding in findings if finding.path == SPEC.path), None)
