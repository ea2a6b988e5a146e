"""What positions a batch holds, known on the host: whoever made the batch tells it, so that nobody waits for a device to hear."""

from __future__ import annotations

import torch

_KNOWN = "positions_on_the_host"


def attach_positions(positions: torch.Tensor, known: torch.Tensor) -> None:
    """Tells whoever gets this very tensor of positions what numbers it holds."""
    if known is not positions:  # one that held itself would wait for a look for garbage
        setattr(positions, _KNOWN, known)


def on_host(positions: torch.Tensor) -> torch.Tensor:
    """These positions on the host where that was told, else as they are."""
    known: torch.Tensor = getattr(positions, _KNOWN, positions)
    return known
