"""`model.quantization: fp8` tells what it changed: the weights at once, and one layer's output when the first batch is there.

The layers themselves are swapped while the model is loaded (`engine.features.fp8_base.layers`), since only one of them may lie on
the card in its plain form. Of the first decoder layer the plain weights wait on the host until the first batch that is no
sampling: then the layer is computed twice, without gradients, dropout or random numbers of the run, once as it is and once
with those weights, and they are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from engine.compat.cache_names import NAMES, cache_in
from engine.compat.instances import in_mode, put
from engine.config.tree import RunConfig
from engine.features.applied import Applied
from engine.features.built import Built
from engine.features.fp8_base.layers import Computed, Fp8BaseLinear

FEATURE = "quantization"


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Tells the layers that compute in FP8 and has the first batch measured; None where it was not asked for."""
    if config.model.quantization != "fp8":
        return None
    held = next(module.computed for module in built.modules() if isinstance(module, Fp8BaseLinear))
    layer = next(
        each for each in built.decoder_layers() if held.plain.keys() & set(each.modules())
    ) if held.plain else None  # fmt: skip
    return Applied(FEATURE, "fp8", "float8_e4m3fn", held.layers, summary(held), _measured(built, held, layer))


def summary(held: Computed) -> str:
    """What became of the layers, as the receipt has it."""
    left = ", ".join(f"{count} {what}" for what, count in sorted(held.left_out.items()))
    return (
        "linear layers; rounded once with a scale a row, forward products and input gradients in FP8"
        + (f"; left as they are: {left}" if left else "")
        + f"; rounding changed the weights by {held.error:.2%}"
    )


def _measured(built: Built, held: Computed, layer: Any) -> Callable[[], None]:
    """Wraps the layer's call until the first batch has been through it; returns the undo."""
    if layer is None:
        return lambda: None
    inner = layer._compiled_call_impl or layer._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        if held.plain and (alone := _alone(kwargs)) is not None:
            apart = output_error(layer, held, args, alone)
            held.plain.clear()
            detail = f"{summary(held)}, and what the first layer adds to its first batch by {apart:.2%}"
            built.report(Applied(FEATURE, "fp8", "float8_e4m3fn", held.layers, detail))
        return inner(*args, **kwargs)

    return put(layer, "_compiled_call_impl", call)


def output_error(layer: Any, held: Computed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """By how much FP8 changes what this layer adds to its input, root mean square over root mean square."""
    taken = args[0] if args else kwargs["hidden_states"]
    with (
        torch.no_grad(),
        torch.random.fork_rng([taken.device] if taken.is_cuda else []),
        in_mode(layer, training=False),
    ):
        rounded = _first(layer._call_impl(*args, **kwargs)).double()
        with _plain(held):
            plain = _first(layer._call_impl(*args, **kwargs)).double()
        return float((rounded - plain).norm() / (plain - taken.double()).norm())


def _alone(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The call without the cache that it fills, None where it samples or reads what is in the cache already.

    Answers that share a prompt are trained with a cache, which a second call would fill twice.
    """
    cache = cache_in(kwargs)
    if cache is None:
        return kwargs
    if not torch.is_grad_enabled() or cache.get_seq_length():
        return None
    return {name: None if name in NAMES else value for name, value in kwargs.items()}


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


@contextmanager
def _plain(held: Computed) -> Iterator[None]:
    """The layers multiply with their weights as they were."""
    with ExitStack() as undo:
        for module, weight in held.plain.items():
            plain = partial(torch.nn.functional.linear, weight=weight.to(module.weight.device), bias=module.bias)
            undo.callback(put(module, "forward", plain))
        yield
