"""GaLore by pytorch-optimizer, with a state that a checkpoint can hold: AdamW in a subspace of each projected gradient.

The library keeps an object of its own beside the moments, which a checkpoint that is read with `weights_only` refuses.
Here it goes into the state as its tensors and comes back whole, so that a resumed run projects as the first one did.
Source: arXiv:2403.03507.
"""

from __future__ import annotations

from typing import Any

from pytorch_optimizer import GaLore
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

from engine.trainers.optimizers.configured import settings_of

_PROJECTOR = "projector"


class GaLoreAdamW(GaLore):
    """The library's optimizer; a group with `rank` is projected, others are plain AdamW."""

    def state_dict(self) -> dict[str, Any]:
        """As every optimizer's, projectors as plain values."""
        saved: dict[str, Any] = super().state_dict()
        saved["state"] = {key: _plain(state) for key, state in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up moments and projectors, which go on with the settings of now."""
        settings = [settings_of(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, now in zip(self.param_groups, settings, strict=True):
            for weight in group["params"]:
                found = self.state.get(weight, {}).get(_PROJECTOR)
                if isinstance(found, dict):
                    self.state[weight][_PROJECTOR] = _projector({**group, **now}, found)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    projector = state.get(_PROJECTOR)
    if projector is None:
        return state
    return {**state, _PROJECTOR: {"basis": projector.ortho_matrix, "renewed": projector.last_svd_step}}


def _projector(group: dict[str, Any], found: dict[str, Any]) -> Any:
    made = GaLoreProjector(group["rank"], group["update_proj_gap"], group["scale"], group["projection_type"])
    made.ortho_matrix, made.last_svd_step = found["basis"], found["renewed"]
    return made
