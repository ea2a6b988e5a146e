"""Layers compiled again and again, as batches come in many forms: when that is said, and where it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import ModelError
from engine.features.built import Built

TURN_OFF = "Set kernels.torch_compile to false."
MANY_BATCHES = 5
"""Batches after the first that may wait for the compiler (one row, the last of an epoch, held-out rows) before it is told."""
MOST_GRAPHS = 64
"""Kinds of layers, times the forms that batches come in (one row or several, padded or not, trained on or held out)."""


@dataclass
class LaterGraphs:
    """The batches after the first for which layers were compiled anew, and the seconds they took; told once there are many."""

    built: Built
    batches: int = 0
    waited: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        before, begun = graphs_and_breaks()[0], time.monotonic()
        yield
        self.batches += 1
        if graphs_and_breaks()[0] == before:
            return
        self.waited += 1
        self.seconds += time.monotonic() - begun
        if self.waited == MANY_BATCHES:
            self.built.warn(
                "kernels.torch_compile",
                f"{self.waited} of {self.batches} batches after the first waited {self.seconds:.0f} s for layers to be compiled "
                "again, as batches come in many forms. Set kernels.torch_compile to false, or data.packing to true where rows may be packed.",
            )


def limit_hit() -> type[Exception]:
    """What torch raises there."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def too_many(requested: bool) -> Exception:
    """What to raise in place of torch's word for it; a person asked for compiled layers where `requested`."""
    sentence = f"batches come in so many forms that more than {MOST_GRAPHS} graphs of a layer would be compiled"
    return ModelError(f"kernels.torch_compile: {sentence}.", TURN_OFF) if requested else RuntimeError(sentence)


def graphs_and_breaks() -> tuple[int, int]:
    """Graphs compiled and graph breaks so far in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"].get("unique_graphs", 0), sum(counters["graph_break"].values())
