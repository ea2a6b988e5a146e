"""Where a kernel can run: on CUDA, or in Triton's interpreter when tests ask for it; everywhere else the reference serves.

`TRITON_INTERPRET=1` must be set before Triton is first imported, so the test that uses the interpreter is a process of
its own.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """True while Triton runs kernels in Python on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernel_serves(*tensors: torch.Tensor) -> bool:
    """True when a Triton kernel can take these tensors; otherwise the caller uses its plain-torch reference."""
    if not triton_installed():
        return False
    return interpreted() or all(tensor.is_cuda for tensor in tensors)
