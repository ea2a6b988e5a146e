"""Where torch's DDP and FSDP2 have a process's computation wait for others: the places at which that wait is timed.

DDP sends buffers around before a forward pass, and waits for gradients at the end of a backward pass, in C++: what is to be
called then the autograd engine calls in the order in which it was asked, and we ask first. FSDP2 waits for each layer's weights
and gradients, in Python: on a GPU the stream that computes does, on a CPU the call itself. A GPU's stream waits for nothing that
it would not wait for a moment later, so nothing but two events is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class Waits(Protocol):
    """What takes the time of a wait: from a mark, which is None where nothing is measured, until now."""

    def mark(self) -> Any: ...

    def until(self, begun: Any) -> None: ...


class SendsBuffers(Protocol):
    """A model under DDP, which sends its buffers around by this."""

    _sync_buffers: Callable[[], None]


def when_computed(loss: torch.Tensor, call: Callable[[], None]) -> torch.utils.hooks.RemovableHandle:
    """Has `call` called once a backward pass from this loss has computed all gradients, before DDP waits for those of others."""

    def ask(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(call)

    return loss.register_hook(ask)


def time_model(model: torch.nn.Module, waits: Waits) -> int:
    """Times the waits of a model under DDP for buffers, and all of one that FSDP2 has sharded; at how many places it does."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        _time_buffers(cast(SendsBuffers, model), waits)
        return 1
    # Modules that were sharded together have one state.
    states: dict[int, Any] = {
        id(state): state
        for module in model.modules()
        if isinstance(module, FSDPModule) and (state := module._get_fsdp_state())
    }
    groups = [
        group
        for state in states.values()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        if group is not None
    ]
    for group in groups:
        (_on_device if torch.cuda.is_available() else _on_host)(group, waits)
    return len(groups)


def _time_buffers(model: SendsBuffers, waits: Waits) -> None:
    send = model._sync_buffers

    def sync_buffers() -> None:
        begun = waits.mark()
        send()
        waits.until(begun)

    model._sync_buffers = sync_buffers


class _Collective:
    """A collective of FSDP2's in its own place."""

    def __init__(self, collective: Any, waits: Waits) -> None:
        self._collective, self._waits = collective, waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._collective(*args, **kwargs)


class _Call(_Collective):
    """One that is timed on the host, which waits in it."""

    done: Any = None
    """When it was over."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begun = self._waits.mark()
        work = self._collective(*args, **kwargs)
        self._waits.until(begun)
        self.done = self._waits.mark()
        return work


def _on_host(group: Any, waits: Waits) -> None:
    group._all_gather_comm = _Call(group._all_gather_comm, waits)
    group._reduce_scatter_comm = reduce = _Call(group._reduce_scatter_comm, waits)
    if group._is_hsdp and group._all_reduce_hook is None:
        # Between a scatter's end and this lies the sum over replicas.
        group._all_reduce_hook = lambda _: waits.until(reduce.done)


class _Allocations(_Collective):
    """The scatter of gradients on a GPU: it asks for memory once the stream that computes has waited for the one before."""

    begun: Any = None

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        begun, self.begun = self.begun, None
        self._waits.until(begun)
        return self._collective.allocate(*args, **kwargs)


def _on_device(group: Any, waits: Waits) -> None:
    put_together, post_backward, finalize = group.wait_for_unshard, group.post_backward, group.finalize_backward
    group._reduce_scatter_comm = scatter = _Allocations(group._reduce_scatter_comm, waits)

    def wait_for_unshard() -> None:
        result = group._all_gather_result
        if result is not None and (begun := waits.mark()) is not None:
            if result.all_gather_event is not None:
                torch.cuda.current_stream().wait_event(result.all_gather_event)
            if isinstance(result.all_gather_work, dist.Work):
                result.all_gather_work.wait()
            waits.until(begun)
        put_together()

    def after_backward(*unused: Any) -> None:
        scatter.begun = waits.mark()
        post_backward(*unused)
        scatter.begun = None

    def finalize_backward() -> None:
        last = [*getattr(group.comm_ctx, "_last_post_reduce_events", {}).values(), group._post_reduce_event]
        pending = [event for event in last if event is not None]
        if pending and (begun := waits.mark()) is not None:
            for event in pending:
                torch.cuda.current_stream().wait_event(event)
            waits.until(begun)
        finalize()

    group.wait_for_unshard, group.post_backward = wait_for_unshard, after_backward
    group.finalize_backward = finalize_backward
