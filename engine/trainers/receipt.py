"""What was really done, read off the built model and trainer: never copied from the config.

Each entry says what was requested, what is in force, on how many modules or parameters, and a detail in words.
`unmet` names requested features that touched nothing; they end the run before its first step.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engine import figures
from engine.compat import fsdp2
from engine.compat.staging import local
from engine.compat.state_kernels import computed_by
from engine.compat.trl_head import FusedForward
from engine.config.adapter import Lora, NoAdapter
from engine.config.optimizers import BUILT_HERE, MATRICES_ONLY, PROJECTED
from engine.config.tree import RunConfig, fields
from engine.data.prepare import Prepared
from engine.data.vision import images_of, read_by
from engine.errors import host_of, visible
from engine.facts.state_kernels import FLA, FLA_MODULE
from engine.features.attention_backend.sdpa_cudnn_workaround import NAME as WHOLE_TILES
from engine.features.built import Notes, base_model
from engine.features.cut_cross_entropy.apply import fused_heads
from engine.features.gradient_checkpointing.tiers import TIERS, tier_of
from engine.features.packed_experts import EXPERTS_ALONE
from engine.hardware import gpu_links, installed
from engine.models.adapter_folder import Begun
from engine.models.expert_shards import full_numel, is_divided, share_of
from engine.models.load import Loaded
from engine.models.packed_experts import packed_experts
from engine.models.processors import UnreadVideos, pixel_limits
from engine.models.sizes import format_of, weights_in
from engine.models.stored_fp8 import Fp8Linear, Held
from engine.models.stored_packed.linear import PackedLinear
from engine.models.stored_packed.loading import HeldPacked
from engine.models.vision_parts import vision_parts
from engine.run import network
from engine.run.nodes import hosts
from engine.run.store import RunFolder
from engine.trainers import sharded, trackers
from engine.trainers.context_parallel import DividesRows, Ring
from engine.trainers.optimizers.building import receipt_note
from engine.trainers.optimizers.loraplus import faster_weights
from engine.trainers.run_trainer import RunTrainer

MASKED = frozenset({"sdpa", "eager", WHOLE_TILES})
"""Attention that keeps the documents of a pack apart by a mask."""
SMALLEST_8BIT = 4096  # bitsandbytes: min_8bit_size


def receipt(
    config: RunConfig,
    trainer: RunTrainer,
    prepared: Prepared,
    loaded: Loaded | None = None,
    why: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The entries of the `receipt` event for a trainer that is about to start; `loaded` is its model
    as it was loaded, `why` has the reasons of what was `auto`."""
    model, why = trainer.model, why or {}
    entries = [
        _precision(config, model, why.get(fields.optim.tf32.path)),
        _parameters(config, model),
        _adapter(config, model, loaded.adapter if loaded else None),
        _attention(config, model, loaded.attention_reason if loaded else "", why.get(fields.model.attention.path)),
        _checkpointing(config, model, why),
        _loss(config, trainer, why.get("method.reference")),
        _optimizer(config, trainer),
        *_chosen(config, trainer, why),
        _rows(config, prepared),
        _entry("tokens fingerprint", None, prepared.fingerprint, detail="of ids and labels of the first rows"),
    ]
    if (processor := images_of(trainer.processing_class)) is not None:
        entries.append(_images(config, processor, why.get(fields.data.image_backend.path)))
        entries.append(_loaders(config, trainer, why.get(fields.data.dataloader_num_workers.path)))
    entries += _of_numbers(config, trainer)
    entries += trackers.entries(trainer)
    if config.run.notify:
        when = "when the run ends, fails, diverges, stalls or fills the disk"
        entries.append(_entry("notifications", "on", "on", detail=f"to {visible(host_of(config.run.notify))}, {when}"))
    if (ranks := trainer.accelerator.num_processes) > 1:
        entries += [
            _processes(config, ranks, trainer.run),
            _strategy(config, trainer, why.get("distributed.strategy"), why.get("distributed.reshard_after_forward")),
        ]
    if isinstance(trainer, DividesRows) and trainer.ring is not None:
        entries.append(_ring(config, trainer.ring))
    if config.model.quantization not in ("none", "fp8"):  # which engine.features.fp8_base.apply tells
        entries.append(_quantization(config, model))
    if loaded is not None and loaded.stored_fp8 is not None:
        entries.append(_stored_fp8(model, loaded.stored_fp8))
    if loaded is not None and loaded.stored_packed is not None:
        entries.append(_stored_packed(model, loaded.stored_packed))
    if loaded is not None and loaded.stored_mxfp4:
        entries.append(_stored_mxfp4(model))
    if functions := computed_by(base_model(model)):
        entries.append(_states(functions, loaded.without_kernels if loaded else ""))
    if config.data.packing:
        entries.append(_packing(config, model, prepared))
    if config.model.name == "builtin/tiny" and config.model.tokenizer is not None:
        entries.append(
            _entry(
                "builtin/tiny", None, "untrained", detail="built with the vocabulary of model.tokenizer: random weights"
            )
        )
    return entries


def _of_numbers(config: RunConfig, trainer: RunTrainer) -> Iterator[dict[str, Any]]:
    """What else decides the numbers of a step."""
    if config.run.full_determinism:
        yield _determinism()
    if (alpha := trainer.args.neftune_noise_alpha) is not None:
        width = base_model(trainer.model).config.get_text_config().hidden_size
        detail = f"uniform within {alpha:g} / sqrt(L x {width:,}) for rows of L tokens, in training alone"
        yield _entry("noise on embeddings", config.optim.neftune_noise_alpha, alpha, 1, detail)


def unmet(config: RunConfig, entries: list[dict[str, Any]]) -> str | None:
    """The sentence for a requested feature that touched nothing, or None."""
    by_name = {entry["feature"]: entry for entry in entries}
    for feature, asked in (
        ("adapter", config.adapter.kind != "none"),
        ("gradient checkpointing", config.memory.gradient_checkpointing in (True, "selective", "medium", "full")),
        ("quantization", config.model.quantization != "none"),
        ("packing", config.data.packing),
        ("full determinism", config.run.full_determinism),
        ("strategy", config.distributed.strategy == "fsdp2" and "strategy" in by_name),
        ("optimizer", config.optim.optim.endswith("8bit") or config.optim.optim in MATRICES_ONLY | PROJECTED),
    ):
        if asked and not by_name[feature]["count"]:
            return f"{feature} was requested and touched nothing in this model: turn it off or choose another model."
    return None


def _entry(feature: str, requested: Any, effective: Any, count: int | None = None, detail: str = "") -> dict[str, Any]:
    return {"feature": feature, "requested": requested, "effective": effective, "count": count, "detail": detail}


def _rows(config: RunConfig, prepared: Prepared) -> dict[str, Any]:
    if (stream := prepared.stream) is None:
        detail = "; ".join(prepared.warnings) or "every row is used as it is"
        return _entry("rows", None, prepared.counts["kept"], count=prepared.counts["packs"] or None, detail=detail)
    files = len(prepared.sources)
    mixed = "shards and the rows in each mixed by the seed" if config.data.shuffle else "in the order of the files"
    detail = (
        f"prepared while training from {files:,} file{'' if files == 1 else 's'}, {mixed}; not counted before: rows that "
        "are left out or cut are told at the end"
    )
    return _entry("rows", True, "streamed", count=sum(lane.total for lane in stream.walk.lanes) or None, detail=detail)


def _images(config: RunConfig, processor: Any, auto: str | None) -> dict[str, Any]:
    """What reads images, and between which numbers of pixels it keeps them."""
    detail = type(processor).__name__
    if isinstance(getattr(processor, "video_processor", None), UnreadVideos):
        detail += ", without videos"
    if (limits := pixel_limits(processor)) is not None:
        detail += f"; images of {limits[0]:,} to {limits[1]:,} pixels"
    asked = config.data.image_backend if auto is None else "auto"
    return _entry("images", asked, read_by(processor), detail=f"{detail}; {auto}" if auto else detail)


def _packing(config: RunConfig, model: PreTrainedModel | PeftModel, prepared: Prepared) -> dict[str, Any]:
    apart = config.data.packing_cross_doc_attn_mask
    return _entry(
        "packing",
        "apart" if apart else "joined",
        "apart" if "seq_lengths" in prepared.dataset.column_names else "joined",
        count=prepared.counts["packs"] or (len(prepared.dataset) if prepared.stream else 0),
        detail=f"packs; tokens see their own document only{_separated_by(model)}" if apart else "packs",
    )


def _states(functions: Mapping[str, tuple[str, int]], without: str) -> dict[str, Any]:
    """What computes the layers that carry a state, by the functions they call: a package's kernels or torch's own form."""
    scans = {name: by for name, by in functions.items() if name != "causal_conv1d_fn"} or functions
    packages = {package for package, _ in scans.values()} - {"transformers"}
    named = {FLA_MODULE: FLA}
    versions = {each: installed(named.get(each, each)) for each in sorted(packages)}
    effective = ", ".join(f"{named.get(each, each)} {version or ''}".strip() for each, version in versions.items())
    own = "transformers' own form in torch"
    calls = "; ".join(f"{name} by {own if by == 'transformers' else by}" for name, (by, _) in functions.items())
    detail = f"{calls}; {FLA} is left out: {without}" if without and FLA_MODULE not in packages else calls
    return _entry(
        "layers with a state", None, effective or "torch", max(many for _, many in functions.values()), detail
    )


def _loaders(config: RunConfig, trainer: RunTrainer, auto: str | None) -> dict[str, Any]:
    """How many processes read images beside the step, and what they may hold."""
    count, data = trainer.args.dataloader_num_workers, config.data
    kept = f"{figures.size(data.image_cache_size << 20)} of decoded images kept"
    if count:
        ahead = trainer.args.dataloader_prefetch_factor
        held = f"{kept} and {ahead} batch{'' if ahead == 1 else 'es'} ahead in each"
    else:
        held = f"the training process reads them between steps; {kept}"
    return _entry(
        "loader processes",
        data.dataloader_num_workers if auto is None else "auto",
        count,
        detail=f"{held}; {auto}" if auto else held,
    )


def _separated_by(model: PreTrainedModel | PeftModel) -> str:
    masked = model.config._attn_implementation in MASKED
    return ", by a mask of all pairs of tokens in each layer" if masked else ", without a mask of all pairs of tokens"


def _processes(config: RunConfig, ranks: int, run: RunFolder) -> dict[str, Any]:
    where = "each on a GPU"
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        where = f"on the CPU, {threads} thread{'' if threads == 1 else 's'} each"
    batches = ranks // config.distributed.context_parallel_size
    together = config.optim.per_device_train_batch_size * config.optim.gradient_accumulation_steps * batches
    detail = f"{where}; a step averages the gradients of {together} rows (or answers) over them"
    if (several := config.distributed.nodes) > 1:
        detail += f"; on {several} nodes: {', '.join(hosts(run, several))}"
    if torch.cuda.is_available():
        links = ", ".join(f"{count} pairs over {words}" for words, count in gpu_links().items())
        asked = network.settings(os.environ)
        detail += (f"; {links}" if links else "") + (f"; {asked}" if asked else "")
    return _entry("processes", config.run.devices, ranks, ranks, detail)


def _strategy(config: RunConfig, trainer: RunTrainer, auto: str | None, together: str | None) -> dict[str, Any]:
    """How the processes hold the model, by the weights themselves: those that are shared out are DTensors. `together` is why
    their layers stay together or not, where that was `auto`."""
    split, weights, here, numbers = sharded.shares(trainer.model)
    every = list(trainer.model.parameters())
    held = [each for each in every if isinstance(each, DTensor)] or every
    offloaded = all(local(weight).device.type == "cpu" for weight in held)
    replicas, shares = sharded.mesh(trainer.model)
    if split:
        detail = f"of {weights} weights are shares (DTensor); the first process holds {here:,} of {numbers:,} numbers"
        detail += f"; the {weights - split} of the parts that see stay whole" if split < weights else ""
        if replicas > 1:
            detail += f"; {replicas} replicas, each on {shares} processes"
        kept = not fsdp2.reshards(trainer.model)
        detail += "; layers stay together between forward and backward pass" if kept else ""
        detail += f" ({together})" if kept and together else f"; layers are let go of: {together}" if together else ""
        detail += "; shares lie in main memory" if config.distributed.cpu_offload and offloaded else ""
    elif is_divided(trainer.model):
        detail = f"each process holds {numbers:,} of {sum(map(full_numel, every)):,} numbers: experts are divided"
    else:
        detail = f"each process holds all {numbers:,} numbers"
    detail += f"; {auto}" if auto else ""
    asked = config.distributed.strategy if auto is None else "auto"
    as_asked = split and replicas == config.distributed.dp_replicate_size
    as_asked = as_asked and (offloaded or not config.distributed.cpu_offload)
    return _entry("strategy", asked, "fsdp2" if split else "ddp", split if as_asked else 0, detail)


def _ring(config: RunConfig, ring: Ring) -> dict[str, Any]:
    """Over how many processes rows are divided, by the ring that the trainer attends in."""
    several = ring.ranks // ring.size
    rings = f"{several} rings of {ring.size}, each" if several > 1 else f"all {ring.size} processes"
    detail = f"{rings} with a batch between them: {2 * ring.size} pieces of each row, two on a process; torch's ring attention"
    return _entry("context parallelism", config.distributed.context_parallel_size, ring.size, ring.size, detail)


def _determinism() -> dict[str, Any]:
    on = torch.are_deterministic_algorithms_enabled()
    words = "operations add up in one order; nothing is chosen by timing; one that has no such form ends the run"
    return _entry("full determinism", True, "on" if on else "off", int(on), words)


def _chosen(config: RunConfig, trainer: RunTrainer, why: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What was left at `auto` and has no line of its own otherwise, with the reason of each."""
    if (reason := why.get(fields.optim.learning_rate.path)) is not None:
        yield _entry("learning rate", "auto", trainer.args.learning_rate, detail=reason)
    if (reason := why.get(fields.run.devices.path)) is not None:
        yield _entry("devices", "auto", trainer.accelerator.num_processes, detail=reason)
    if (reason := why.get((skips := fields.method.skip_zero_advantage).path)) is not None:
        yield _entry("zero advantages", "auto", "left out" if skips.value(config) else "computed", detail=reason)
    if config.data.evaluates and (reason := why.get(fields.run.eval_steps.path)) is not None:
        # An epoch's steps are known once the training begins; those of the arguments stand for them till then.
        times = config.run.evals_per_epoch
        effective = (
            _every(trainer.args.eval_steps)
            if times is None
            else f"{'once' if times == 1 else f'{times:,} times'} an epoch"
        )
        yield _entry("held-out rows", "auto", effective, detail=reason)
    if config.run.prompts and (reason := why.get(fields.run.prompts_steps.path)) is not None:
        yield _entry("pinned prompts", "auto", _every(config.run.prompts_steps), detail=reason)


def _every(steps: Any) -> str:
    return "every step" if steps == 1 else f"every {steps:,} steps"


def _precision(config: RunConfig, model: PreTrainedModel | PeftModel, tf32: str | None = None) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    for parameter in model.parameters():
        kinds[format_of(parameter)] += weights_in(parameter)
    trained = Counter(_name(p.dtype) for p in model.parameters() if p.requires_grad)
    detail = ", ".join(f"{count:,} in {kind}" for kind, count in kinds.most_common())
    if trained:
        detail += f"; trained in {', '.join(sorted(trained))}"
    if torch.cuda.is_available():
        detail += f"; TF32 {'on' if torch.backends.cuda.matmul.fp32_precision == 'tf32' else 'off'}"
        detail += f" ({tf32})" if tf32 else ""
    return _entry("precision", config.model.dtype, kinds.most_common(1)[0][0], sum(kinds.values()), detail)


def _parameters(config: RunConfig, model: PreTrainedModel | PeftModel) -> dict[str, Any]:
    trained = sum(full_numel(p) for p in model.parameters() if p.requires_grad)
    total = sum(full_numel(p) if share_of(p) is not None else weights_in(p) for p in model.parameters())
    detail = f"of {total:,} ({trained / max(total, 1):.2%})"
    named = config.adapter.unfrozen_parameters or None if isinstance(config.adapter, NoAdapter) else None
    if named:
        weights = [p.requires_grad for p in model.parameters()]
        detail += f"; {sum(weights)} of {len(weights)} weights, the others frozen"
    if config.model.train_vision != "all":
        parts = vision_parts(base_model(model))
        seeing = [p.numel() for n, p in base_model(model).named_parameters() if p.requires_grad and parts.part_of(n)]
        detail += f"; {sum(seeing):,} of them in the vision parts, by model.train_vision {config.model.train_vision}"
    return _entry("trainable parameters", named, trained, trained, detail)


def _adapter(config: RunConfig, model: PreTrainedModel | PeftModel, begun: Begun | None) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    kinds = Counter(name.rsplit(".", 1)[-1] for name, _ in layers)
    numbers = {_name(p.dtype) for n, p in model.named_parameters() if "lora_" in n}
    detail = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
    if directions := sum(bool(getattr(module, "use_dora", {}).get("default")) for _, module in layers):
        detail += f"; {directions} with DoRA's lengths"
    if layers:
        scales = sorted({f"{module.scaling['default']:.4g}" for _, module in layers})
        detail += f"; scaled by {', '.join(scales)}"
    if whole := sum(isinstance(module, ModulesToSaveWrapper) for module in model.modules()):
        detail += f"; {whole} {'module' if whole == 1 else 'modules'} trained whole"
    if numbers:
        detail += f"; in {', '.join(sorted(numbers))}"
    if isinstance(config.adapter, Lora) and config.adapter.loraplus_lr_ratio is not None:
        detail += f"; {len(faster_weights(model))} weights learn at {config.adapter.loraplus_lr_ratio:g} times the rate"
    if begun is not None:
        learned = (
            f"its second matrices up to {begun.largest:.3g}"
            if begun.largest
            else "which adds nothing: it never learned"
        )
        rounded = f", rounded to {', '.join(sorted(numbers))}" if begun.rounded else ""
        detail += f"; goes on from {begun.weights} weights of {begun.place}, {learned}{rounded}"
    elif config.adapter.kind == "lora" and config.adapter.path:
        detail += "; goes on from a checkpoint of this run"
    if isinstance(model.get_input_embeddings(), LoraLayer) and model.config.get_text_config().tie_word_embeddings:
        detail += (
            "; embeddings are the head's weights too: this adapter is to be used beside them, merged it changes both"
        )
    return _entry("adapter", config.adapter.kind, "lora" if layers else "none", len(layers), detail)


def _optimizer(config: RunConfig, trainer: RunTrainer) -> dict[str, Any]:
    """The optimizer's class and what it moves; for states of 8 bits how many weights have them: small ones keep 32."""
    name = config.optim.optim
    if name in BUILT_HERE:
        return _entry("optimizer", name, *receipt_note(config.optim, trainer.model))
    built = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    kind = (
        type(built)
        if built is not None
        else trainer.get_optimizer_cls_and_kwargs(trainer.args, base_model(trainer.model))[0]
    )
    if not name.endswith("8bit"):
        return _entry("optimizer", name, kind.__name__)
    embeddings = {id(m.weight) for m in trainer.model.modules() if isinstance(m, torch.nn.Embedding)}
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    count = sum(p.numel() >= SMALLEST_8BIT and id(p) not in embeddings for p in weights)
    detail = f"of {len(weights)} weights in 8 bits; embeddings and weights below {SMALLEST_8BIT:,} numbers in 32"
    return _entry("optimizer", name, kind.__name__, count, detail)


def _attention(
    config: RunConfig, model: PreTrainedModel | PeftModel, replaced: str, auto: str | None = None
) -> dict[str, Any]:
    asked = config.model.attention if auto is None else "auto"
    detail = "; ".join(filter(None, (auto, replaced)))
    return _entry("attention", asked, model.config._attn_implementation, detail=detail)


def _checkpointing(config: RunConfig, model: PreTrainedModel | PeftModel, why: Mapping[str, str]) -> dict[str, Any]:
    # transformers' models hold the switch themselves beside each of their layers, and are none
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    tiers = Counter(tier for module in layers or model.modules() if (tier := tier_of(module)) is not None)
    auto, spared = (
        why.get(each.path) for each in (fields.memory.gradient_checkpointing, fields.memory.recompute_num_layers)
    )
    asked = config.memory.gradient_checkpointing if auto is None else "auto"
    words = [TIERS[next(iter(tiers))]] if tiers else []
    if tiers and config.memory.recompute_num_layers is not None and (left := len(layers) - sum(tiers.values())) > 0:
        words.append(f"{left} layers, the last ones, keep everything")
    words += filter(None, (auto, spared if tiers else None))
    return _entry("gradient checkpointing", asked, next(iter(tiers), "off"), sum(tiers.values()), "; ".join(words))


def _quantization(config: RunConfig, model: PreTrainedModel | PeftModel) -> dict[str, Any]:
    if (kind := config.model.quantization) in EXPERTS_ALONE:
        count = sum(1 for _ in packed_experts(model))
        detail = f"weights of experts; other layers in {config.model.dtype}"
        return _entry("quantization", kind, kind if count else "none", count, detail)
    kinds = Counter(
        type(module).__name__
        for module in model.modules()
        # PEFT calls its own layer around one of these by the same name.
        if type(module).__module__.startswith("bitsandbytes.")
        and type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    )
    count = sum(kinds.values())
    return _entry(
        "quantization",
        config.model.quantization,
        next(iter(kinds), "none"),
        count,
        "linear layers" + ("; statistics quantized again" if config.model.quantization != "int8" else ""),
    )


def _stored_fp8(model: PreTrainedModel | PeftModel, held: Held) -> dict[str, Any]:
    """What became of weights that the model's files hold in FP8."""
    scales = f"blocks of {held.block[0]} x {held.block[1]}" if held.block else "a scale for each matrix"
    of_experts = "as they are stored" if held.packed else "scaled once"
    scales += f"; {held.fused} matrices of experts {of_experts}" if held.fused else ""
    kept = [module.weight.dtype for module in model.modules() if isinstance(module, Fp8Linear)]
    if kept:
        detail = f"linear layers; {scales}; numbers stay as stored and are scaled in each product"
        return _entry("stored weights", "fp8", _name(kept[0]), len(kept), detail)
    detail = f"linear layers; {scales}; scaled once, as full weights are trained"
    return _entry("stored weights", "fp8", _name(next(model.parameters()).dtype), held.layers, detail)


def _stored_packed(model: PreTrainedModel | PeftModel, held: HeldPacked) -> dict[str, Any]:
    """What became of weights that the model's files hold as GPTQ, AWQ or compressed-tensors packs them."""
    dtype = _name(next(weight for weight in model.parameters() if weight.is_floating_point()).dtype)
    if not held.kept:
        return _entry(
            "stored weights", held.method, dtype, held.widened, "weights, widened once, as full weights are trained"
        )
    kept = Counter(module.form.kind for module in model.modules() if isinstance(module, PackedLinear))
    kept += Counter(weight.form.kind for _, weight in packed_experts(model))
    kinds = ", ".join(f"{count} in {kind}" for kind, count in sorted(kept.items()))
    detail = (
        f"weights in {figures.size(held.packed_bytes)} ({kinds}), which stay packed and are made anew in each product"
    )
    detail += f"; {held.experts} of them hold all experts of a layer" if held.experts else ""
    detail += f"; {held.widened} widened once" if held.widened else ""
    return _entry("stored weights", held.method, " and ".join(sorted(kept)) or dtype, sum(kept.values()), detail)


def _stored_mxfp4(model: PreTrainedModel | PeftModel) -> dict[str, Any]:
    """What became of experts that the model's files hold in MXFP4."""
    if kept := sum(1 for _ in packed_experts(model)):
        return _entry("stored weights", "mxfp4", "mxfp4", kept, "weights of experts, whose bytes stay as stored")
    wide = [weight for name, weight in model.named_parameters() if ".experts." in name and weight.dim() == 3]
    return _entry("stored weights", "mxfp4", _name(wide[0].dtype), len(wide), "weights of experts, widened once")


def _loss(config: RunConfig, trainer: RunTrainer, reference: str | None) -> dict[str, Any]:
    """The loss as asked for, the library's trainer that computes it, and what our trainer tells of it."""
    library = next((each for each in type(trainer).__mro__ if each.__module__.startswith("trl.")), type(trainer))
    section = config.method
    plain = "cross-entropy" if section.rows == "language" else config.method.kind
    told = [*filter(None, (trainer.receipt_note(), reference))]
    heads = fused_heads(trainer.built(Notes()))
    if not all(isinstance(vars(model)["forward"], FusedForward) for model in heads):
        told.insert(0, "TRL's fused head: logits are formed block by block, and again for the gradients")
    return _entry(
        "loss",
        getattr(config.method, "loss_type", plain),
        trainer.loss_by or library.__name__,
        detail="; ".join(told),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
