"""Whether decoder layers are compiled where nobody said so: on a card, where it was measured to win. Pure and quick.

`auto` is held to more than `true`: what compiles but was measured on no card, or could not go back to plain layers in the
middle of a step, is left to be asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from engine import figures
from engine.config.facts import CompilerWait, Facts, ModelFacts
from engine.config.findings import Finding, Fix, must
from engine.config.kernels import COMPILE_OPTIONS, STACK_GRAPH
from engine.config.kinds import reference_of
from engine.config.rule import Refused, one_of, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.errors import nearest
from engine.facts import counts
from engine.features import attention_backend, fused_experts
from engine.features.feature import TIMED, Layers

SETTING = fields.kernels.torch_compile
AFTER = (
    "auto_compose",
    "activation_offloading",
    "bf16_full_eval",
    "fused_experts",
    "fused_lora",
    "fused_norm_rope",
    "liger_kernel",
    "router_load",
    "tile_timing",
)
"""Compiled are layers as they compute in the end."""

EARNS = 60
"""Steps that a run must have. With empty caches the first batch's wait is earned after 55 at 8B on an H100, and after some 80
to 115 at 0.6B on an H200 (10 to 15 s, each step 0.13 s shorter): a short run of a small model may lose seconds the first time."""
EARNS_PADDED = 150
"""Batches that a run of padded ones must have. They are compiled for any length at once: on an H100 with empty caches the wait
is earned after 62 at 8B (21 s) and 143 at 0.6B (17 s); with the caches of a run before, after 7 at 8B (6 s). The first batch of
one row and the first held out wait again."""
GAINS = 0.25
"""Of a compiled step, what a plain one takes beside, where that was not measured: 0.2 (0.6B) to 0.56 (8B) on an H100."""
LEAST = (8, 0)
"""Compute capability of the oldest cards taken: those that multiply in bfloat16."""
SHARED = "answers share their prompt's keys, which compiled layers do not"
"""Why compiled layers have no place where answers are trained after prompts that are computed once."""
_TILES = "A tile is differentiated inside the backward pass, which torch's compiler cannot follow"
_BY_TIMING = ("coordinate_descent_tuning", "coordinate_descent_check_all_directions", "max_autotune_gemm")
"""Options of torch's compiler that choose by timing, which it leaves out where numbers must be the same."""
_OPTIONS = *COMPILE_OPTIONS, STACK_GRAPH


def in_force(config: RunConfig, facts: Facts) -> bool | Literal["auto"]:
    """Whether layers are compiled; `auto` where that is chosen by timing."""
    asked = config.kernels.torch_compile
    return chosen(config, facts)[0] if asked == "auto" else asked


def chosen(config: RunConfig, facts: Facts) -> tuple[bool | Literal["auto"], str]:
    """What `auto` takes, and why."""
    if config.kernels.torch_compile_options:
        return True, "torch_compile_options are given"
    if config.distributed.context_parallel_size > 1:
        return False, "layers that divide the tokens of a row between devices are not compiled"
    if config.distributed.expert_parallel_size > 1:
        return (
            False,
            "layers that send tokens to experts on other devices are compiled, in pieces, where it is asked for",
        )
    if config.kernels.kernel_auto_compose:
        return "auto", TIMED
    if facts.machine is None:
        return False, "the machine is not known yet; the launch decides"
    reason = _no_card(facts) or _in_the_way(config) or _of_shares(config, facts) or _of_the_model(config, facts)
    if reason is not None:
        return False, reason
    steps = counts.total_steps(config, facts)
    batches = None if steps is None else steps * config.optim.gradient_accumulation_steps
    if (waited := _waited(facts.compiler)) is not None:
        least, words = waited
        if least is None:
            return False, words
        if batches is not None and batches < least:
            return False, f"{batches:,} batches are too few, {least:,} would earn {words}"
        many = "a run of unknown length" if batches is None else f"{batches:,} batches"
        return True, f"{many} earn {words}"
    if steps is not None and steps < EARNS:
        return False, f"{steps:,} steps are too few to earn the first batch's wait, {EARNS} would"
    if not config.data.packing and (reason := _too_few_padded(batches)) is not None:
        return False, reason
    card = facts.machine.gpus[0].name
    many = "a run of unknown length" if steps is None else f"{steps:,} steps"
    return True, f"{card} computes compiled layers faster, and {many} earn the first batch's wait"


def _waited(known: CompilerWait | None) -> tuple[int | None, str] | None:
    """From how many batches a wait that was measured on this machine is earned, and that wait in words; no number and why
    where it never is; None where too little was measured."""
    if known is None or not known.times:
        return None
    if known.again is None:
        return EARNS, "the wait, which is shorter since such layers were compiled here before"
    if known.plain and known.step and known.plain <= known.step:
        took = f"{figures.brief(known.step)} from batch to batch, plain ones {figures.brief(known.plain)}"
        return None, f"compiled layers were measured here and are no faster: {took}"
    gain = known.plain - known.step if known.plain and known.step else (known.step or 0) * GAINS
    if not gain:
        return None
    return math.ceil(known.again / gain), f"the wait of {figures.brief(known.again)} that was measured here"


def _too_few_padded(batches: int | None) -> str | None:
    if batches is None:
        return f"padded batches wait longer for the compiler; {EARNS_PADDED:,} would earn it, and their number is not known yet"
    if batches >= EARNS_PADDED:
        return None
    return f"{batches:,} batches of many lengths are too few to earn the compiler's wait, {EARNS_PADDED:,} would"


def _no_card(facts: Facts) -> str | None:
    if facts.machine is None or not facts.machine.gpus:
        return "there is no GPU"
    old = next((gpu.name for gpu in facts.machine.gpus if gpu.capability < LEAST), None)
    return None if old is None else f"{old} is older than the cards that it serves"


def _in_the_way(config: RunConfig) -> str | None:
    """The setting that is better left uncompiled unless compiling was asked for, as a reason."""
    memory, kernels = config.memory, config.kernels
    if config.method.rows == "prompts":
        return SHARED
    if config.adapter.kind == "lora" and config.adapter.use_dora:
        return "DoRA breaks a layer into many graphs"
    if config.model.quantization == "int8":
        return "bitsandbytes' 8-bit layers break a layer into many graphs"
    if memory.tiled_mlp:
        return _TILES
    if memory.layer_offloading:
        return "layers that stream are compiled where it is asked for"
    if memory.activation_offloading:
        return "activations that are offloaded are compiled where it is asked for"
    if kernels.fused_lora is True:
        return "LoRA's own backward pass is asked for"
    if kernels.use_liger_kernel is True:
        return "Liger's kernels are asked for"
    if kernels.quantization_aware is True:
        return "layers that round to int8 are compiled where it is asked for"
    return None


def _of_shares(config: RunConfig, facts: Facts) -> str | None:
    """What no compiled step under FSDP2 was measured with: an 8B was, all weights and LoRA, 949 ms for 1,283 and 782 for 1,230
    on two H100."""
    if config.distributed.strategy != "fsdp2":
        return None
    model = counts.known_model(config, facts)
    if config.distributed.cpu_offload or config.model.quantization != "none" or model is None or model.experts:
        return "shares of weights in main memory, in few bits or of experts are compiled where it is asked for"
    return None


def _of_the_model(config: RunConfig, facts: Facts) -> str | None:
    model = counts.known_model(config, facts)
    if model is not None and model.experts and (reason := _of_a_mixture(config, facts, model)) is not None:
        return f"{reason}, where mixtures of experts are compiled if it is asked for"
    if model is not None and model.stored:
        return f"weights stored in {model.stored} are compiled where it is asked for"
    computed = attention_backend.in_force(config, facts)
    if computed not in ("sdpa", attention_backend.VARLEN, attention_backend.CUDNN):
        return f"{computed} is compiled where it is asked for"
    if model is not None and attention_backend.carries_state(model) and attention_backend.kept_apart(config):
        return "layers that carry a state take documents one by one, which cuts their graphs: compiled where it is asked for"
    if not config.data.packing and config.model.quantization != "none":
        return f"padded batches over {config.model.quantization} weights are compiled where it is asked for"
    return None


def _of_a_mixture(config: RunConfig, facts: Facts, model: ModelFacts) -> str | None:
    """What no compiled step of a mixture was measured with: those of Qwen3-30B-A3B were, at 8 and at 48 layers of packed rows."""
    if fused_experts.in_force(config, facts) is not True:
        return f"experts do not run by {fused_experts.SETTING.path}"
    if not config.data.packing:
        return "rows are not packed"
    return fused_experts.unmeasured(config, facts, model)


refused(
    __name__,
    Refused(
        "torch-compile-options-need-torch-compile",
        fields.kernels.torch_compile_options,
        bool,
        "empty while kernels.torch_compile is false",
        "They act on compiled layers alone: set torch_compile to true, or remove them.",
        take(SETTING, True, "compile the layers"),
        beside={SETTING: one_of(False)},
    ),
)

KEPT = 0.75
"""The share of what is kept that compiled layers of a mixture keep where nothing is computed again; of dense ones it is counted
(`engine.planning.memory_model`)."""


OF_BLOCK, OF_GATED = (3, 4), (2, 2)
"""Numbers of its MLP's width that a compiled dense layer keeps of a token, gate, up and their product, and that are there
beside them while it is differentiated; `gated_sums` computes the product again and writes gradients over gate and up."""


def _gated(config: RunConfig) -> bool:
    """Whether adapters stand on gate and up as `gated_sums` takes them, as far as settings say."""
    adapter = config.adapter
    if adapter.kind != "lora" or adapter.use_dora or adapter.lora_dropout:
        return False
    # Weights in four or eight bits are no tensors that its kernels were given.
    if config.model.quantization in ("nf4", "fp4", "int8"):
        return False
    if config.model.dtype != "float32" and adapter.autocast_adapter_dtype:
        return False
    targets = adapter.target_modules
    names = {target.rpartition(".")[2] for target in targets} if isinstance(targets, list) else set()
    return targets == "all-linear" or names >= {"gate_proj", "up_proj"}


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """Compiled layers keep less; they count as compiled where that is asked for. Recorded ones keep it in their graphs' pool."""
    on_gpu = facts.machine is None or bool(facts.machine.gpus)
    if not on_gpu or config.kernels.torch_compile is not True:
        return layers
    graphs = config.kernels.torch_compile_options.get(STACK_GRAPH) is True
    if layers.model.experts:
        return replace(layers, kept=KEPT, own_pool=graphs)
    kept, gradients = OF_GATED if _gated(config) else OF_BLOCK
    return replace(layers, fused=True, mlp_kept=kept, mlp_gradients=gradients, own_pool=graphs)


@rule(reads=(fields.kernels.torch_compile_options,))
def torch_compile_options_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for key in config.kernels.torch_compile_options:
        if key not in _OPTIONS:
            path = f"{fields.kernels.torch_compile_options.path}.{key}"
            close = nearest(str(key), _OPTIONS)
            todo = f"Did you mean {close}?" if close else "Remove it."
            yield must(path, f"one of {', '.join(_OPTIONS)}", key, todo)


@rule(reads=(fields.kernels.torch_compile_options,))
def torch_compile_options_are_switches(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for key, value in config.kernels.torch_compile_options.items():
        if key in _OPTIONS and not isinstance(value, bool):
            yield must(
                f"{fields.kernels.torch_compile_options.path}.{key}", "true or false", value, "Each option is a switch."
            )


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
        fields.kernels.torch_compile_options,
        fields.method.kind,
        fields.memory.layer_offloading,
        fields.memory.activation_offloading,
        fields.distributed.strategy,
        fields.distributed.context_parallel_size,
        fields.distributed.expert_parallel_size,
        fields.adapter.lora_dropout,
        fields.run.devices,
        fields.distributed.nodes,
        fields.model.name,
        fields.data.train,
    )
)
def a_recorded_stack_computes_what_was_recorded(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.torch_compile_options.get(STACK_GRAPH) is not True:
        return
    path = f"{fields.kernels.torch_compile_options.path}.{STACK_GRAPH}"
    if (reason := _not_recorded(config, facts)) is not None:
        yield must(path, f"false where {reason}", True, "Remove it.", fix=Fix("launch layer by layer", unset=(path,)))


def _not_recorded(config: RunConfig, facts: Facts) -> str | None:
    memory, distributed = config.memory, config.distributed
    if facts.machine is not None and not facts.machine.gpus:
        return "there is no GPU"
    if config.method.rows == "prompts":
        return "answers are sampled"
    if memory.layer_offloading or memory.activation_offloading:
        return "layers or what they keep go to the host"
    if distributed.strategy == "fsdp2" or distributed.context_parallel_size > 1 or distributed.expert_parallel_size > 1:
        return "layers send messages to other devices"
    if counts.device_count(config) > 1:
        return "several processes train together"
    if reference_of(config.method) not in (None, "precompute"):
        return "the reference answers by the same layers or by a copy of them"
    if config.adapter.kind == "lora" and config.adapter.lora_dropout:
        return "the adapter has dropout"
    return _not_recorded_of(config, facts)


def _not_recorded_of(config: RunConfig, facts: Facts) -> str | None:
    model, sources = counts.known_model(config, facts), facts.sources or {}
    if model is not None and model.experts:
        return "the choices of a mixture's routers are counted in the layers"
    if any(entry.path in sources and sources[entry.path].images for entry in config.data.train):
        return "rows have images, whose features some models add between the layers"
    return None


@rule(
    reads=(
        SETTING,
        fields.kernels.torch_compile_options,
        fields.adapter.kind,
        fields.adapter.use_dora,
    )
)
def dora_breaks_compiled_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, options = SETTING.path, fields.kernels.torch_compile_options.path
    if config.adapter.kind == "lora" and config.adapter.use_dora and in_force(config, facts) is True:
        todo = (
            "Numbers stay the same, but torch's compiler cannot follow how PEFT takes the lengths of DoRA's weights: four "
            "layers fell into 44 graphs with 46 breaks under DPO, where plain LoRA has none."
        )
        fix = Fix("leave them uncompiled", {path: False}, unset=(options,))
        yield must(path, "false with use_dora to be of use", True, todo, severity="hint", fix=fix)


@rule(reads=(fields.memory.tiled_mlp, SETTING, fields.kernels.torch_compile_options))
def tiles_are_not_compiled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = SETTING.path
    if config.memory.tiled_mlp and in_force(config, facts) is True:
        yield must(
            path,
            "false with tiled_mlp",
            config.kernels.torch_compile,
            f"{_TILES}.",
            fix=Fix("leave tiles out", unset=(fields.memory.tiled_mlp.path,)),
        )


@rule(reads=(fields.run.full_determinism, fields.kernels.torch_compile_options))
def full_determinism_tunes_nothing(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for key in _BY_TIMING:
        path = f"{fields.kernels.torch_compile_options.path}.{key}"
        if config.run.full_determinism and config.kernels.torch_compile_options.get(key) is True:
            todo = "It chooses by timing, which the compiler leaves out there."
            yield must(
                path, f"false with {fields.run.full_determinism.path}", True, todo, fix=Fix("remove it", unset=(path,))
            )
