"""Frozen weights of a chain of layers in pinned host memory, streamed to the card one layer ahead, forward and backward.

All streamed weights of a layer are views of one flat device tensor whose storage is emptied when the layer is let go and
filled again by one copy. Whatever still points at a weight then (what autograd saved, what bitsandbytes keeps beside its
graph) points at the same storage, so it sees the weight again once the layer is back. That is why storages come and go
and not the tensors. Of packed experts the numbers and scales come and go; the tables that their codes stand for stay. Blocks are taken and given back on the copying stream alone, and each copy waits for the event of the
last release, so no layer is overwritten while it is read.

Refuses nothing itself; what may be streamed is decided in `engine.features.layer_offloading.apply`. Needs CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine import figures
from engine.compat import host_memory
from engine.errors import ModelError
from engine.features.layer_offloading.layer_schedule import Moves, Schedule
from engine.kernels.experts.packed import Held, PackedExperts

ALIGN = 256
"""Bytes at whose multiples each weight begins, for kernels that read many at once."""


def locked(size: int) -> torch.Tensor:
    """`size` bytes of locked host memory. Raises ModelError where the system gives none."""
    try:
        return host_memory.locked(size)
    except MemoryError:
        raise ModelError(
            f"memory.layer_offloading: the system gave no {figures.size(size)} of locked host memory for a layer.",
            "Free host memory or raise the limit of locked memory (ulimit -l), or leave it out.",
        ) from None


class Weights:
    """The streamed weights of one layer: on the host always, on the card between `fetch` and `release`."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        self.parameters = list(parameters)
        places, end = [], 0
        for parameter in self.parameters:
            for part in _parts(parameter):
                begin = -(-end // ALIGN) * ALIGN
                end = begin + part.numel() * part.element_size()
                places.append((begin, end))
        self.size = end
        self.block = locked(end)
        self.flat = torch.empty(end, dtype=torch.uint8, device=device)
        self.host: list[torch.Tensor] = []
        """For each parameter the tensor in the host's memory that it is."""
        left = iter(places)
        for parameter in self.parameters:
            on_host, on_card = [], []
            for part in _parts(parameter):
                begin, stop = next(left)
                there, here = (flat[begin:stop].view(part.dtype).view(part.shape) for flat in (self.block, self.flat))
                there.copy_(part)
                on_host.append(there)
                on_card.append(here)
            self.host.append(_assemble(parameter, on_host))
            _replace(parameter, _assemble(parameter, on_card))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.flat.untyped_storage().resize_(0)
        self.ready = torch.cuda.Event()

    def to_host(self) -> None:
        """The parameters become ordinary tensors in the host's memory."""
        for parameter, on_host in zip(self.parameters, self.host, strict=True):
            _replace(parameter, on_host)
        self.flat.untyped_storage().resize_(0)


def _parts(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """The tensors that are moved: the weight itself, or what packed experts hold of each expert."""
    if not isinstance(parameter, PackedExperts):
        return [parameter.data]
    held = parameter.held
    return [part for part in (held.numbers, held.scales, held.middle, held.steps) if part is not None]


def _assemble(parameter: torch.nn.Parameter, parts: list[torch.Tensor]) -> torch.Tensor:
    """The weight with these as its parts."""
    if not isinstance(parameter, PackedExperts):
        return parts[0]
    held, left = parameter.held, iter(parts)
    moved: list[Any] = [None if part is None else next(left) for part in held[:4]]
    tables: list[Any] = [None if part is None else part.to(parts[0].device) for part in held[4:]]
    return PackedExperts(Held(*moved, *tables), parameter.form)


def _replace(parameter: torch.nn.Parameter, weight: torch.Tensor) -> None:
    """Has the parameter be this weight; whoever holds the parameter sees it."""
    if isinstance(parameter, PackedExperts):
        # Where it is, and its parts, belong to the tensor: `data` would change neither.
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(weight, requires_grad=False))
    else:
        parameter.data = weight


class LayerStream:
    """A chain of layers, each with its `Weights`. `attach` lets the layers drive it; `close` leaves whole weights behind."""

    def __init__(self, layers: Sequence[Any], weights: Sequence[Weights], device: torch.device) -> None:
        self.layers, self.weights, self.device = list(layers), list(weights), device
        self.schedule = Schedule(len(self.layers))
        self._copying = torch.cuda.Stream(device)
        self._released: torch.cuda.Event | None = None
        self._undo: list[Callable[[], None]] = [self._whole_state(number) for number in range(len(self.layers))]
        self._wraps: list[Callable[[], None]] = []
        # The first layer is there from the beginning: what looks at one layer before training looks at this one.
        self._do(self.schedule.start())
        self._wait(0)

    def attach(self) -> None:
        """Wraps each layer's call on its instance. What compiles the layers must have done so before."""
        for number, layer in enumerate(self.layers):
            self._wraps.append(self._wrap(number, layer))

    def detach(self) -> None:
        """The layers are called again as before `attach`, by whatever compiled them: it is taken back after this."""
        while self._wraps:
            self._wraps.pop()()

    def close(self) -> None:
        """Takes the wrapping back; every weight is whole afterwards, in the host's memory."""
        self.detach()
        while self._undo:
            self._undo.pop()()
        torch.cuda.synchronize(self.device)
        for held in self.weights:
            held.to_host()

    # -- what the layers say ---------------------------------------------------------------------------------------------
    def _wrap(self, number: int, layer: Any) -> Callable[[], None]:
        before = vars(layer).get("_compiled_call_impl")
        inner = before if before is not None else layer._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            # Where the checkpoint lies around the layer's call, it is called again here, and its weights are there.
            if self.schedule.returning == number:
                return inner(*args, **kwargs)
            expected = torch.is_grad_enabled()
            self._do(self.schedule.forward(number, gradients=expected))
            self._wait(number)
            out = inner(*args, **kwargs)
            first = next((each for each in _tensors(out) if each.requires_grad), None)
            if first is not None:
                first.register_hook(lambda _: self._before_backward(number))
            self._do(self.schedule.computed(number, gradients=first is not None))
            return out

        layer._compiled_call_impl = call

        def undo() -> None:
            if before is None:
                vars(layer).pop("_compiled_call_impl", None)
            else:
                layer._compiled_call_impl = before

        return undo

    def _before_backward(self, number: int) -> None:
        if self.schedule.returning is None:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._after_backward)
        self._do(self.schedule.backward(number))
        self._wait(number)

    def _after_backward(self) -> None:
        self._do(self.schedule.ended())

    def _whole_state(self, number: int) -> Callable[[], None]:
        """A state dict has the host's weights where an empty storage would stand, and loading one fills both places."""
        layer, held = self.layers[number], self.weights[number]
        on_host = {id(parameter): kept for parameter, kept in zip(held.parameters, held.host, strict=True)}
        places = {name: on_host[id(p)] for name, p in layer.named_parameters() if id(p) in on_host}

        def fill(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state.update({prefix + name: kept for name, kept in places.items() if prefix + name in state})

        def bring(*_: Any) -> None:
            if number not in self.schedule.held:
                self._fetch(held)
            self._wait(number)

        def keep(*_: Any) -> None:
            for parameter, kept in zip(held.parameters, held.host, strict=True):
                if not isinstance(parameter, PackedExperts):  # nothing is loaded into those
                    kept.copy_(parameter.data)
            if number not in self.schedule.held:
                self._release(held)

        handles = (
            layer.register_state_dict_post_hook(fill),
            layer.register_load_state_dict_pre_hook(bring),
            layer.register_load_state_dict_post_hook(keep),
        )

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    # -- moving ----------------------------------------------------------------------------------------------------------
    def _do(self, moves: Moves) -> None:
        for number in moves.release:
            self._release(self.weights[number])
        for number in moves.fetch:
            self._fetch(self.weights[number])

    def _fetch(self, held: Weights) -> None:
        with torch.cuda.stream(self._copying), torch.no_grad():
            if self._released is not None:
                self._copying.wait_event(self._released)
            held.flat.untyped_storage().resize_(held.size)
            held.flat.copy_(held.block, non_blocking=True)
            held.ready.record(self._copying)

    def _release(self, held: Weights) -> None:
        self._released = torch.cuda.Event()
        self._released.record(torch.cuda.current_stream(self.device))
        held.flat.untyped_storage().resize_(0)

    def _wait(self, number: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.weights[number].ready)


def _tensors(out: Any) -> list[torch.Tensor]:
    found = out if isinstance(out, (tuple, list)) else (out,)
    return [each for each in found if isinstance(each, torch.Tensor)]
