"""Weights are in memory when they are asked for, and are read straight to the device where they stay."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.builtin import tiny
from engine.features import load as loading
from engine.model_files import WEIGHTS, read_ahead
from engine.models.load import load_pretrained
from engine.rules import read
from tests.engine.trainers.conftest import CONVERSATIONS, source, train  # noqa: F401  runs of the worker in this process
from tests.engine.trainers.test_matrix import losses

MiB = 1 << 20


def in_memory(file: Path) -> float:
    """The share of the file's pages that the system holds in memory. To read them, even without waiting, would fetch them."""
    size = file.stat().st_size
    held = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    with file.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
        start = ctypes.c_char.from_buffer(pages)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), held)
        del start
        pages.close()
    assert not failed
    return sum(page & 1 for page in held) / len(held)


def written(file: Path, data: bytes) -> None:
    """Writes the file through to the disk, so that nothing of it must stay in memory."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_SYNC)
    assert os.write(handle, data) == len(data)
    os.close(handle)


def forget(file: Path) -> None:
    """Has the system let go of the file's pages, as it does on disks; a file system in memory keeps them."""
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def test_files_that_were_read_ahead_need_no_disk(tmp_path: Path) -> None:
    file = tmp_path / WEIGHTS
    written(file, os.urandom(MiB) * 80)
    forget(file)
    thread = read_ahead(tmp_path)
    assert thread is not None
    thread.join()
    give_up = time.monotonic() + 30
    while in_memory(file) < 1:
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_files_that_would_take_half_of_what_is_free_are_left(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(bytes(MiB))
    assert read_ahead(tmp_path, free=2 * MiB - 1) is None
    assert read_ahead(tmp_path, free=2 * MiB) is not None
    assert read_ahead(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({}, True),
        ({"adapter": {"kind": "lora"}}, True),
        ({"method": {"kind": "dpo"}}, True),
        ({"method": {"kind": "reward"}}, False),
        ({"model": {"name": tiny.NAME, "quantization": "nf4"}, "adapter": {"kind": "lora"}}, False),
        ({"memory": {"layer_offloading": True}, "adapter": {"kind": "lora"}}, False),
        ({"distributed": {"strategy": "fsdp2"}}, False),
    ],
)
def test_what_stays_on_the_card_is_read_onto_it(settings: dict[str, Any], there: bool) -> None:
    assert loading.stays_on_the_card(read({"model": {"name": tiny.NAME}, **settings}).config) is there


def test_a_model_that_was_read_onto_its_device_is_the_same_and_trains_the_same(train, source, monkeypatch) -> None:  # noqa: F811
    config = read({"model": {"name": tiny.NAME, "dtype": "float32"}}).config
    plain, placed = (load_pretrained(config, device).model for device in (None, torch.device("cpu")))
    theirs = placed.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in plain.state_dict().items())

    settings = {"adapter.kind": "lora", "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 3}
    before = losses(train(settings))
    real = loading.load_pretrained
    monkeypatch.setattr(loading, "load_pretrained", lambda config, device=None: real(config, torch.device("cpu")))
    assert losses(train(settings)) == before


def test_a_model_read_onto_one_device_has_no_map_of_devices() -> None:
    """By one the trainer would take it for a model on several, and leave it where it is."""
    config = read({"model": {"name": tiny.NAME}}).config
    model = load_pretrained(config, torch.device("cpu")).model
    assert not any(hasattr(module, "hf_device_map") for module in model.modules())


def test_what_finds_no_room_on_the_card_is_read_by_way_of_the_host(monkeypatch, capsys) -> None:
    config = read({"model": {"name": tiny.NAME}}).config
    asked = []
    real = loading.load_pretrained

    def on_a_full_card(config, device=None):
        asked.append(device)
        if device is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return real(config)

    monkeypatch.setattr(loading, "load_pretrained", on_a_full_card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(loading, "at_stake", lambda model, card: False)
    loaded = loading.load(config)
    assert asked == [torch.device("cuda", 0), None]
    assert loaded.model.device.type == "cpu"
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "local", "current", "own"), [(1, 0, 0, True), (4, 3, 3, True), (4, 3, 0, False), (16, 1, 1, True)]
)
def test_a_rank_reads_onto_its_own_card_alone(monkeypatch, ranks, local, current, own) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert loading.is_of_this_rank(torch.device("cuda", current)) is own
