"""Which function computes the layers of linear attention and state space that transformers defined in this process.

transformers wraps the torch form of each such function where it defines a model and decides there, once, whether a package's
form is called instead. The wrapper keeps what it calls in its closure.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


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
