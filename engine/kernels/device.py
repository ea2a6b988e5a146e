"""Where a kernel can run: on CUDA, or in Triton's interpreter when tests ask for it; everywhere else the reference serves.

`TRITON_INTERPRET=1` must be set before Triton is first imported, so the test that uses the interpreter is a process of
its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from engine.kernels.requirements import CAPABILITY


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
    return interpreted() or all(tensor.is_cuda and _card_serves(tensor.get_device()) for tensor in tensors)


def lacking(device: torch.device) -> str | None:
    """What a kernel needs and this device has not, in words, or None."""
    if interpreted() and triton_installed():
        return None
    if device.type != "cuda":
        return "a CUDA device"
    if not triton_installed():
        return "the package triton"
    if _card_serves(device.index or 0):
        return None
    least, own = (".".join(map(str, each)) for each in (CAPABILITY, torch.cuda.get_device_capability(device)))
    return f"a card of compute capability {least} or above, and this one has {own}"


def register_limit(registers: int) -> dict[str, int]:
    """The launch option by which a thread takes at most so many registers; none on ROCm, whose launches refuse it."""
    return {} if torch.version.hip else {"maxnreg": registers}


@contextmanager
def sums_in_float32(device: torch.device) -> Iterator[None]:
    """Products of 16-bit numbers are added up in float32 to the end, whatever the process allows elsewhere.

    Torch lets cuBLAS add partial sums of a long product in 16 bits unless told otherwise. Two products of the same numbers
    in other shapes then differ by whole steps, and a probability is no longer that of its own normaliser.
    """
    if device.type != "cuda":
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = {name: _with_split(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def _with_split(matmul: Any, name: str) -> Any:
    """What torch allows now, in the form in which it takes it back."""
    split = f"{name}_split_k"
    return (getattr(matmul, name), getattr(matmul, split)) if hasattr(matmul, split) else getattr(matmul, name)


@cache
def _card_serves(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= CAPABILITY
