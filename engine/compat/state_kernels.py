"""Which function computes the layers of linear attention and state space that transformers defined in this process.

transformers wraps the torch form of each such function where it defines a model and decides there, once, whether a package's
form is called instead. The wrapper keeps what it calls in its closure.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

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


def computed_by(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    """For each function that computes a sequence in a layer with a state: the package whose form of it is called,
    `transformers` for torch's, and in how many layers of the model."""
    found: dict[str, tuple[str, int]] = {}
    for module in model.modules():
        for name, called in _functions(type(module)):
            package = str(called.__module__).partition(".")[0]
            found[name] = (package, found.get(name, ("", 0))[1] + 1)
    return found


def _functions(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The wrapped functions that a class of layers calls on a sequence, by the package's name for each; those of one token
    with a cache are left out."""
    defined = vars(sys.modules.get(kind.__module__, sys))
    named = {
        name
        for each in vars(kind).values()
        if inspect.isfunction(each)
        for name in inspect.unwrap(each).__code__.co_names
    }
    for name in sorted(named):
        wrapper = defined.get(name)
        if not inspect.isfunction(wrapper):
            continue
        kept = inspect.getclosurevars(wrapper).nonlocals
        if {"implementation", "func_name"} <= kept.keys() and not _OF_ONE_TOKEN & {kept["func_name"]}:
            yield kept["func_name"], inspect.unwrap(kept["implementation"])


_OF_ONE_TOKEN = frozenset({
    "causal_conv1d_update", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda", "selective_state_update",
})  # fmt: skip
