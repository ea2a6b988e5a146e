"""Of compiled layers: all of a model's layers recorded once as two CUDA graphs, one forward and one backward.

A small model's step waits for the host, which launches every kernel of every layer anew. Recorded, the layers are two
launches: the first layer's call plays the whole stack's forward pass, the other layers hand on what they are given, and one
node of autograd plays the backward pass. A graph holds addresses, so inputs are copied to where it reads them.

Both graphs share one pool of memory, as those of `torch.cuda.make_graphed_callables` do: what the backward pass was given
while it was recorded lies where the forward pass had been, and the next forward pass writes over it. So nothing of the pool is
handed out. The answer, the gradients of inputs and those of weights are copied to memory outside it before anything else
is played, in the order of the stream; gradients that a weight has already are added to where they lie (pytorch issue 181723).

Recorded is what came `WARM` times in one form: shapes, number formats and whatever else the layers are told. A batch of
another form runs the layers one by one as before, and so does a pass whose kin still waits for its backward pass. Where
nothing came often enough in one form, the receipt says so. Stacks that
something listens to or changes between the layers are not recorded, and the receipt says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from engine.compat.cache_names import cache_in
from engine.compat.instances import all_of, put
from engine.compat.router_outputs import recording
from engine.config.kernels import STACK_GRAPH
from engine.errors import ModelError
from engine.features import failures
from engine.features.applied import Applied

FEATURE = "CUDA graphs"
TURN_OFF = f"Remove {STACK_GRAPH} from kernels.torch_compile_options."
WARM = 2
"""Passes of one form before it is recorded: the first compiles, the second shows that the form comes again."""
SILENT = 20
"""Passes after which the receipt says that none could be recorded, and why."""


class Recorder(Protocol):
    """What records device work."""

    def warm(self, run: Callable[[], Any]) -> None:
        """Runs it where it will be recorded, so that nothing is loaded for the first time while recording."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Records it: what plays it again, and its result, which each play writes anew."""


class CudaRecorder:
    """Records on a stream of its own; all that it records shares one pool of memory, played in the order of recording.

    `shared=False` gives each recording a pool of its own, which takes more memory: for finding out what writes over what.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle() if shared else None

    def warm(self, run: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        # Threads beside this one (the loader's pinned memory, telemetry) go on with what a recording may not hold.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result


def recorder(device: torch.device) -> Recorder:
    """What records on this device. Raises ModelError where nothing can."""
    if device.type != "cuda":
        raise ModelError(
            f"kernels.torch_compile_options.{STACK_GRAPH} is for a GPU; the layers are on {device}.", TURN_OFF
        )
    return CudaRecorder()


def problem(layers: list[torch.nn.Module]) -> str | None:
    """Why this stack is not to be recorded, in a few words, or None."""
    if len(layers) < 2:
        return "the model has no stack of layers"
    for module in (module for layer in layers for module in layer.modules()):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"something listens to {type(module).__name__} in the layers"
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout in the layers"
    weights = [weight for layer in layers for weight in layer.parameters() if weight.requires_grad]
    if not weights:
        return "no weight of the layers trains"
    if any(getattr(weight, "_post_accumulate_grad_hooks", None) or weight._backward_hooks for weight in weights):
        return "something listens to the gradients of the layers' weights"
    if len({weight.device for layer in layers for weight in layer.parameters()}) > 1:
        return "the layers lie on several devices"
    return None


@dataclass(frozen=True)
class _Form:
    """What a layer is told: where its tensors stand, how they look, and everything else as it is."""

    structure: Any
    tensors: tuple[Any, ...]
    others: tuple[Any, ...]


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Form, list[torch.Tensor]]:
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    looks = tuple((each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in tensors)
    others = tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves)
    return _Form(structure, looks, others), tensors


class _Recorded:
    """One form of a stack, recorded: where it reads, what it writes, and how it is played."""

    def __init__(self, stack: StackGraph, form: _Form, tensors: list[torch.Tensor], by: Recorder) -> None:
        self.form = form
        trained = (weight for layer in stack.layers for weight in layer.parameters() if weight.requires_grad)
        self.weights = list({id(weight): weight for weight in trained}.values())
        self._places = _addresses(stack.layers)
        self._stack = stack
        self.inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in tensors]
        self._led = [each for each in self.inputs if each.requires_grad]

        def once() -> None:
            out = stack.run(self.inputs, form)
            torch.autograd.grad(out, [*self._led, *self.weights], torch.ones_like(out), allow_unused=True)

        by.warm(once)
        self.forward, out = by.record(lambda: stack.run(self.inputs, form))
        self.grad_out = torch.zeros_like(out)
        self.backward, found = by.record(
            lambda: torch.autograd.grad(out, [*self._led, *self.weights], self.grad_out, allow_unused=True)
        )
        self.out = out.detach()
        back = list(found)
        self.grad_inputs = [back.pop(0) if each.requires_grad else None for each in self.inputs]
        self.gradients: list[torch.Tensor | None] = back
        """In the graphs' pool: good from the backward pass that was played to the next forward pass."""

    def here(self) -> bool:
        """Whether weights and buffers are where they were."""
        return self._places == _addresses(self._stack.layers)

    def hand_out(self) -> None:
        """Gives each weight the gradient that was played, in memory of its own, or adds it to what the weight has."""
        new, played, before, more = [], [], [], []
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            if gradient is None:
                continue
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
                new.append(weight.grad)
                played.append(gradient)
            else:
                before.append(weight.grad)
                more.append(gradient)
        if new:
            torch._foreach_copy_(new, played)
        if before:
            torch._foreach_add_(before, more)


def _addresses(layers: list[Any]) -> list[int]:
    held = (tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
    return [tensor.data_ptr() for tensor in held]


class _Play(torch.autograd.Function):
    """One pass of a recorded stack; `anchor` is a weight that trains, by which the answer leads to the backward pass."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, mark: Any, anchor: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.recorded, ctx.mark = recorded, mark
        with torch.no_grad():
            for own, given in zip(recorded.inputs, inputs, strict=True):
                own.copy_(given)
        recorded.forward()
        return recorded.out.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        recorded: _Recorded = ctx.recorded
        recorded.grad_out.copy_(grad)
        recorded.backward()
        recorded.hand_out()
        ctx.mark = None
        back = (None if each is None else each.clone() for each in recorded.grad_inputs)
        return None, None, None, *back


class _Mark:
    """Lives as long as a pass may still be asked for its gradients."""


class StackGraph:
    """The layers of one model in the order of their calls; `tell` gets a row of the receipt when something became known."""

    def __init__(self, layers: list[Any], by: Recorder, tell: Callable[[Applied], None]) -> None:
        self.layers, self._by, self._tell = layers, by, tell
        self._calls: list[Callable[..., Any]] = []
        self._on = True
        self._recorded: _Recorded | None = None
        self._seen: _Form | None = None
        """The form of the passes that were watched last, one after the other."""
        self._times = self._passes = 0
        self._own: list[tuple[_Form, list[int]]] = []
        """Of each layer behind the first in the pass that is watched: its form, and which of the first one's tensors it got."""
        self._learnt: list[tuple[_Form, list[int]]] = []
        self._first: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None
        """What the layer before answered, in a pass that is watched or played."""
        self._playing = self._watching = False
        self._waits: weakref.ref[_Mark] | None = None

    def put(self, attribute: str) -> Callable[[], None]:
        """Has the layers' calls go through here; returns the undo."""
        self._calls = [getattr(layer, attribute) for layer in self.layers]
        return all_of([put(layer, attribute, self._call(at)) for at, layer in enumerate(self.layers)])

    def run(self, inputs: list[torch.Tensor], form: _Form) -> torch.Tensor:
        """The whole stack over these tensors, layer by layer."""
        args, kwargs = _put_together(form, inputs)
        out: Any = self._calls[0](*args, **kwargs)
        for call, (own, places) in zip(self._calls[1:], self._learnt, strict=True):
            args, kwargs = _put_together(own, [out if at < 0 else inputs[at] for at in places])
            out = call(*args, **kwargs)
        answer: torch.Tensor = out
        return answer

    def _call(self, at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if at == 0:
                return self._begin(args, kwargs)
            if self._playing:
                return self._handed_on(at, args, kwargs)
            out = self._calls[at](*args, **kwargs)
            if self._watching:
                self._watch(at, args, kwargs, out)
            return out

        return call

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._playing = self._watching = False
        if self._on and self._recorded is None and self.layers[0].training and torch.is_grad_enabled():
            self._passes += 1
            if self._passes == SILENT:
                self._report_reason(kwargs)
        if not self._on or not self._trains(kwargs):
            return self._calls[0](*args, **kwargs)
        form, tensors = _flattened(args, kwargs)
        recorded = self._recorded
        if recorded is None and form == self._seen and self._times >= WARM and not self._pending():
            recorded = self._record(form, tensors)
        if recorded is None or form != recorded.form or self._pending() or not recorded.here():
            if self._recorded is None and self._on:
                self._times = self._times if form == self._seen else 0
                self._seen, self._first, self._watching, self._own = form, tensors, True, []
            self._last = self._calls[0](*args, **kwargs)
            return self._last
        mark = _Mark()
        self._waits, self._playing, self._first = weakref.ref(mark), True, tensors
        self._last = _Play.apply(recorded, mark, recorded.weights[0], *tensors)
        return self._last

    def _trains(self, kwargs: dict[str, Any]) -> bool:
        return (
            self.layers[0].training
            and torch.is_grad_enabled()
            and cache_in(kwargs) is None
            and recording() is None
            and not torch.is_autocast_enabled()
        )

    def _pending(self) -> bool:
        return self._waits is not None and self._waits() is not None

    def _watch(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Notes what a layer was told in a pass that runs as it is; a pass that cannot be recorded turns recording off."""
        form, tensors = _flattened(args, kwargs)
        known = {id(each): place for place, each in enumerate(self._first)}
        known[id(self._last)] = -1
        if at != len(self._own) + 1 or any(id(each) not in known for each in tensors):
            self._without("a layer reads what is neither the first layer's input nor the answer of the layer before")
            return
        if not isinstance(out, torch.Tensor):
            self._without(f"layers answer with {type(out).__name__}")
            return
        self._own.append((form, [known[id(each)] for each in tensors]))
        self._last = out
        if at == len(self.layers) - 1:
            self._times = self._times + 1 if not self._times or self._own == self._learnt else 1
            self._learnt, self._own, self._watching = self._own, [], False
            self._first, self._last = [], None

    def _handed_on(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form, tensors = _flattened(args, kwargs)
        own, places = self._learnt[at - 1]
        same = all(
            given is (self._last if place < 0 else self._first[place])
            for given, place in zip(tensors, places, strict=False)
        )
        if form.others != own.others or len(tensors) != len(places) or not same:
            raise ModelError(f"kernels.torch_compile_options.{STACK_GRAPH}: layer {at + 1} was told what it was not when the "
                             "layers were recorded.", TURN_OFF)  # fmt: skip
        out = self._last
        if at == len(self.layers) - 1:
            self._playing, self._first, self._last = False, [], None
        return out

    def _record(self, form: _Form, tensors: list[torch.Tensor]) -> _Recorded | None:
        try:
            self._recorded = _Recorded(self, form, tensors, self._by)
        except failures.known() as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._without(f"recording failed ({type(error).__name__}: {failures.first_line(error)})")
            return None
        count = len(self.layers)
        self._tell(Applied(FEATURE, True, "recorded", count, "layers, played as one graph forward and one backward"))
        return self._recorded

    def _report_reason(self, kwargs: dict[str, Any]) -> None:
        reason = f"no {WARM + 1} of the first {SILENT} batches in a row told the layers the same shapes and numbers"
        if torch.is_autocast_enabled():
            reason = "torch's autocast is on"
        elif not self._trains(kwargs):
            reason = "layers are given a cache of keys or asked for their routers' choices"
        self._tell(Applied(FEATURE, True, "off", None, f"{reason}, so layers are launched one by one"))

    def _without(self, reason: str) -> None:
        self._on = self._watching = False
        self._own, self._first, self._last = [], [], None
        self._tell(Applied(FEATURE, True, "off", None, f"{reason}, so layers are launched one by one"))


def _put_together(form: _Form, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    left = iter(tensors)
    leaves = [next(left) if other is None else other[0] for other in form.others]
    args, kwargs = tree_unflatten(leaves, form.structure)
    return args, kwargs
