"""`model.quantize_moe_experts`: experts that were packed while loading are computed by the pass that unpacks them in turn.

Blocks of experts are taken over as by `kernels.fused_experts`, adapters beside the products, and on a card by its kernels;
on a CPU one expert is computed after the other in plain torch.
"""

from __future__ import annotations

from collections import Counter

import torch

from engine import figures
from engine.config.tree import RunConfig
from engine.features.applied import Applied
from engine.features.built import Built
from engine.features.fused_experts.apply import Block, blocks, fuse
from engine.features.packed_experts import SETTING
from engine.kernels.device import kernel_serves
from engine.kernels.experts.launch import DECODED, decoded_rows
from engine.kernels.experts.packed import PackedExperts
from engine.kernels.requirements import EXPERT_BUFFER

FEATURE = "packed experts"


def prepare(config: RunConfig, built: Built) -> Applied | None:
    """Gives every block of packed experts its pass; None where none are packed. Raises ModelError for what it does not
    compute, or what answers otherwise."""
    found = [(block, weights) for block in blocks(built) if (weights := packed(block))]
    if not found:
        return None
    undo = fuse([block for block, _ in found], SETTING)
    held = [weight for _, weights in found for weight in weights]
    kinds = Counter(weight.form.kind for weight in held)
    experts = sum(weights[0].shape[0] for _, weights in found)
    wide = sum(weight.numel() * weight.element_size() for weight in held)
    adapted = sum(bool(block.wrappers) for block, _ in found)
    room = "one"
    if kernel_serves(held[0].held.numbers):
        room = f"at most {figures.size(EXPERT_BUFFER)} of them"
        if (kind := next(iter(kinds))) in DECODED:
            room = f"decoded inside the products where an expert gets {decoded_rows(kind)} tokens or fewer, else {room}"
    detail = (
        f"experts in {len(found)} layers, {figures.size(sum(weight.packed_bytes for weight in held))} instead of "
        f"{figures.size(wide)}; {room} unpacked at a time, in each pass anew; "
        f"{f'{adapted} layers' if adapted else 'no layer'} with adapters beside them"
    )
    return Applied(FEATURE, config.model.quantize_moe_experts, next(iter(kinds)), experts, detail, undo)


def packed(block: Block) -> list[PackedExperts]:
    """The packed weights of a block."""
    return [weight for weight in block.experts.parameters(recurse=False) if isinstance(weight, PackedExperts)]


def compute_packed(model: torch.nn.Module) -> None:
    """The same for a model that no run trains."""
    if found := [block for block in blocks(Built(model)) if packed(block)]:
        fuse(found, SETTING)
