"""Kernels for linear attention, kept from models that they would fail."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import cast

import torch

from engine.facts.state_kernels import FLA, FLA_MODULE, LINEAR, family, unfit
from engine.hardware import installed


@contextlib.contextmanager
def kernels_that_serve(model_type: str) -> Iterator[str]:
    """While a model of this type is defined and loaded: flash-linear-attention is not found where its kernels would raise for
    it. Gives why, in words; empty where nothing is withheld.

    An entry of None in `sys.modules` is Python's own way of saying that a module is not there.
    """
    reason = ""
    if family(model_type) in LINEAR and (installed(FLA) or installed("fla-core")):
        cards = [torch.cuda.get_device_capability(at) for at in range(torch.cuda.device_count())]
        reason = unfit(model_type, {name: installed(name) for name in ("triton", "tilelang")}, cards)
    if not reason:
        yield ""
        return
    modules = cast(dict[str, ModuleType | None], sys.modules)
    absent = object()
    before = modules.get(FLA_MODULE, absent)
    modules[FLA_MODULE] = None
    try:
        yield reason
    finally:
        if before is absent:
            del modules[FLA_MODULE]
        else:
            modules[FLA_MODULE] = cast(ModuleType | None, before)
