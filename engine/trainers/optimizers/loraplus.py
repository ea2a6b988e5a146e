"""LoRA+ (arXiv:2402.12354): an adapter's second matrices learn faster than its first ones.

The groups are those of `peft.optimizers.create_loraplus_optimizer`: second matrices and vectors at the rate times the ratio,
both matrices of an adapter on embeddings at a rate of their own, all else at the rate. PEFT builds the optimizer itself, out
of a class; here the groups of one that was built are divided, so that every optimizer keeps its own settings.
"""

from __future__ import annotations

import torch
from peft.tuners.lora.layer import Embedding
from torch.optim import Optimizer

from engine.config.adapter import Lora


def divide_groups(optimizer: Optimizer, model: torch.nn.Module, adapter: Lora) -> None:
    """Gives the trained weights of `model` their rates, before the first step. The first group keeps the optimizer's own."""
    assert adapter.loraplus_lr_ratio is not None
    faster = {id(weight) for weight in faster_weights(model)}
    embedded = {
        id(weight) for module in model.modules() if isinstance(module, Embedding) for weight in _matrices(module)
    }
    plain, others = [], []
    for group in optimizer.param_groups:
        parts: dict[float, list[torch.nn.Parameter]] = {}
        rates = {"faster": group["lr"] * adapter.loraplus_lr_ratio, "embedded": adapter.loraplus_lr_embedding}
        kept = []
        for weight in group["params"]:
            if id(weight) in embedded:
                parts.setdefault(rates["embedded"], []).append(weight)
            elif id(weight) in faster:
                parts.setdefault(rates["faster"], []).append(weight)
            else:
                kept.append(weight)
        settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
        others += [{**settings, "params": weights, "lr": rate} for rate, weights in parts.items()]
        group["params"] = kept
        plain += [group] if kept else []
    optimizer.param_groups[:] = plain
    for group in others:
        optimizer.add_param_group(group)


def faster_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained weights that learn at the rate times the ratio."""
    embedded = {
        id(weight) for module in model.modules() if isinstance(module, Embedding) for weight in _matrices(module)
    }
    return [
        weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and ("lora_B" in name or weight.ndim == 1) and id(weight) not in embedded
    ]


def _matrices(module: Embedding) -> list[torch.nn.Parameter]:
    return [*module.lora_embedding_A.values(), *module.lora_embedding_B.values()]
