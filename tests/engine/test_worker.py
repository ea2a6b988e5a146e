"""How a rank leaves its process groups once the run has ended."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed

from engine import worker


def _rank_that_leaves(number: int, store: str, first_gone: bool) -> None:
    """A rank of two whose run ended well; the other is gone already, or leaves too."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    torch.distributed.all_reduce(torch.ones(1))
    if number == 1 and first_gone:
        os.kill(os.getpid(), signal.SIGKILL)
    if first_gone:
        time.sleep(0.3)
    begun = time.monotonic()
    code = worker.leave_groups(0)
    assert not torch.distributed.is_initialized()
    os._exit(code if time.monotonic() - begun < 5 else 3)


@pytest.mark.parametrize("first_gone", [False, True])
def test_a_rank_that_ended_well_leaves_its_groups_though_another_is_gone(monkeypatch, tmp_path, first_gone):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for number in (0, 1):
        if (pid := os.fork()) == 0:
            try:
                _rank_that_leaves(number, str(tmp_path / "store"), first_gone)
            finally:
                os._exit(4)
        ranks.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert codes == [0, -signal.SIGKILL if first_gone else 0]


def test_groups_that_are_not_left_hold_nobody_up(monkeypatch):
    never = threading.Event()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(worker, "LEAVING_SECONDS", 0.2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: never.wait(30))
    begun = time.monotonic()
    assert worker.leave_groups(0) == 0
    assert 0.2 <= time.monotonic() - begun < 5
    never.set()


@pytest.mark.parametrize(("code", "several"), [(1, True), (0, False)])
def test_who_failed_or_is_alone_leaves_nothing(monkeypatch, code, several):
    def left():
        raise AssertionError("it left its groups")

    monkeypatch.setenv("WORLD_SIZE", "2" if several else "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", left)
    assert worker.leave_groups(code) == code


def test_a_folder_that_is_no_run_is_refused_before_anything_is_written(tmp_path, capsys):
    assert worker.main(str(tmp_path)) == 1
    assert capsys.readouterr().err == f"{tmp_path}: is no run's folder: it holds no config.yaml.\n"
    assert not list(tmp_path.iterdir())
