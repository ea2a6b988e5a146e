"""Several optimizers as one: their groups side by side, one state, one checkpoint.

Muon and Dion move the matrices of the layers alone; the other weights need AdamW beside them. A scheduler, gradient
scaler, checkpoint and log know one optimizer, so the parts share their group dictionaries and their state with this one:
a rate that a scheduler sets here is the rate that the part uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Joined(Optimizer):
    """Steps each part in turn. Parameters of a group that is added later go to the last part."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self._ready = False
        # A schedule that ends at a rate of its own asks the optimizer for the one it begins with.
        rate = {"lr": self.parts[0].defaults["lr"]}
        super().__init__([group for part in self.parts for group in part.param_groups], rate)
        counts = [len(part.param_groups) for part in self.parts]
        ends = [sum(counts[: place + 1]) for place in range(len(counts))]
        self._places = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
        self._ready = True
        self._share()

    def _share(self) -> None:
        for part, places in zip(self.parts, self._places, strict=True):
            part.state = self.state
            part.param_groups = [self.param_groups[place] for place in places]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group with settings of the last part, which moves it."""
        if self._ready:
            self.parts[-1].add_param_group(param_group)
            self._places[-1].append(len(self.param_groups))
            param_group = self.parts[-1].param_groups[-1]
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up groups and state for all parts. Raises ValueError where groups differ in number or size."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has two forms of it
        """One step of every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss
