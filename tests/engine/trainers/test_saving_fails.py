"""A save that fails in a library ends the run with the file's name and leaves nothing of its checkpoint behind."""

from __future__ import annotations

import errno
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers.modeling_utils
from safetensors import SafetensorError

from engine.run import checkpoint
from engine.trainers.saving import CheckpointWriter
from tests.engine.trainers.conftest import CONVERSATIONS, lines

TORCH = "[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file data/0: file write failed"


@pytest.fixture
def fails(monkeypatch):
    """`fails("optimizer.pt", problem)`: writing that file of the second checkpoint raises, after half of it is written
    where `half`."""

    def fails(name, problem, *, half=False):
        def broken(real, place):
            def write(*args, **kwargs):
                path = str(args[place])
                if path.endswith(f"checkpoint-4.tmp/{name}"):
                    if half:
                        with open(path, "wb") as file:
                            file.write(b"half")
                    raise problem
                return real(*args, **kwargs)

            return write

        monkeypatch.setattr(torch, "save", broken(torch.save, 1))
        theirs = transformers.modeling_utils.safe_save_file
        monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", broken(theirs, 1))

    return fails


@pytest.mark.parametrize(
    ("name", "problem", "half", "cause"),
    [
        ("model.safetensors", SafetensorError("I/O error: Input/output error (os error 5)"), False, "disk error"),
        ("model.safetensors", SafetensorError("I/O error: File too large (os error 27)"), True, "file size limit"),
        ("model.safetensors", SafetensorError("I/O error: Disk quota exceeded (os error 122)"), False, "disk quota"),
        ("optimizer.pt", OSError(errno.EIO, os.strerror(errno.EIO)), True, "disk error"),
        ("optimizer.pt", RuntimeError(TORCH), False, "write failed"),
        ("scheduler.pt", RuntimeError(TORCH), True, "write failed"),
        ("rng_state.pth", OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True, "disk quota"),
    ],
)
def test_a_library_that_cannot_write_is_told_with_its_file(train, source, fails, name, problem, half, cause):
    fails(name, problem, half=half)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 6, "run.save_steps": 2}, code=1)
    (failed,) = lines(run, "failed")
    assert failed["cause"] == cause
    assert f"checkpoint-4.tmp/{name}:" in failed["message"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-2"]


@pytest.mark.parametrize("problem", [RuntimeError("size mismatch for lm_head"), ValueError("no such format")])
def test_a_save_that_fails_for_another_reason_leaves_nothing_behind_either(train, source, fails, problem):
    fails("optimizer.pt", problem, half=True)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 6, "run.save_steps": 2}, code=1)
    assert str(problem) in lines(run, "failed")[0]["message"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-2"]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run_whose_new_one_is_whole(train, source, monkeypatch):
    def busy(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    def prune(run, *_):
        if (run.checkpoints / "checkpoint-4").exists():
            shutil.rmtree(run.checkpoints / "checkpoint-2")  # one went before the next one could not
        busy(run.checkpoints / "checkpoint-2")

    monkeypatch.setattr(checkpoint, "prune", prune)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4, "run.save_steps": 2})
    gone = [each["step"] for each in lines(run, "checkpoint") if each["state"] == "deleted"]
    assert gone == [2]
    assert checkpoint.is_valid(run.checkpoints / "checkpoint-4", hashes=True)
    told = [each for each in lines(run, "finding") if each["rule"] == "prune"]
    assert [each["message"] for each in told] == [
        f"checkpoint-{step} is saved; older checkpoints could not be deleted: Device or resource busy"
        for step in (2, 4)
    ]


def test_a_rank_whose_folder_the_first_one_took_away_says_what_went_wrong_on_it(tmp_path):
    def fails(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    trainer = SimpleNamespace(
        store_flos=lambda: None, model=None, args=SimpleNamespace(process_index=1, should_save=False), save_model=fails
    )
    with pytest.raises(OSError, match="Input/output error"):
        CheckpointWriter(trainer)._write_parts(tmp_path / "checkpoint-2.tmp")
