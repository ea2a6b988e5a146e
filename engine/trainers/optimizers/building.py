"""The optimizers that transformers does not build, from torch and the packages that have them.

`optimizer_for` is asked by every trainer of ours (`engine.trainers.run_trainer`). Weight decay spares what transformers spares.
A matrix inside a layer is a weight of two dimensions in one of the model's repeated blocks; embeddings, heads, norms,
biases and fused experts (three dimensions) are not, and AdamW moves them. Both factors of a LoRA adapter are matrices.

schedule-free AdamW gets no warm-up of its own: the scheduler's changes its rate, which it weighs the average by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW, Optimizer
from transformers.trainer_utils import check_target_module_exists

from engine.config.optimizers import BUILT_HERE, KINDS, MATRICES_ONLY, PROJECTED, own_value
from engine.errors import WorkbenchError
from engine.hardware import installed
from engine.trainers.optimizers.dion import Dion
from engine.trainers.optimizers.joined import Joined

Weights = dict[str, torch.nn.Parameter]


class Split(NamedTuple):
    """The trained weights by name: matrices inside the layers, and all others."""

    matrices: Weights
    rest: Weights


def split(model: torch.nn.Module) -> Split:
    """The trained weights of a model, each once."""
    inside: set[int] = set()
    embedded = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            inside.update(id(weight) for weight in module.parameters() if weight.ndim == 2)
    found = Split({}, {})
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            matrix = id(weight) in inside and id(weight) not in embedded
            (found.matrices if matrix else found.rest)[name] = weight
    return found


def projected(optim: Any, model: torch.nn.Module) -> Weights:
    """The matrices inside the layers whose modules `optim_target_modules` names, in transformers' way."""
    named = optim.optim_target_modules
    return {
        name: weight
        for name, weight in split(model).matrices.items()
        if named == "all-linear" or check_target_module_exists(named, name.rpartition(".")[0])
    }


def optimizer_for(optim: Any, model: torch.nn.Module, decayed: Collection[str]) -> Optimizer | None:
    """The optimizer of the section `optim` for this model; None where it is one of transformers' own.

    `decayed` are the names of weights that weight decay is for. Raises WorkbenchError where its package is missing.
    """
    if optim.optim not in BUILT_HERE:
        return None
    own, make, parts = _Own(optim), _MAKERS[optim.optim], split(model)
    if (package := KINDS[optim.optim].package) and installed(package) is None:
        raise WorkbenchError(
            f"optim.optim: {optim.optim} needs the package {package}, which is not installed.",
            f"Install it with `pip install {package}`, or take adamw_torch_fused.",
        )
    every = {**parts.matrices, **parts.rest}
    if optim.optim in MATRICES_ONLY:
        return Joined([make(own, _groups(own, parts.matrices, decayed)), adamw(optim, parts.rest, decayed)])
    if optim.optim not in PROJECTED:
        return make(own, _groups(own, every, decayed))
    low = projected(optim, model)
    groups = [{**group, **_projection(own)} for group in _groups(own, low, decayed)]
    made = make(own, groups + _groups(own, {name: p for name, p in every.items() if name not in low}, decayed))
    if optim.optim == "q_galore_adamw_8bit":
        _embeddings_in_32_bits(model)
    return made


def receipt_note(optim: Any, model: torch.nn.Module) -> tuple[str, int, str]:
    """For the receipt: the implementation, how many weights it moves, and who moves how many numbers."""
    kind = _NAMES[optim.optim]
    parts = split(model)
    weights = [*parts.matrices.values(), *parts.rest.values()]
    if optim.optim in PROJECTED:
        low, rank = list(projected(optim, model).values()), _Own(optim)["rank"]
        detail = f"matrices of {_numbers(low):,} numbers, their gradients projected to rank {rank:,}"
        if len(weights) > len(low):
            detail += (
                f"; {len(weights) - len(low)} other weights of {_numbers(weights) - _numbers(low):,} numbers whole"
            )
        return kind, len(low), detail
    if optim.optim not in MATRICES_ONLY:
        return kind, len(weights), f"weights of {_numbers(weights):,} numbers"
    matrices, rest = list(parts.matrices.values()), list(parts.rest.values())
    detail = f"matrices inside the layers, of {_numbers(matrices):,} numbers"
    if rest:
        detail += f"; torch.optim.AdamW moves {len(rest)} other weights of {_numbers(rest):,} numbers"
    return kind, len(matrices), detail


def _numbers(weights: list[torch.nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights)


def adamw(optim: Any, weights: Weights, decayed: Collection[str]) -> AdamW:
    """torch's AdamW for these weights, with the settings of the section."""
    own = _Own(optim)
    return AdamW(_groups(own, weights, decayed), lr=optim.learning_rate, **own.of_adam, fused=True)


class _Own:
    """The section, and the chosen optimizer's own settings: `own["momentum"]`."""

    def __init__(self, optim: Any) -> None:
        self.optim = optim

    def __getitem__(self, key: str) -> Any:
        return own_value(self.optim.optim, self.optim.optim_args, key)

    @property
    def of_adam(self) -> dict[str, Any]:
        """The section's settings that all of Adam's kin take."""
        return {"betas": (self.optim.adam_beta1, self.optim.adam_beta2), "eps": self.optim.adam_epsilon}


def _groups(own: _Own, weights: Weights, decayed: Collection[str]) -> list[dict[str, Any]]:
    """Two groups, with weight decay and without, in the order of the model; an empty one is left out if it can be."""
    with_decay = [weight for name, weight in weights.items() if name in decayed]
    without = [weight for name, weight in weights.items() if name not in decayed]
    groups = [
        {"params": with_decay, "weight_decay": own.optim.weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def _muon(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.Muon(
        groups,
        lr=own.optim.learning_rate,
        momentum=own["momentum"],
        ns_steps=own["ns_steps"],
        adjust_lr_fn=own["adjust_lr_fn"],
    )


def _adopt(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    from pytorch_optimizer import ADOPT

    betas = (own.optim.adam_beta1, own["beta2"])
    return ADOPT(groups, lr=own.optim.learning_rate, betas=betas, eps=own["eps"], weight_decouple=True)


def _came(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    from pytorch_optimizer import CAME

    betas = (own.optim.adam_beta1, own.optim.adam_beta2, own["beta3"])
    return CAME(groups, lr=own.optim.learning_rate, betas=betas, clip_threshold=own["clip_threshold"])


def _flash_adamw(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    from pytorch_optimizer import FlashAdamW

    # What rounds a weight of 16 bits is kept beside it; the library refuses that where all have 32.
    short = any(weight.element_size() == 2 for group in groups for weight in group["params"])
    bits = 24 if short else None
    return FlashAdamW(groups, lr=own.optim.learning_rate, **own.of_adam, master_weight_bits=bits)


def _schedule_free_adamw(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(groups, lr=own.optim.learning_rate, **own.of_adam, warmup_steps=0, r=own["r"])


def _dion(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    return Dion(
        groups,
        lr=own.optim.learning_rate,
        momentum=own["momentum"],
        rank_fraction=own["rank_fraction"],
        adjust_lr_fn=own["adjust_lr_fn"],
    )


def _projection(own: _Own) -> dict[str, Any]:
    """What makes a group one of projected weights; the library calls one of them by another name than transformers."""
    keys = [key for key in KINDS[own.optim.optim].own if key != "proj_type"]
    found = {key: own[key] for key in keys}
    return {**found, "projection_type": own["proj_type"]} if own.optim.optim == "galore_adamw" else found


def _galore_adamw(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    from engine.trainers.optimizers.galore import GaLoreAdamW

    return GaLoreAdamW(groups, lr=own.optim.learning_rate, **own.of_adam)


def _q_galore_adamw_8bit(own: _Own, groups: list[dict[str, Any]]) -> Optimizer:
    from engine.trainers.optimizers.q_galore import QGaLoreAdamW8bit

    return QGaLoreAdamW8bit(groups, lr=own.optim.learning_rate, **own.of_adam)


def _embeddings_in_32_bits(model: torch.nn.Module) -> None:
    """As transformers has it for every optimizer of bitsandbytes."""
    from bitsandbytes.optim import GlobalOptimManager

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})


_MAKERS: dict[str, Callable[[_Own, list[dict[str, Any]]], Optimizer]] = {
    "muon": _muon,
    "adopt": _adopt,
    "came": _came,
    "flash_adamw": _flash_adamw,
    "schedule_free_adamw": _schedule_free_adamw,
    "dion": _dion,
    "galore_adamw": _galore_adamw,
    "q_galore_adamw_8bit": _q_galore_adamw_8bit,
}
_NAMES = {
    "muon": "torch.optim.Muon",
    "adopt": "pytorch_optimizer.ADOPT",
    "came": "pytorch_optimizer.CAME",
    "flash_adamw": "pytorch_optimizer.FlashAdamW",
    "schedule_free_adamw": "schedulefree.AdamWScheduleFree",
    "dion": "our Dion",
    "galore_adamw": "pytorch_optimizer.GaLore",
    "q_galore_adamw_8bit": "our QGaLoreAdamW8bit on bitsandbytes",
}
"""The implementations as the receipt calls them."""


_LIKE_THE_WEIGHT = (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad)
"""Optimizers whose states have the format of their weight."""


def keep_state_formats(optimizer: Optimizer) -> None:
    """From now on this optimizer loads states in the format that they were saved in.

    torch gives every state the format of its weight. Some keep float32 beside weights of bfloat16 (Adafactor its factors),
    and a run that is taken up again would go on from rounded ones. Those of `_LIKE_THE_WEIGHT` do not: they go on in another
    format where the weights were given one, of which torch's fused steps take no other.
    """
    if type(optimizer) in _LIKE_THE_WEIGHT:
        return
    found: list[tuple[torch.Tensor, str, torch.Tensor]] = []

    def before(_: Optimizer, saved: dict[str, Any]) -> None:
        found.clear()
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=False):  # torch itself refuses groups of another size
            for name, value in saved["state"].get(number, {}).items():
                other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != weight.dtype
                if other and name != "step":
                    found.append((weight, name, value))

    def after(_: Optimizer) -> None:
        for weight, name, value in found:
            optimizer.state[weight][name] = value.to(weight.device)
        found.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
