"""What the worker says of a problem that is not ours: real ones, as torch and Python raise them."""

from __future__ import annotations

import pytest
import torch

from engine.worker import _cause


@pytest.mark.parametrize("take", [lambda: torch.empty(1 << 50, dtype=torch.uint8), lambda: bytearray(1 << 60)])
def test_want_of_host_memory_is_named_with_a_way_out(take):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        take()
    cause, message = _cause(raised.value)
    assert cause == "host_oom"
    assert message.startswith("This machine ran out of memory. ")
    assert "data.max_length" in message


def test_another_error_keeps_its_type_and_first_line_without_escapes_or_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    cause, message = _cause(RuntimeError(f"\x1b[31mshapes differ in {tmp_path}/model\nand more"))
    assert cause == "exception"
    assert message.startswith("RuntimeError: ␛[31mshapes differ in ")
    assert "and more" not in message
    assert str(tmp_path) not in message
