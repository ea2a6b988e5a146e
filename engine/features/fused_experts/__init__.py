"""`kernels.fused_experts`: the experts of a mixture, with the adapters on them, in one block of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from engine.config.facts import Facts, ModelFacts
from engine.config.findings import Finding, must
from engine.config.rule import Refused, leave_out, one_of, refused, rule
from engine.config.tree import RunConfig, fields
from engine.facts.counts import device_count, known_model
from engine.features.feature import TIMED, Layers, no_mixed_precision
from engine.features.packed_experts import UNSERVED, packs
from engine.kernels.requirements import CAPABILITY, LARGEST_EXPERT_RANK

SETTING = fields.kernels.fused_experts
AFTER = ("auto_compose",)

MEASURED = (9, 0)
"""Compute capability of the cards on which whole steps were measured: 8 layers of Qwen3-30B-A3B on an H100, 4 x 2,048 tokens,
adapters on attention and experts."""
KEPT_WIDE = 2.5
"""Numbers that a layer keeps of a token for each of its experts' width: gate and up, and what is rank-sized; what goes down is
formed again from the two. With nothing computed again a step of those 8 layers took 16.9 GiB of an H100; with the 4 of other
layers 18.9 were estimated."""
_UNSET = leave_out(SETTING, "let it be chosen")

refused(
    __name__,
    Refused(
        "fused-experts-need-a-card",
        SETTING,
        one_of(True),
        "false or auto without a GPU",
        "The kernels run on a GPU; a CPU has torch's own operations.",
        _UNSET,
        gpu=False,
    ),
    Refused(
        "fused-experts-need-a-card",
        SETTING,
        one_of(True),
        "false or auto on {gpu.name}",
        f"The kernels are compiled for compute capability {'.'.join(map(str, CAPABILITY))} and above, and this card has {{has}}.",
        _UNSET,
        below=CAPABILITY,
    ),
    no_mixed_precision("fused-experts-have-no-mixed-precision", SETTING),
)


def in_force(config: RunConfig, facts: Facts) -> bool | Literal["auto"]:
    """Whether experts are computed so; `auto` where that is chosen by timing."""
    asked = config.kernels.fused_experts
    return chosen(config, facts)[0] if asked == "auto" else asked


def chosen(config: RunConfig, facts: Facts) -> tuple[bool | Literal["auto"], str]:
    """What `auto` takes, and why: the kernels where whole steps were measured to be faster by them."""
    model = known_model(config, facts)
    if model is not None and model.model_type and not model.experts:
        return False, "the model is no mixture of experts"
    if packs(config, model):
        return False, "packed experts have a pass of their own, which takes the kernels where they serve"
    if config.kernels.kernel_auto_compose:
        return "auto", TIMED
    if facts.machine is None:
        return False, "the machine is not known yet; the launch decides"
    if model is None or not model.model_type:
        return False, "the model's shape is not known yet"
    if (reason := unmeasured(config, facts, model)) is not None:
        return False, f"{reason}, where it is taken if it is asked for"
    return True, f"{facts.machine.gpus[0].name} computes experts with their adapters faster and in less memory by it"


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """The kernels keep less of what is as wide as the experts."""
    return replace(layers, mlp_kept=KEPT_WIDE) if in_force(config, facts) is True and layers.model.experts else layers


def unmeasured(config: RunConfig, facts: Facts, model: ModelFacts) -> str | None:
    """What no step was measured with, or the kernels do not serve."""
    gpus, adapter = facts.machine.gpus if facts.machine is not None else (), config.adapter
    if not gpus:
        return "there is no GPU"
    if (old := next((gpu.name for gpu in gpus if gpu.capability < MEASURED), None)) is not None:
        return f"{old} is older than the cards that it was measured on"
    if model.model_type in UNSERVED:
        return UNSERVED[model.model_type]
    if adapter.kind != "lora" or not adapter.target_parameters:
        return "the experts have no adapters"
    if adapter.r > LARGEST_EXPERT_RANK:
        return f"the kernels hold adapters up to rank {LARGEST_EXPERT_RANK}"
    if config.model.dtype != "bfloat16":
        return f"it was not measured in {config.model.dtype}"
    if config.model.quantization != "none" or model.stored not in ("", "mxfp4"):
        return "the base is no plain numbers"
    if config.memory.layer_offloading:
        return "layers stream"
    if config.distributed.expert_parallel_size > 1:
        return "no step was measured with experts that are divided"
    shares = config.distributed.strategy == "fsdp2" and device_count(config) > 1
    return "weights are shared out" if shares else None


def _known(config: RunConfig, facts: Facts) -> ModelFacts | None:
    """The model, where fused experts are asked for and its shape is known."""
    model = known_model(config, facts) if config.kernels.fused_experts is True else None
    return model if model is not None and model.model_type else None


@rule(reads=(SETTING, fields.model.name))
def fused_experts_know_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if (model := _known(config, facts)) is None:
        return
    if not model.experts:
        todo = "This model is no mixture of experts: there is nothing to fuse."
        yield must(SETTING.path, f"false or auto for the model type {model.model_type}", True, todo, fix=_UNSET)
    elif (reason := UNSERVED.get(model.model_type)) is not None:
        todo = f"Its experts stay with transformers: {reason}."
        yield must(SETTING.path, f"false or auto for the model type {model.model_type}", True, todo, fix=_UNSET)


@rule(reads=(SETTING, fields.model.name, fields.adapter.kind, fields.adapter.r, fields.adapter.target_parameters))
def fused_experts_have_adapters_of_small_rank(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter = config.adapter
    if config.kernels.fused_experts is not True or adapter.kind != "lora" or not adapter.target_parameters:
        return
    if adapter.r > LARGEST_EXPERT_RANK:
        todo = f"The kernels hold adapters of experts up to rank {LARGEST_EXPERT_RANK}; PEFT computes larger ones."
        yield must(
            SETTING.path, f"false or auto with {fields.adapter.r.path} {adapter.r:,} on experts", True, todo, fix=_UNSET
        )


@rule(reads=(SETTING, fields.model.quantization))
def fused_experts_read_plain_weights(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    stored = model.stored if model is not None and not packs(config, model) else ""
    if config.kernels.fused_experts is True and (stored or config.model.quantization == "fp8"):
        held = f"weights stored in {stored}" if stored else "weights in fp8"
        todo = "The kernels multiply experts in bfloat16, float16 and float32."
        yield must(SETTING.path, f"false or auto beside {held}", True, todo, fix=_UNSET)
