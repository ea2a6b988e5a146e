"""The worker's own save, weights, optimizer and random state by transformers, killed at every file it touches.

The save is forked at a real step of a real run: the k-th child dies by SIGKILL before the k-th file or folder of the run
is opened, made, renamed or removed, until one comes through. After each the next start must find a whole checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.run import checkpoint
from tests.caches import own_cache
from tests.end_to_end.conftest import Desk

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
STEP = 3
SETTINGS = {
    "model.name": "builtin/tiny",
    "model.dtype": "float32",
    "adapter.kind": "none",
    "data.max_length": 128,
    "optim.max_steps": 4,
    "optim.per_device_train_batch_size": 2,
    "optim.gradient_accumulation_steps": 1,
    "run.save_steps": 1,
    "run.save_total_limit": 2,
}


def die_at(k: int, within: Path) -> None:
    """From now on: SIGKILL for this process before the k-th touch of a file below `within`."""
    touched = 0

    def hook(event: str, given: tuple[Any, ...]) -> None:
        nonlocal touched
        if event in TOUCHES and (str(given[0]).startswith(str(within)) or not os.path.isabs(str(given[0]))):
            touched += 1
            if touched == k:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_killed_at_any_file_of_its_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    from engine.trainers.run_trainer import RunTrainer

    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    save = RunTrainer._save_checkpoint
    outcomes: list[int | None] = []

    def saved_many_times(self: Any, model: Any, trial: Any) -> None:
        if self.state.global_step == STEP and not outcomes:
            k = 1
            while (survived := one_save(self, k)) is not None:
                outcomes.append(survived)
                k += every
        save(self, model, trial)

    def one_save(trainer: Any, k: int) -> int | None:
        """Save in a child that dies at the k-th touch; the step that is chosen afterwards, None if it did not die."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            trainer.writer = None  # its thread is not here
            die_at(k, trainer.run.checkpoints)
            save(trainer, trainer.model, None)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if status == 0:
            assert forget(trainer) == STEP
            return None
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        return forget(trainer)

    def forget(trainer: Any) -> int:
        """What the next start would take up; then the save is undone."""
        run = trainer.run
        newest, _ = checkpoint.newest_valid(run)
        assert newest is not None
        for path in run.checkpoints.iterdir():
            if checkpoint.step_of(path) is not None:
                assert checkpoint.problem_with(path, hashes=True) == "", path.name
        checkpoint.collect(run)
        assert not list(run.checkpoints.glob("*.tmp"))
        assert not list(run.checkpoints.glob(".trash*"))
        shutil.rmtree(run.checkpoints / f"checkpoint-{STEP}", ignore_errors=True)
        found = checkpoint.step_of(newest)
        assert found is not None
        return found

    monkeypatch.setattr(RunTrainer, "_save_checkpoint", saved_many_times)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 16)
    run = Desk(tmp_path).train_here({**SETTINGS, "data.train": [{"path": str(rows)}]})
    # Every file of a checkpoint is touched at least twice, to write and to seal it.
    assert len(outcomes) >= 2 * len(list(run.newest.iterdir())) // every
    assert outcomes[0] == STEP - 1
    assert outcomes == sorted(outcomes)  # once it has its name it stays
    assert every > 1 or outcomes[-1] == STEP
    assert checkpoint.step_of(run.newest) == 4
