"""Dion for the matrices inside the layers: orthogonal steps of low rank, from one product with a basis that it keeps.

Written from the paper (arXiv:2504.05295, algorithm 1) for weights that lie whole on each device; no package has it. What
the basis misses stays in the momentum and comes in a later step. Products and the orthogonal factor are computed in
float32, kept are momentum and basis in the weight's own type, so that a checkpoint goes on to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_TINY = 1e-8


class Dion(Optimizer):
    """One step of a weight W with gradient G, momentum M and basis Q: B = M + G; P is an orthonormal basis of BQ; R = B'P;
    M = B - (1 - momentum) P R'; Q is R with columns of length 1; W moves by the rate along P Q'.

    A weight lies on its side where it has more columns than rows, so that Q has `rank_fraction` of the shorter side as
    columns. `adjust_lr_fn` `match_rms_adamw` multiplies the rate by 0.2 sqrt(longer side), as Muon's does; `original` by
    sqrt(rows / columns). Raises ValueError for a weight that is no matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.95,
        rank_fraction: float = 0.25,
        adjust_lr_fn: str = "match_rms_adamw",
        weight_decay: float = 0.0,
    ) -> None:
        settings = {
            "lr": lr, "momentum": momentum, "rank_fraction": rank_fraction, "adjust_lr_fn": adjust_lr_fn,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, settings)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim != 2:
                    raise ValueError(f"Dion moves matrices; got a weight of shape {tuple(weight.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has two forms of it
        """One step of every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for place, weight in enumerate(group["params"]):
                if weight.grad is not None:
                    self._move(weight, weight.grad, group, place)
        return loss

    def _move(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], place: int) -> None:
        lying = weight.shape[0] < weight.shape[1]
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
            state["basis"] = first_basis(weight, group["rank_fraction"], place)
        grad, momentum = (each.float().T if lying else each.float() for each in (gradient, state["momentum"]))
        gathered = momentum + grad
        left, _ = torch.linalg.qr(gathered @ state["basis"].float())
        right = gathered.T @ left
        kept = gathered - (1 - group["momentum"]) * left @ right.T
        basis = right / right.norm(dim=0, keepdim=True).clamp(min=_TINY)
        update = left @ basis.T
        state["momentum"].copy_(kept.T if lying else kept)
        state["basis"].copy_(basis)
        rows, columns = weight.shape
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(rows / columns)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_((update.T if lying else update).to(weight.dtype), alpha=-group["lr"] * scale)


def rank_of(rows: int, columns: int, fraction: float) -> int:
    """Columns of the basis for a weight of this shape: at least one."""
    return max(1, math.ceil(fraction * min(rows, columns)))


def first_basis(weight: torch.Tensor, fraction: float, seed: int) -> torch.Tensor:
    """Random orthonormal columns, (shorter side, rank); its own generator leaves the run's random numbers alone."""
    rows, columns = weight.shape
    rank = rank_of(rows, columns, fraction)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(min(weight.shape), rank, generator=generator)
    return torch.linalg.qr(drawn)[0].to(weight)
