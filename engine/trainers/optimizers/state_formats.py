"""States that come back from a checkpoint in the format that they were saved in.

torch gives every state of an optimizer the format of its weight as it is loaded. Some keep float32 beside weights of
bfloat16 (Adafactor its factors), and a run that is taken up again would go on from rounded ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def keep_state_formats(optimizer: Optimizer) -> None:
    """From now on this optimizer loads states as they were saved."""
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
