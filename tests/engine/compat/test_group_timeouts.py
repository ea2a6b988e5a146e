"""All groups of processes wait as long, those too that torch made by itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from engine.compat.group_timeouts import wait_as_long


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ring = init_device_mesh("cpu", (1, 2), mesh_dim_names=("batch", "ring")).get_group("ring")
    assert wait_as_long(1) >= 2
    if rank == 1:
        time.sleep(20)
        return
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="imed out"):
        dist.all_reduce(torch.ones(1), group=ring)
    Path(folder, "waited").write_text(str(time.monotonic() - begun))


def test_a_group_of_a_mesh_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    """Of its own accord it waited for half an hour."""
    ranks = torch.multiprocessing.start_processes(_rank, (str(tmp_path),), nprocs=2, join=False, start_method="fork")
    try:
        ranks.processes[0].join(120)
        assert 1 <= float((tmp_path / "waited").read_text()) < 20
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
