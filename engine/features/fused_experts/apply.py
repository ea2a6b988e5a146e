"""`kernels.fused_experts`: sorting, products, adapters, gates and sums of a mixture's experts in one block of kernels.

Experts without adapters are computed by a function that is registered with transformers' experts interface, one for each
kind of gate, and named in the model's config. Experts with adapters (PEFT's `target_parameters`) are asked at their
outermost wrapper, which gets a `forward` of our own on its instance: the adapters' factors go into the products as they
are, where PEFT adds their product to the weights of all experts at every pass. With adapters off or merged the weights
are taken as they are; with several active at once PEFT computes. Before the first step one block of each class is asked
with and without, and the run ends if the answers differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.compat.instances import all_of, atomic, put
from engine.config.tree import FieldSpec, RunConfig
from engine.errors import ModelError
from engine.features.applied import Applied, left_out
from engine.features.built import Built
from engine.features.fused_experts import SETTING
from engine.kernels.device import lacking
from engine.kernels.experts import ExpertLoRA, Gate
from engine.kernels.experts.module import experts_forward, gate_of, unserved
from engine.kernels.requirements import LARGEST_EXPERT_RANK

FEATURE = "fused experts"
PROJECTIONS = ("gate_up_proj", "down_proj")
_TURN_OFF = "Set kernels.fused_experts to false."
_OFF = {"kernels.fused_experts": False}
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Relative error that two orders of rounding may make in one block."""
_TRIED_TOKENS = 32
_NAME = "workbench"


@dataclass(frozen=True)
class Block:
    """The experts of one layer, and PEFT's wrappers around them from the outermost inward."""

    experts: nn.Module
    wrappers: tuple[ParamWrapper, ...]

    @property
    def outermost(self) -> nn.Module:
        """What the layer calls."""
        return self.wrappers[0] if self.wrappers else self.experts


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Gives all experts of the trainer's models the fused pass; None where there are none or it was not asked for. What does
    not serve ends the run with a ModelError where it was asked for, and leaves transformers' pass where `auto` took it."""
    auto, found = built.notes.reasons.get(SETTING.path), blocks(built)
    if config.kernels.fused_experts is not True:
        return left_out(FEATURE, auto) if found else None
    requested = True if auto is None else "auto"
    try:
        if (reason := why_not(built)) is not None:
            raise ModelError(f"kernels.fused_experts: {reason}.", _TURN_OFF).mended_by(_OFF)
        with atomic():
            undo = fuse(found)
    except ModelError as problem:
        if auto is None:
            raise
        return Applied(FEATURE, requested, "off", None, f"transformers' own pass: {problem.full_message}")
    adapted = sum(bool(block.wrappers) for block in found)
    words = f"{adapted:,} of them with their adapters inside the products" if adapted else "none of them has adapters"
    words += f"; {auto}" if auto else ""
    return Applied(FEATURE, requested, "Triton", len(found), f"blocks of experts; {words}", undo)


def why_not(built: Built) -> str | None:
    """Why the kernels have no place in the trainer's models, or None."""
    found = blocks(built)
    if not found:
        return "the model has no experts in transformers' form"
    missing = lacking(next(found[0].experts.parameters()).device)
    return next(filter(None, map(_unserved, found)), None) if missing is None else f"the kernels need {missing}"


def blocks(built: Built) -> list[Block]:
    """Every block of experts that transformers may compute by a registered function."""
    modules = list(built.modules())
    wrappers = [module for module in modules if isinstance(module, ParamWrapper)]
    inner = {id(wrapper.base_layer) for wrapper in wrappers}
    around = {}
    for outermost in wrappers:
        if id(outermost) not in inner:
            chain: list[ParamWrapper] = [outermost]
            while isinstance(chain[-1].base_layer, ParamWrapper):
                chain.append(chain[-1].base_layer)
            around[id(chain[-1].base_layer)] = tuple(chain)
    return [Block(module, around.get(id(module), ())) for module in modules if _registrable(module)]


def fuse(found: list[Block], setting: FieldSpec = SETTING) -> Callable[[], None]:
    """Gives these blocks the fused pass, which `setting` turns off; returns the undo. Raises ModelError for what is not
    served or answers otherwise."""
    tried: set[tuple[type, bool]] = set()
    undos = []
    for block in found:
        gate = gate_of(block.experts)
        reason = _unserved(block)
        if reason is not None or gate is None:
            raise ModelError(f"{setting.path}: {reason}.", f"Set {setting.path} to false.").mended_by(
                {setting.path: False}
            )
        kind = type(block.experts), bool(block.wrappers)
        before = None if kind in tried else _probe(block)
        undos.append(_registered(block.experts, gate))
        if block.wrappers:
            undos.append(put(block.outermost, "forward", _adapted(block, gate)))
        if before is not None:
            _compare(block, before, setting)
            tried.add(kind)
    return all_of(undos)


def is_fused(block: Block) -> bool:
    """Whether the fused pass computes this block, which leaves out ids of no expert."""
    name = getattr(block.experts.config, "_experts_implementation_internal", None)
    return isinstance(name, str) and name.startswith(_NAME)


def _registrable(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "has_gate", "_apply_gate"))


def _unserved(block: Block) -> str | None:
    """Why the kernels do not compute this block, or None."""
    reason = unserved(block.experts)
    for wrapper in block.wrappers if reason is None else ():
        ranks = [rank for rank in wrapper.r.values() if rank > LARGEST_EXPERT_RANK]
        if wrapper.parameter_name not in PROJECTIONS:
            reason = (
                f"an adapter is on {wrapper.parameter_name}, and the kernels take those on {' and '.join(PROJECTIONS)}"
            )
        elif ranks:
            reason = f"an adapter has rank {ranks[0]:,}, and the kernels take up to {LARGEST_EXPERT_RANK}"
    return None if reason is None else f"{type(block.experts).__name__} stays with transformers: {reason}"


def _registered(experts: nn.Module, gate: Gate) -> Callable[[], None]:
    """Names our function in the config of the experts, as `set_experts_implementation` does for a whole model."""
    words = (gate.activation, *(["interleaved"] if gate.interleaved else []), f"{gate.limit:g}", f"{gate.alpha:g}")
    name = "_".join((_NAME, *words))

    def forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(module, hidden_states, top_k_index, top_k_weights, gate=gate)

    if name not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return put(experts.config, "_experts_implementation_internal", name)


def _adapted(block: Block, gate: Gate) -> Callable[..., Tensor]:
    """The forward of the outermost wrapper: the experts with the factors of the adapter in force."""
    experts, outermost = block.experts, block.wrappers[0]
    plain = outermost.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **more: Any) -> Tensor:
        if more or any(wrapper.disable_adapters != outermost.disable_adapters for wrapper in block.wrappers):
            return plain(hidden_states, top_k_index, top_k_weights, **more)
        found: dict[str, ExpertLoRA] = {}
        for wrapper in block.wrappers:
            if wrapper.disable_adapters and wrapper.merged:
                return plain(hidden_states, top_k_index, top_k_weights)
            active = [] if wrapper.disable_adapters or wrapper.merged else _active(wrapper)
            if len(active) > 1:
                return plain(hidden_states, top_k_index, top_k_weights)
            if active:
                found[wrapper.parameter_name] = _factors(wrapper, active[0])
        return experts_forward(
            experts, hidden_states, top_k_index, top_k_weights, gate=gate,
            gate_up_lora=found.get("gate_up_proj"), down_lora=found.get("down_proj"),
        )  # fmt: skip

    return forward


def _active(wrapper: ParamWrapper) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _factors(wrapper: ParamWrapper, adapter: str) -> ExpertLoRA:
    a, b = (factor.get_parameter(f"{adapter}.weight") for factor in (wrapper.lora_A, wrapper.lora_B))
    return ExpertLoRA.from_peft(a, b, wrapper.num_experts, wrapper.scaling[adapter])


def _probe(block: Block) -> tuple[tuple[Tensor, ...], Tensor]:
    """Random tokens sent to random experts, and what the block makes of them."""
    weight = block.experts.get_parameter("down_proj")
    experts, hidden = weight.shape[0], weight.shape[2 if block.experts.is_transposed else 1]
    told: dict[str, Any] = {"generator": torch.Generator().manual_seed(0)}
    tokens = torch.randn(_TRIED_TOKENS, hidden, **told).to(weight.device, weight.dtype)
    share, ids = torch.rand(_TRIED_TOKENS, experts, **told).topk(min(2, experts), -1)
    given = tokens, ids.to(weight.device), share.to(weight.device, weight.dtype)
    with torch.no_grad():
        return given, block.outermost(*given)


def _compare(block: Block, before: tuple[tuple[Tensor, ...], Tensor], setting: FieldSpec) -> None:
    given, theirs = before
    with torch.no_grad():
        ours = block.outermost(*given)
    error = float((ours.double() - theirs.double()).norm() / (theirs.double().norm() + 1e-12))
    if not error <= _TOLERANCE.get(theirs.dtype, 3e-2):
        kind = type(block.experts).__name__
        raise ModelError(
            f"{setting.path}: {kind} answers otherwise with the kernels (relative error {error:.1e}): the installed "
            "transformers or PEFT computes it in another way.",
            f"Set {setting.path} to false.",
        ).mended_by({setting.path: False})
