"""Files of shares are what torch's own writer makes, without its copies in memory, and say in which file the disk was full."""

from __future__ import annotations

import errno
import json
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from engine.compat import shard_files
from engine.compat.shard_files import ShardWriter

STATE = {
    "a": torch.arange(12.0).view(3, 4),
    "b.weight": torch.arange(6).to(torch.bfloat16),
    "step": torch.tensor(3.0),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "view": torch.arange(10.0)[2:7],
}


def save(writer: Any, state: dict[str, torch.Tensor]) -> None:
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def headers(folder: Path) -> dict[str, Any]:
    """By file what safetensors says at its beginning."""
    found = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        found[path.name] = header
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_those_of_torchs_own_writer(tmp_path: Path) -> None:
    contiguous = {name: each.contiguous() for name, each in STATE.items()}
    save(HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True), contiguous)
    save(ShardWriter(tmp_path / "ours"), STATE)
    assert headers(tmp_path / "ours") == headers(tmp_path / "theirs")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shares_of_many_bytes_are_several_files_which_torch_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shard_files, "FILE_BYTES", 40)
    save(ShardWriter(tmp_path), STATE)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"shard-00001-model-{number:05}-of-00003.safetensors" for number in range(1, 4)]
    found = {name: torch.zeros_like(each) for name, each in STATE.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(found[name], each) for name, each in STATE.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_writing_takes_no_memory_for_what_it_writes(tmp_path: Path) -> None:
    """torch's way takes it once or twice more, which does not fit beside a model that fills the machine."""
    held = {"a": torch.ones(96 << 20, dtype=torch.uint8)}
    save(ShardWriter(tmp_path / "small"), STATE)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = _resident("VmRSS")
    save(ShardWriter(tmp_path / "large"), held)
    assert _resident("VmHWM") - before < 40 << 20


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_limit_is_told_by_its_number_and_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(dcp.api.CheckpointException) as raised:
            save(ShardWriter(tmp_path), {"a": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (problem, _) = raised.value.failures[0]
    assert isinstance(problem, OSError)
    assert (problem.errno, Path(problem.filename).parent) == (errno.EFBIG, tmp_path)
