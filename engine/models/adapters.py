"""What is trained: LoRA adapters (PEFT's own) on targets that are checked to exist, or weights picked by name.

Adapters take the number format of a bfloat16 model (float32 adapters under autocast cost an eighth of an 8B step on an
H100) unless `adapter.autocast_adapter_dtype` asks for float32; beside any other they are float32, as DoRA's lengths are
beside all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from engine.config.adapter import Lora
from engine.config.kinds import Head
from engine.config.tree import RunConfig
from engine.errors import ModelError, first_line, nearest, visible

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

TASKS: dict[Head, str] = {
    "vocabulary": "CAUSAL_LM",
    "score": "SEQ_CLS",
    "steps": "TOKEN_CLS",
    "none": "FEATURE_EXTRACTION",
}


def lora_config(config: RunConfig, adapter: Lora) -> LoraConfig:
    """PEFT's LoraConfig from the adapter section."""
    from peft import LoraConfig

    head = config.method.head
    return LoraConfig(
        # PEFT trains a new head whole beside the adapter where the task has one; `all-linear` must then leave it out.
        task_type=TASKS[head],
        # An embedding is pooled from hidden states: a pooler of the model's own is not asked.
        exclude_modules={"steps": ["score", "classifier"], "none": ["pooler.dense"]}.get(head),
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        target_parameters=adapter.target_parameters or None,
        modules_to_save=adapter.modules_to_save or None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        bias=adapter.bias,
    )


def add_adapter(model: PreTrainedModel, config: RunConfig) -> PreTrainedModel | PeftModel:
    """The model with its adapter, or the model itself, frozen but for `unfrozen_parameters`.

    Raises ModelError for targets and names that the model lacks.
    """
    from engine.models.stored_packed.linear import ignore_in_ddp
    from engine.models.vision_parts import freeze_vision, refuse_without_vision, vision_parts, without_vision

    adapter, vision = config.adapter, vision_parts(model)
    refuse_without_vision(config, vision)
    if adapter.kind == "none":
        frozen = _frozen_but(model, adapter.unfrozen_parameters)
        freeze_vision(config, frozen, vision)
        ignore_in_ddp(frozen)
        return frozen
    import torch
    from peft import get_peft_model

    from engine.models.expert_shards import unsharded
    from engine.models.layer_names import as_named, name_for_files

    _check_targets(model, adapter.target_modules)
    _check_parameters(model, adapter.target_parameters)
    _check_saved(model, adapter.modules_to_save)
    in_float32 = config.model.dtype != "bfloat16" or adapter.autocast_adapter_dtype
    asked = _linear_alone(lora_config(config, adapter), model)
    if (excluded := without_vision(model, vision, config.model.train_vision)) is not None:
        asked.exclude_modules = excluded
    try:
        with unsharded(model), as_named(model):
            adapted = get_peft_model(model, asked, autocast_adapter_dtype=in_float32)
    except ValueError as problem:
        first = visible(first_line(problem))
        raise ModelError(
            f"adapter.target_modules: PEFT has no such adapter for this model: {first}",
            "Name other layers, and experts that are one weight in adapter.target_parameters.",
        ) from problem
    name_for_files(adapted)
    _check_head(model, config)
    _check_biases(adapted, adapter.bias)
    for name, weight in adapted.named_parameters():
        if "lora_magnitude_vector" in name:
            # About 1 each: in bfloat16 a usual step is rounded away, and DoRA's lengths would stay as they are.
            weight.data = weight.data.float()
        elif not in_float32 and "lora_" in name and weight.dtype == torch.float32:
            # Beside weights of int8, which have no format to take, PEFT makes them float32.
            weight.data = weight.data.to(torch.bfloat16)
    ignore_in_ddp(adapted)
    return adapted


def _linear_alone(asked: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """The same with `all-linear` as names, where experts are one weight or PEFT would take what no adapter acts on.

    PEFT would take their weights and the router's for linear layers too in some families (Qwen3-MoE, Mixtral, OLMoE) and
    leave them in others (Qwen3.5-MoE, gpt-oss); here they have an adapter where `target_parameters` names them.
    """
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    from engine.models.layer_names import no_plain_layers

    if asked.target_modules != "all-linear":
        return asked
    left_out = no_plain_layers(model)
    if not left_out and not any(weight.ndim == 3 for weight in model.parameters()):
        return asked
    named = cast("LoraConfig", _maybe_include_all_linear_layers(asked, model))
    named.target_modules = [name for name in named.target_modules or () if name not in left_out]
    return named


def _frozen_but(model: PreTrainedModel, patterns: list[str]) -> PreTrainedModel:
    """Freezes every weight that no expression matches from its name's beginning. Raises ModelError for idle ones."""
    if not patterns:
        return model
    known = [re.compile(pattern) for pattern in patterns]
    idle = set(patterns)
    for name, weight in model.named_parameters():
        hits = {pattern.pattern for pattern in known if pattern.match(name)}
        weight.requires_grad_(bool(hits) and weight.is_floating_point())
        idle -= hits
    if idle:
        names = [name for name, _ in model.named_parameters()]
        raise ModelError(
            f"adapter.unfrozen_parameters: the expression {min(idle)!r} matches no weight of the model.",
            f"Weights are named such as {', '.join((*names[:3], names[-1]))}.",
        )
    return model


def _check_parameters(model: torch.nn.Module, targets: list[str]) -> None:
    from torch import nn

    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        matching = [shape for name, shape in shapes.items() if name == target or name.endswith("." + target)]
        if not matching:
            leaves = sorted({".".join(name.rsplit(".", 3)[1:]) for name, shape in shapes.items() if len(shape) == 3})
            raise ModelError(
                f"adapter.target_parameters: the model has no weight {target!r}.",
                f"Weights of experts are {', '.join(leaves[:6])}."
                if leaves
                else "It has no weights of three dimensions; target_modules serve its linear layers.",
            )
        if any(
            weight.element_size() == 1
            and weight.is_floating_point()
            and (name == target or name.endswith("." + target))
            for name, weight in model.named_parameters()
        ):
            raise ModelError(
                f"adapter.target_parameters: {target!r} is stored in FP8, and an adapter is added to plain numbers.",
                "Name its layer in target_modules.",
            )
        if any(path == owner or path.endswith("." + owner) for path in linear if (owner := target.rpartition(".")[0])):
            raise ModelError(
                f"adapter.target_parameters: {target!r} is the weight of a linear layer, which takes its adapter as a layer.",
                f"Name {target.rpartition('.')[0].rpartition('.')[2]!r} in adapter.target_modules.",
            )
        if any(len(shape) not in (2, 3) for shape in matching):
            raise ModelError(
                f"adapter.target_parameters: {target!r} has {len(matching[0])} dimension, and an adapter needs 2 or 3."
            )


def _check_saved(model: torch.nn.Module, names: list[str]) -> None:
    """Every name stands for a module, matched from its end as PEFT does, which says nothing of one that matches none."""
    paths = [path for path, _ in model.named_modules() if path]
    for name in names:
        if not any(path.endswith(name) for path in paths):
            leaves = sorted({path.rsplit(".", 1)[-1] for path in paths if not path.rsplit(".", 1)[-1].isdigit()})
            near = nearest(name, leaves)
            raise ModelError(
                f"adapter.modules_to_save: the model has no module {name!r}.",
                f"Did you mean {near!r}?" if near else f"It has {', '.join(leaves[:12])}.",
            )
    from engine.kernels.experts.packed import PackedExperts
    from engine.models.stored_fp8 import Fp8Linear
    from engine.models.stored_packed.linear import PackedLinear

    for path, module in model.named_modules() if names else ():
        if not any(path == name or path.endswith("." + name) for name in names):
            continue
        if isinstance(module, Fp8Linear):
            raise ModelError(
                f"adapter.modules_to_save: {path!r} is held in FP8 and cannot be trained whole.",
                "Give it an adapter through target_modules.",
            )
        if isinstance(module, PackedLinear):
            raise ModelError(
                f"adapter.modules_to_save: {path!r} is held in packed integers and cannot be trained whole.",
                "Give it an adapter through target_modules.",
            )
        if any(isinstance(weight, PackedExperts) for weight in module.parameters()):
            raise ModelError(
                f"adapter.modules_to_save: {path!r} has experts that are held in few bits and cannot be trained whole.",
                "Give them an adapter through target_parameters, or set model.quantize_moe_experts to false.",
            )


def _check_head(model: PreTrainedModel, config: RunConfig) -> None:
    """Losses read the head's own weight, so an adapter beside it would never be trained."""
    from peft.tuners.lora import LoraLayer

    head = model.get_output_embeddings() if config.method.head == "vocabulary" else None
    if isinstance(head, LoraLayer):
        name = next(path for path, module in model.named_modules() if module is head)
        raise ModelError(
            f"adapter.target_modules: {name!r} is the head, whose weight the losses read as it is, so its adapter would never "
            "be trained.",
            f"Leave it out, or train it whole with adapter.modules_to_save: [{name}].",
        )


def _check_biases(model: torch.nn.Module, bias: str) -> None:
    """Biases that were asked for are there: most decoders of today have none, and PEFT says nothing of it."""
    if bias == "none" or any(
        name.endswith("bias") for name, weight in model.named_parameters() if weight.requires_grad
    ):
        return
    where = "the model's layers with an adapter have" if bias == "lora_only" else "the model has"
    raise ModelError(f"adapter.bias: {bias} trains bias vectors, and {where} none.", "Leave it out.")


def _check_targets(model: torch.nn.Module, targets: str | list[str]) -> None:
    if targets == "all-linear":
        return
    names = [name for name, _ in model.named_modules() if name]
    leaves = sorted({leaf for name in names if not (leaf := name.rsplit(".", 1)[-1]).isdigit()})
    if isinstance(targets, str):
        if not any(re.fullmatch(targets, name) for name in names):
            raise ModelError(
                f"adapter.target_modules: the expression {targets!r} matches no module of the model.",
                f"Modules are named such as {', '.join(leaves[:8])}; the whole dotted name must match.",
            )
        return
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            near = nearest(target, leaves)
            raise ModelError(
                f"adapter.target_modules: the model has no module {target!r}.",
                f"Did you mean {near!r}?" if near else f"It has {', '.join(leaves[:12])}.",
            )
