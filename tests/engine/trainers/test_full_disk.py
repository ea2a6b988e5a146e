"""A disk that fills up while the libraries write a checkpoint: said in words, nothing half-written, and the run goes on."""

from __future__ import annotations

import os
import subprocess

import pytest

from engine.config.files import as_yaml, put
from engine.run.store import create
from tests.engine.trainers.conftest import BASE, CONVERSATIONS, lines


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("room", [300_000, 2_000_000], ids=["weights", "optimizer"])
def test_a_disk_that_is_full_at_the_first_save_is_said_and_keeps_no_half(train, source, tmp_path, room):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        mapping = {"version": 1}
        for path, value in (BASE | {"data.train": [{"path": source(CONVERSATIONS)}]}).items():
            put(mapping, path, value)
        run = create(small, as_yaml(mapping), {"method": "test", "model": "builtin/tiny"})
        space = os.statvfs(small)
        (small / "others").write_bytes(bytes(space.f_bavail * space.f_frsize - room))
        train(folder=run, code=1)
        told = lines(run, "failed")[0]
        assert (told["cause"], "the disk is full: checkpoint-4" in told["message"]) == ("disk full", True)
        assert not list(run.checkpoints.glob("checkpoint-*"))
        (small / "others").unlink()
        train(folder=run)
        assert (run.checkpoints / "checkpoint-10").is_dir()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
