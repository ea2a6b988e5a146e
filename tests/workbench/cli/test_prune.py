"""`workbench prune RUN`: shows first, removes when told, never the newest whole checkpoint nor the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.run import checkpoint
from engine.run.best import best_text
from engine.run.events import last_numbers
from engine.run.index import open_view, peek
from engine.run.store import RunFolder
from tests.checkpointed import run_of_four, steps
from tests.warm import command


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return run_of_four(tmp_path)


def prune(run: RunFolder, *words: str) -> Any:
    ended = command("prune", str(run.path), *words, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_what_would_go_is_shown_and_stays_until_it_is_told_to_go(run: RunFolder) -> None:
    log = run.events.read_bytes()
    shown = command("prune", str(run.path))
    assert [" ".join(line.split()) for line in shown.stdout.splitlines()] == [
        "stays checkpoint-4 4.1 KiB held-out loss 2, the newest whole one",
        "When? → ␛day 4",
        "stays checkpoint-2 2.1 KiB held-out loss 1, the best",
        "When? → ␛day 2",
        "goes checkpoint-3 3.1 KiB held-out loss 1.50, older, not the best",
        "When? → ␛day 2",
        "goes checkpoint-1 1.1 KiB held-out loss 3, older, not the best",
        "When? → ␛day 1",
        f"Nothing was removed. `workbench prune {run.path} --keep 1 --yes` frees 4.2 KiB.",
    ]
    assert steps(run) == [1, 2, 3, 4]
    told = prune(run, "--keep", "2", "--yes")
    assert [entry["step"] for entry in told["removed"]] == [1]
    assert [entry["step"] for entry in told["kept"]] == [4, 3, 2]
    assert not told["dry_run"]
    assert steps(run) == [2, 3, 4]
    with open_view(run) as watch:
        assert watch.view.committed == [2, 3, 4]
        prune(run, "--yes")
        assert steps(run) == [2, 4]
        watch._next_folder_look = 0
        assert watch.poll()
        assert watch.view.committed == [2, 4] == peek(run).view.committed
        assert best_text(watch.view) == "checkpoint-2 is the best: held-out loss 1"
    # The log still ends with the run's last word.
    assert run.events.read_bytes() == log
    assert last_numbers(run.events)[3]
    assert prune(run, "--yes")["removed"] == []


def test_a_damaged_newest_one_saves_the_one_before_and_goes_only_after_it(run: RunFolder) -> None:
    newest = run.checkpoints / "checkpoint-4" / "model.safetensors"
    newest.write_bytes(bytes(3999) + b"x")
    told = prune(run, "--yes")
    # Its size is right and its content is not: what is kept is the newest that is whole.
    assert 3 in steps(run)
    assert [entry["step"] for entry in told["removed"]] == [1]
    assert steps(run) == [2, 3, 4]


def test_nothing_goes_from_a_run_at_work_or_one_without_a_whole_checkpoint(run: RunFolder) -> None:
    from engine.run.lock import RunLock

    with RunLock(run):
        ended = command("prune", str(run.path), "--yes", "--json")
        assert "is still" in json.loads(ended.stdout)["error"]["message"]
    for path in run.checkpoints.glob("checkpoint-*"):
        (path / checkpoint.COMMIT).unlink()
    ended = command("prune", str(run.path), "--yes", "--json")
    assert ended.returncode == 1
    assert "has no whole checkpoint, so nothing of it is removed" in json.loads(ended.stdout)["error"]["message"]
    assert steps(run) == [1, 2, 3, 4]


def test_a_step_that_is_saved_anew_is_there_again(run: RunFolder) -> None:
    prune(run, "--yes")
    tmp = checkpoint.begin(run, 3)
    (tmp / "model.safetensors").write_bytes(b"anew")
    checkpoint.commit(tmp, {})
    assert peek(run).view.committed == [2, 3, 4]
