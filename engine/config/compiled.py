"""Whether decoder layers are compiled where nobody said so: on a card, where it was measured to win. Pure and quick.

`auto` is held to more than `true`: what compiles but was measured on no card, or could not go back to plain layers in the
middle of a step, is left to be asked for.
"""

from __future__ import annotations

from engine.config import attention, counted
from engine.config.facts import Facts
from engine.config.method import METHODS
from engine.config.tree import RunConfig

EARNS = 100
"""Steps that a run must have. The first batch waits 10 to 15 s on an H200, and a step of a 0.6B shape is 0.13 s shorter."""
EARNS_PADDED = 1000
"""Batches that a run of padded ones must have. They are compiled for any length at once: on an H200 the first one waited 35
to 40 s, the first of one row and the first held out wait again, and one of a 0.6B shape is 0.14 s shorter."""
LEAST = (8, 0)
"""Compute capability of the oldest cards taken: those that multiply in bfloat16."""


def chosen(config: RunConfig, facts: Facts) -> tuple[bool, str]:
    """What `auto` takes, and why."""
    if facts.machine is None:
        return False, "the machine is not known yet; the launch decides"
    if (reason := _no_card(facts) or _in_the_way(config) or _of_the_model(config, facts)) is not None:
        return False, reason
    steps = counted.total_steps(config, facts)
    if steps is not None and steps < EARNS:
        return False, f"{steps:,} steps are too few to earn the first batch's wait, {EARNS} would"
    if not config.data.packing and (reason := _too_few_padded(config, steps)) is not None:
        return False, reason
    card = facts.machine.gpus[0].name
    many = "a run of unknown length" if steps is None else f"{steps:,} steps"
    return True, f"{card} computes compiled layers faster, and {many} earn the first batch's wait"


def _too_few_padded(config: RunConfig, steps: int | None) -> str | None:
    if steps is None:
        return f"padded batches wait longer for the compiler; {EARNS_PADDED:,} would earn it, and their number is not known yet"
    batches = steps * config.optim.gradient_accumulation_steps
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
    if METHODS[config.method.kind].rows == "prompts":
        return "answers share their prompt's keys, which compiled layers do not"
    if config.adapter.kind == "lora" and config.adapter.use_dora:
        return "DoRA breaks a layer into many graphs"
    if config.model.quantization == "int8":
        return "bitsandbytes' 8-bit layers break a layer into many graphs"
    if memory.tiled_mlp:
        return "tiles cannot be compiled"
    if memory.layer_offloading:
        return "layers that stream are compiled where it is asked for"
    if memory.activation_offloading:
        return "activations that are offloaded are compiled where it is asked for"
    if kernels.fused_lora is True:
        return "LoRA's own backward pass is asked for"
    if kernels.quantization_aware is True:
        return "layers that round to int8 are compiled where it is asked for"
    return None


def _of_the_model(config: RunConfig, facts: Facts) -> str | None:
    model = counted.known_model(config, facts)
    if model is not None and model.experts:
        return "mixtures of experts are compiled where it is asked for"
    if model is not None and model.stored:
        return f"weights stored in {model.stored} are compiled where it is asked for"
    asked = config.model.attention
    computed = attention.chosen(config, facts)[0] if asked == "auto" else asked
    if computed not in ("sdpa", attention.VARLEN, attention.CUDNN):
        return f"{computed} is compiled where it is asked for"
    if not config.data.packing and config.model.quantization != "none":
        return f"padded batches over {config.model.quantization} weights are compiled where it is asked for"
    if counted.device_count(config, facts) > 1:
        return "layers on several devices are compiled where it is asked for"
    return None
