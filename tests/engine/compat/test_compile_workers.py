"""The compiler's processes are there before it asks for them, where it will."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

from engine.compat.compile_workers import start_ahead
from engine.rules import read


@pytest.fixture
def none_yet(monkeypatch):
    """No processes, and none afterwards; two are started where a machine has one core, too."""
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 2)
    monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    shutdown_compile_workers()
    yield
    shutdown_compile_workers()


@pytest.mark.parametrize(
    ("compiled", "card", "there"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_processes_are_started_where_layers_will_be_compiled_for_a_card(none_yet, monkeypatch, compiled, card, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    start_ahead(read({"kernels": {"torch_compile": compiled}}).config)
    pools = AsyncCompile.process_pool.cache_info().currsize
    assert pools == there
    if there:
        assert AsyncCompile._ready_future is not None, "torch asks this whether kernels are made elsewhere"
