"""Copies of shares of weights (DTensors) in main memory, as torch's own asynchronous checkpoints make them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict


def staged(state: dict[str, torch.Tensor], into: dict[str, Any] | None) -> dict[str, Any]:
    """The tensors and shares of `state` as they are now, copied into main memory: into an earlier copy where there is one."""
    with torch.no_grad():
        copies = into if into is not None and into.keys() == state.keys() else _create_cpu_state_dict(dict(state))
        _copy_state_dict(dict(state), copies)
    return copies
