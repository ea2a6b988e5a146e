"""Which layers' weights are on the card when: at most two, the one that computes and the one that comes next.

Pure, so that it can be shown without a card: it is told what is about to happen and answers what to let go and what to
fetch, in this order. Layers are numbered as they stand in the model. A layer that is called out of order is fetched when
it is needed, so a wrong guess costs time and never a wrong number. Moving the bytes is `engine.features.layer_offloading.layer_stream`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moves:
    """What to do now: first let these layers go, then fetch those. One that is needed at once comes first."""

    release: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


class Schedule:
    """One chain of layers. `held` are those whose weights are on the card or on their way to it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: set[int] = set()
        self.returning: int | None = None
        """The layer whose backward pass is under way."""

    def start(self) -> Moves:
        """Before anything ran: the first layer comes in."""
        return self._only(0)

    def forward(self, layer: int, *, gradients: bool) -> Moves:
        """The layer is about to compute. With `gradients` the last layer is the next to be needed after itself."""
        ahead = layer + 1
        if ahead == self.count:
            return self._only(layer) if gradients else self._only(layer, 0)
        return self._only(layer, ahead)

    def computed(self, layer: int, *, gradients: bool) -> Moves:
        """The layer has computed; the last one stays where its backward pass comes next, and so does the only one."""
        if layer == self.count - 1 and (gradients or self.count == 1):
            return Moves()
        return self._only(*(self.held - {layer}))

    def backward(self, layer: int) -> Moves:
        """The layer's backward pass (and what it computes again) is about to begin, those behind it are through."""
        self.returning = layer
        return self._only(layer, layer - 1) if layer else self._only(layer)

    def ended(self) -> Moves:
        """The backward pass is through: the next thing needed is the first layer."""
        self.returning = None
        return self._only(0)

    def _only(self, *wanted: int) -> Moves:
        release = tuple(sorted(self.held.difference(wanted)))
        fetch = tuple(layer for layer in dict.fromkeys(wanted) if layer not in self.held)
        self.held = set(wanted)
        return Moves(release, fetch)
