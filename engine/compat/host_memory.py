"""Host memory that is locked in place, so that a card copies to and from it at the speed of its bus."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch


class _Pages(mmap.mmap):
    """Pages that no other block shares, unlocked when the last tensor on them is gone. Shared with forked processes rather
    than copied for them, so that they stay where the card reads them."""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            runtime: Any = torch.cuda.cudart()
            torch.cuda.synchronize()
            runtime.cudaHostUnregister(self.address)


def locked(size: int) -> torch.Tensor:
    """`size` bytes of locked host memory. Locked in place, since torch's own pinned blocks are rounded up to a power of two.
    Raises MemoryError where the system locks no more."""
    pages = _Pages(-1, size)
    block = torch.frombuffer(pages, dtype=torch.uint8, count=size)
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(block.data_ptr(), size, 0)) != 0:
        raise MemoryError(size)
    pages.address = block.data_ptr()
    return block
