"""Q-GaLore: 8-bit AdamW of bitsandbytes in a subspace of each projected gradient, the subspace itself held in few bits.

Written from the paper (arXiv:2407.08296) on bitsandbytes' own optimizer, since the authors' package does not run with
versions of bitsandbytes that we support. The basis has 4 or 8 bits a number, with a scale for each 256 of them; layers
whose first direction hardly turns renew it ever less often. The paper's third part, weights of 8 bits, is left out:
weights stay in the type that they are trained in.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit

BLOCK = 256
"""Numbers of a basis that share a scale."""


class QGaLoreAdamW8bit(AdamW8bit):
    """A group with `rank` is projected, others are bitsandbytes' AdamW.

    Such a group has `update_proj_gap`, `scale`, `proj_bits`, `cos_threshold`, `gamma_proj` and `queue_size` too.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.non_castable_tensor_keys |= {"basis", "basis_scale", "basis_least", "direction"}

    def init_state(self, group: dict[str, Any], p: Any, gindex: int, pindex: int) -> None:
        """The library's moments, in the shape of the projected gradient."""
        if "rank" not in group:
            super().init_state(group, p, gindex, pindex)
            return
        shape = _low_shape(p.shape, group["rank"])
        state = self.state[p]
        with _Standing(self, state, torch.zeros(shape, dtype=p.dtype, device=p.device)) as low:
            super().init_state(group, low, gindex, pindex)
        state["gap"], state["alike"] = group["update_proj_gap"], []

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Takes up states; where `update_proj_gap` was changed, the gaps that have grown change in proportion."""
        wanted = [group.get("update_proj_gap") for group in self.param_groups]
        super().load_state_dict(state_dict, move_to_device=move_to_device)
        for group, now in zip(self.param_groups, wanted, strict=True):
            before = group.get("update_proj_gap")
            for weight in group["params"] if now and before and now != before else ():
                if (state := self.state.get(weight)) and "gap" in state:
                    state["gap"] = max(1, round(state["gap"] * now / before))

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Any, gindex: int, pindex: int) -> None:
        """Projects the gradient, lets the library move zeros by it, and adds where they went to the weight."""
        if "rank" not in group:
            super().update_step(group, p, gindex, pindex)
            return
        state, right = self.state[p], p.shape[0] >= p.shape[1]
        if "basis" not in state or state["step"] % state["gap"] == 0:
            _renew(state, group, p.grad)
        basis = _basis(state, group, min(p.shape)).to(p.grad.dtype)
        grad = p.grad @ basis.T if right else basis @ p.grad
        with _Standing(self, state, torch.zeros_like(grad)) as low:
            low.grad = grad
            super().update_step({**group, "weight_decay": 0.0}, low, gindex, pindex)
        moved = low.data @ basis if right else basis.T @ low.data
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(moved.to(p.dtype), alpha=group["scale"])


class _Standing:
    """For a moment, another weight has this state."""

    def __init__(self, optimizer: Any, state: dict[str, Any], low: torch.Tensor) -> None:
        self.optimizer, self.state, self.low = optimizer, state, torch.nn.Parameter(low)

    def __enter__(self) -> torch.nn.Parameter:
        self.optimizer.state[self.low] = self.state
        return self.low

    def __exit__(self, *problem: object) -> None:
        del self.optimizer.state[self.low]


def _low_shape(shape: torch.Size, rank: int) -> tuple[int, int]:
    rows, columns = shape
    kept = min(rank, rows, columns)
    return (rows, kept) if rows >= columns else (kept, columns)


def _renew(state: dict[str, Any], group: dict[str, Any], grad: torch.Tensor) -> None:
    """A new basis from the gradient's singular vectors, (rank, shorter side), and how long it may stay."""
    u, _, v = torch.linalg.svd(grad.float(), full_matrices=False)
    basis = signed((v if grad.shape[0] >= grad.shape[1] else u.T)[: group["rank"]])
    before, state["direction"] = state.get("direction"), basis[0].clone()
    if before is not None:
        alike = torch.nn.functional.cosine_similarity(before, basis[0], dim=0).abs().item()
        state["alike"] = [*state["alike"], alike][-group["queue_size"] :]
        full = len(state["alike"]) == group["queue_size"]
        if full and sum(state["alike"]) / group["queue_size"] >= group["cos_threshold"]:
            state["gap"] = int(state["gap"] * group["gamma_proj"])
    state["basis"], state["basis_scale"], state["basis_least"] = quantized(basis, group["proj_bits"])


def signed(vectors: torch.Tensor) -> torch.Tensor:
    """Singular vectors (rows) with the largest number of each above 0: they have no sign of their own, libraries choose
    one each way, and few bits round a vector and its negative differently."""
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


def quantized(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of `bits` (two to a byte where it is 4) with scale and least value for each block of 256, both float32."""
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    least = flat.amin(1, keepdim=True)
    scale = (flat.amax(1, keepdim=True) - least).clamp(min=1e-8) / (2**bits - 1)
    numbers = ((flat - least) / scale).round().to(torch.uint8)
    if bits == 4:
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return numbers, scale, least


def restored(numbers: torch.Tensor, scale: torch.Tensor, least: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` values again, in float32."""
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], 2).flatten(1)
    return (numbers * scale + least).flatten()[:count]


def _basis(state: dict[str, Any], group: dict[str, Any], side: int) -> torch.Tensor:
    rank = min(group["rank"], side)
    held = (state["basis"], state["basis_scale"], state["basis_least"])
    return restored(*held, group["proj_bits"], rank * side).view(rank, side)
