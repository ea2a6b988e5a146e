"""Activations on disk: memory falls, numbers stay to the bit, and nobody can read, plant or leave the file."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import stat
import subprocess
import sys

import pytest
import torch

from engine.errors import WorkbenchError
from engine.features.activation_offloading.scratch import SavedOnDisk, Scratch
from tests.engine.features.conftest import Meter, tiny_model
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines
from tests.prestarted import prestarted


def test_what_is_saved_leaves_memory_and_the_gradients_stay_to_the_bit(tmp_path):
    found = {}
    for where in ("memory", "disk"):
        model = tiny_model(layers=3, hidden_size=64, intermediate_size=192, head_dim=16)
        ids = torch.arange(2 * 96).reshape(2, 96) % 128
        scratch = Scratch(tmp_path)
        context = SavedOnDisk(scratch, model.parameters())
        with Meter() as meter:
            if where == "disk":
                with context:
                    loss = model(ids, labels=ids).loss
            else:
                loss = model(ids, labels=ids).loss
            gc.collect()
            live = meter.live
        loss.backward()
        found[where] = live, [p.grad for p in model.parameters()], context.written
        del loss
        scratch.close()
    assert found["disk"][0] < 0.35 * found["memory"][0]
    assert found["disk"][2] > 0.6 * found["memory"][0]
    assert all(torch.equal(a, b) for a, b in zip(found["memory"][1], found["disk"][1], strict=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_layout_comes_back_as_it_was(tmp_path, dtype):
    scratch = Scratch(tmp_path)
    context = SavedOnDisk(scratch, [])
    whole = (torch.randn(64, 48, 32) * 9).to(dtype)
    parts = whole[:, ::2], whole[..., ::2], whole[..., 1::2], whole[3:40].mT, whole[:1].expand(20, 48, 32)
    for tensor in (whole, whole.transpose(0, 2), *parts):
        back = context._unpack(context._pack(tensor))
        assert back is not tensor
        assert torch.equal(back, tensor)
    assert context._unpack(context._pack(whole.mT)).stride() == whole.mT.stride()
    scratch.close()


def test_a_tensor_saved_twice_is_written_once_and_a_changed_one_again(tmp_path):
    scratch = Scratch(tmp_path)
    context = SavedOnDisk(scratch, [])
    tensor = torch.randn(128, 64)
    first, second = context._pack(tensor), context._pack(tensor)
    assert context.written == tensor.nbytes
    old = tensor.clone()
    tensor.add_(1)
    third = context._pack(tensor)
    assert context.written == 2 * tensor.nbytes
    assert torch.equal(context._unpack(first), old)
    assert torch.equal(context._unpack(second), old)
    assert torch.equal(context._unpack(third), tensor)
    scratch.close()


def test_the_file_begins_anew_once_nothing_in_it_is_needed(tmp_path):
    scratch = Scratch(tmp_path)
    try:
        assert [scratch.write(memoryview(bytes(size))) for size in (100, 50)] == [0, 100]
        scratch.release()
        assert scratch.write(memoryview(bytes(10))) == 150, "the other one is still needed"
        for _ in range(2):
            scratch.release()
        assert scratch.write(memoryview(bytes(10))) == 0
    finally:
        scratch.close()


def test_the_file_is_private_and_has_no_name(tmp_path):
    scratch = Scratch(tmp_path)
    assert stat.S_IMODE(os.stat(scratch.folder).st_mode) == 0o700
    opened = os.fstat(scratch._file)
    assert stat.S_IMODE(opened.st_mode) == 0o600
    assert opened.st_nlink == 0
    assert list(scratch.folder.iterdir()) == []
    scratch.close()


class _Planted:
    def __reduce__(self):
        return os.mkdir, (os.environ["PLANTED"],)


def test_a_planted_file_is_neither_run_nor_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", str(tmp_path / "ran"))
    folder = tmp_path / "run" / "scratch-0"
    folder.mkdir(parents=True)
    for name in ("activations", "activations.pt", "0.pt"):
        (folder / name).write_bytes(pickle.dumps(_Planted()))
    scratch = Scratch(tmp_path / "run")
    context = SavedOnDisk(scratch, [])
    tensor = torch.randn(128, 64)
    assert torch.equal(context._unpack(context._pack(tensor)), tensor)
    scratch.close()
    assert not (tmp_path / "ran").exists()
    assert not folder.exists()


def test_a_link_out_of_the_run_is_refused_by_its_last_part_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "scratch-0").symlink_to(outside)
    with pytest.raises(WorkbenchError) as refused:
        Scratch(tmp_path / "run")
    assert "scratch-0" in refused.value.message
    assert str(tmp_path) not in refused.value.message + refused.value.hint
    assert (outside / "kept").read_text() == "kept"


def test_a_machines_own_disk_holds_the_scratch_of_each_run_apart(tmp_path, monkeypatch):
    fast = tmp_path / "fast"
    fast.mkdir()
    monkeypatch.setenv("WORKBENCH_SCRATCH", str(fast))
    first, second = Scratch(tmp_path / "runs" / "a-0001"), Scratch(tmp_path / "others" / "a-0001")
    assert {first.folder.parent, second.folder.parent} == {fast}
    assert first.folder != second.folder
    assert stat.S_IMODE(os.stat(first.folder).st_mode) == 0o700
    again = Scratch(tmp_path / "runs" / "a-0001")  # as after a kill: the same place, anew
    assert again.folder == first.folder
    second.close()
    again.close()
    assert list(fast.iterdir()) == []
    assert not (tmp_path / "runs").exists()


def test_a_scratch_disk_that_is_no_folder_or_leads_elsewhere_is_named_by_its_last_part(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_SCRATCH", str(tmp_path / "gone"))
    with pytest.raises(WorkbenchError) as refused:
        Scratch(tmp_path)
    assert "WORKBENCH_SCRATCH (gone): No such file" in refused.value.message
    assert str(tmp_path) not in refused.value.message + refused.value.hint
    (tmp_path / "gone").mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    scratch = Scratch(tmp_path)
    scratch.close()
    scratch.folder.symlink_to(kept)
    with pytest.raises(WorkbenchError, match="leads elsewhere") as refused:
        Scratch(tmp_path)
    assert str(tmp_path) not in refused.value.message
    assert kept.is_dir()


def test_a_killed_run_leaves_no_bytes_and_the_next_start_no_folder(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from engine.features.activation_offloading.scratch import Scratch\n"
        "scratch = Scratch(Path(sys.argv[1])); scratch.write(memoryview(bytes(1 << 20)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    prestarted.wait()
    warm = {**os.environ, prestarted.WARM: "1"}
    done = subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], check=False, cwd=os.getcwd(), env=warm)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch-0"]
    Scratch(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    scratch = Scratch(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WorkbenchError, match=r"activation_offloading.*No space left"):
        scratch.write(memoryview(b"x"))
    scratch.close()


@pytest.mark.parametrize(
    ("method", "adapter", "rows", "checkpointing"),
    [
        ("sft", "lora", CONVERSATIONS, True),
        pytest.param("sft", "none", CONVERSATIONS, False, marks=pytest.mark.slow),
        pytest.param("dpo", "lora", PAIRS, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_gives_the_same_losses_and_tells_the_bytes(
    train,
    source,
    method,
    adapter,
    rows,
    checkpointing,
):
    settings = {
        "method.kind": method, "adapter.kind": adapter, "data.train": [{"path": source(rows)}], "optim.max_steps": 3,
        "memory.gradient_checkpointing": checkpointing,
    }  # fmt: skip
    plain = train(settings)
    moved = train({**settings, "memory.activation_offloading": "disk"})
    losses = [[event["loss"] for event in lines(run, "metrics")] for run in (plain, moved)]
    assert losses[0] == losses[1]
    first, after = (
        [e for e in event["entries"] if e["feature"] == "activation offloading"] for event in lines(moved, "receipt")
    )
    assert first[0]["effective"] == "disk"
    assert after[0]["count"] > 100_000
    assert not list(moved.path.glob("scratch*"))


def test_a_run_that_fails_leaves_no_scratch(train, source, monkeypatch):
    from engine.trainers.saving import CheckpointWriter

    def broken(self, tmp):
        raise OSError("the disk went away")

    monkeypatch.setattr(CheckpointWriter, "_write_parts", broken)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "memory.activation_offloading": "disk"}, code=1)
    assert not list(run.path.glob("scratch*"))
