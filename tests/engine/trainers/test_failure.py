"""What the worker says of a problem that is not ours: real ones, as torch and Python raise them."""

from __future__ import annotations

import pytest
import torch

from engine.trainers.failure import cause_of, lost_rank, mends


@pytest.mark.parametrize("take", [lambda: torch.empty(1 << 50, dtype=torch.uint8), lambda: bytearray(1 << 60)])
def test_want_of_host_memory_is_named_with_a_way_out(take):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        take()
    cause, message = cause_of(raised.value)
    assert cause == "host_oom"
    assert message.startswith("This machine ran out of memory. ")
    assert "data.max_length" in message


def test_another_error_keeps_its_type_and_first_line_without_escapes_or_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    cause, message = cause_of(RuntimeError(f"\x1b[31mshapes differ in {tmp_path}/model\nand more"))
    assert cause == "exception"
    assert message.startswith("RuntimeError: ␛[31mshapes differ in ")
    assert "and more" not in message
    assert str(tmp_path) not in message


def test_a_message_to_a_rank_that_is_gone_is_that_rank_s_end_and_no_other_s(monkeypatch):
    gone = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not lost_rank(gone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_rank(gone)
    assert not lost_rank(OSError("Broken pipe"))


def test_an_operation_without_a_deterministic_form_names_its_setting_and_its_change():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long), 1)
    finally:
        torch.use_deterministic_algorithms(False)
    cause, message = cause_of(raised.value)
    assert cause == "error"
    assert message.startswith("run.full_determinism: max_unpooling2d")
    assert mends(raised.value) == [{"run.full_determinism": False}]
