"""`memory.layer_offloading`: frozen weights of decoder layers wait on the host and stream to the card, in every method.

In two halves. Before the trainer is built the policy's frozen layer weights move to locked host memory, so that a model
larger than the card never lies on it whole. After every other feature has acted the layers' calls are wrapped; a copied
reference, which the trainer made, joins then. What trains stays on the card: adapters, norms and heads that train,
`modules_to_save`; so do weights that two layers share, and the statistics of 4-bit weights (a thirtieth of their bytes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from engine import figures
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features import layer_offloading
from engine.features.applied import Applied
from engine.features.built import Built, cards_here, decoder_layers
from engine.features.feature import refuse
from engine.features.layer_offloading.layer_stream import LayerStream, Weights
from engine.kernels.experts.packed import PackedExperts

FEATURE = "layer offloading"
_LEAVE_OUT = "Leave it out."


def prepare(config: RunConfig, built: Built) -> LayerOffloading | None:
    """Moves the policy's frozen layer weights to the host; None where it was not asked for."""
    if not config.memory.layer_offloading:
        return None
    refuse(layer_offloading, config, cards_here(), machine_alone=True)
    offloading = LayerOffloading()
    offloading.on_model(built.policy)
    return offloading


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Lets the layers of every model drive their streams; None where it was not asked for."""
    offloading = built.prepared.get("layer_offloading")
    return None if offloading is None else offloading.on_trainer(built)


class LayerOffloading:
    """The streams of one run's models."""

    def __init__(self) -> None:
        self.streams: list[LayerStream] = []
        self._shared = 0

    def on_model(self, model: torch.nn.Module) -> None:
        """Moves the model's frozen layer weights to the host. Raises ModelError where there is nothing to move."""
        layers = list(decoder_layers(model))
        if not layers:
            raise ModelError(
                "memory.layer_offloading: the model has no decoder layers that could be found.", _LEAVE_OUT
            )
        if not self._stream(layers):
            raise ModelError(
                "memory.layer_offloading: no weight of the decoder layers is frozen, so none can wait on the host.",
                "Train an adapter, or leave it out.",
            )

    def on_trainer(self, built: Built) -> Applied:
        """Joins models that the trainer made, and lets the layers drive their streams from now on."""
        known = {id(layer) for stream in self.streams for layer in stream.layers}
        for model in built.models():
            layers = [each for each in decoder_layers(model) if id(each) not in known]
            known.update(map(id, layers))
            self._stream(layers)
        for stream in self.streams:
            stream.attach()
        return self._applied()

    def undo(self) -> None:
        """Wrappers are gone and every weight is a whole tensor, in the host's memory."""
        while self.streams:
            self.streams.pop().close()

    def _stream(self, layers: list[Any]) -> bool:
        """A stream for the layers of one model that have frozen weights; False where none has."""
        uses = Counter(id(p) for layer in layers for p in {id(p): p for p in layer.parameters()}.values())
        self._shared += sum(count > 1 for count in uses.values())
        found = [(layer, [p for p in frozen_weights(layer) if uses[id(p)] == 1]) for layer in layers]
        found = [(layer, weights) for layer, weights in found if weights]
        if not found:
            return False
        device = torch.device("cuda", torch.cuda.current_device())
        weights = [Weights(parameters, device) for _, parameters in found]
        self.streams.append(LayerStream([layer for layer, _ in found], weights, device))
        return True

    def _applied(self) -> Applied:
        layers = [held for stream in self.streams for held in stream.weights]
        moved, widest = sum(held.size for held in layers), max(held.size for held in layers)
        room = sum(2 * max(held.size for held in stream.weights) for stream in self.streams)
        detail = (
            f"layers; {figures.size(moved)} of frozen weights wait in locked host memory and come one layer "
            f"(at most {figures.size(widest)}) ahead; on the card at most {figures.size(room)} of them"
        )
        if self._shared:
            detail += f"; {self._shared} weights that layers share stay on the card"
        return Applied(FEATURE, True, "locked host memory", len(layers), detail, self._detach)

    def _detach(self) -> None:
        for stream in self.streams:
            stream.detach()


def frozen_weights(layer: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Weights of a layer that may be streamed: frozen, none of an adapter, held as one plain block of numbers or as packed
    experts."""
    for name, parameter in layer.named_parameters():
        plain = isinstance(parameter, PackedExperts) or (
            type(parameter.data) is torch.Tensor and parameter.data.layout is torch.strided
        )
        if not parameter.requires_grad and "lora_" not in name and plain and parameter.numel():
            yield parameter
