"""Checkpoints are whole or absent; damage of every kind is named and skipped."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from engine.errors import WorkbenchError, redact
from engine.run import checkpoint
from engine.run.store import RunFolder


def save(run: RunFolder, step: int) -> Path:
    tmp = checkpoint.begin(run, step)
    (tmp / "model.safetensors").write_bytes(os.urandom(2000))
    (tmp / "rng").mkdir()
    (tmp / "rng" / "rank_0.json").write_text('{"seed": 1}')
    return checkpoint.commit(tmp, {"config_hash": "abc"})


def test_a_committed_checkpoint_is_valid_and_lists_sizes_and_hashes(run):
    path = save(run, 10)
    info = json.loads((path / "COMMIT.json").read_text())
    assert path.name == "checkpoint-10"
    assert (info["step"], info["config_hash"]) == (10, "abc")
    assert {name: entry["size"] for name, entry in info["files"].items()} == {
        "model.safetensors": 2000,
        "rng/rank_0.json": 11,
    }
    assert checkpoint.is_valid(path, hashes=True)
    assert checkpoint.newest_valid(run) == (path, [])
    assert path.stat().st_mode & 0o077 == 0


def test_a_commit_shows_file_by_file_that_it_gets_on(run, monkeypatch):
    """Who waits for a save sees files change while they are read for their hashes, which leaves sizes as they are."""
    tmp, seen, real = checkpoint.begin(run, 10), [], checkpoint._hash
    for name in ("a", "b", "c"):
        (tmp / name).write_bytes(b"weights")
        os.utime(tmp / name, (1, 1))

    def looking(handle):
        seen.append(tuple(path.stat().st_mtime > 1 for path in sorted(tmp.iterdir())))
        return real(handle)

    monkeypatch.setattr(checkpoint, "_hash", looking)
    checkpoint.commit(tmp, {})
    assert [sum(each) for each in seen] == [1, 2, 3]


def test_files_of_a_large_checkpoint_are_hashed_side_by_side(run, monkeypatch):
    together, real = threading.Barrier(2, timeout=10), checkpoint._hash

    def waiting(handle):
        together.wait()  # a second thread that is not there breaks it
        return real(handle)

    monkeypatch.setattr(checkpoint, "LARGE", 1000)
    monkeypatch.setattr(checkpoint, "_hash", waiting)
    path = save(run, 10)
    monkeypatch.undo()
    assert checkpoint.is_valid(path, hashes=True)


def truncate(size):
    return lambda path: os.truncate(path / "model.safetensors", size)


def flip(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[1000] ^= 1
    (path / "model.safetensors").write_bytes(data)


DAMAGE = {
    "empty": truncate(0),
    "one byte short": truncate(1999),
    "half": truncate(1000),
    "a flipped bit": flip,
    "a missing file": lambda path: (path / "model.safetensors").unlink(),
    "a missing folder": lambda path: ((path / "rng" / "rank_0.json").unlink(), (path / "rng").rmdir()),
    "a file more": lambda path: (path / "optimizer.pt").write_bytes(b"evil"),
    "no commit": lambda path: (path / "COMMIT.json").unlink(),
    "half a commit": lambda path: os.truncate(path / "COMMIT.json", 50),
    "an empty commit": lambda path: (path / "COMMIT.json").write_text("{}"),
    "a commit that is a list": lambda path: (path / "COMMIT.json").write_text("[]"),
    "a commit of wrong types": lambda path: (path / "COMMIT.json").write_text('{"files": {"model.safetensors": 1}}'),
    "a commit that points outside": lambda path: (path / "COMMIT.json").write_text(
        '{"files": {"../../config.yaml": {"size": 11, "sha256": "x"}}}'
    ),
    "a file that is a link": lambda path: (
        (path / "model.safetensors").rename(path / ".m"),
        (path / "model.safetensors").symlink_to(".m"),
    ),
    "a pipe": lambda path: ((path / "model.safetensors").unlink(), os.mkfifo(path / "model.safetensors")),
    "a file in its place": lambda path: (path.rename(path.with_name("away")), path.write_text("x")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_takes_the_newest_whole_one_and_says_why_it_skipped(run, damage):
    older, newer = save(run, 5), save(run, 10)
    DAMAGE[damage](newer)
    found, skipped = checkpoint.newest_valid(run)
    assert found == older
    assert [path.name for path, _ in skipped] == ["checkpoint-10"]
    assert skipped[0][1]


def test_with_none_whole_nothing_is_chosen_and_nothing_deleted(run):
    for step in (1, 2, 3, 4):
        DAMAGE["no commit"](save(run, step))
    found, skipped = checkpoint.newest_valid(run)
    assert found is None
    assert len(skipped) == 4
    assert checkpoint.prune(run, 2) == []


def test_order_is_by_number_not_by_name(run):
    for step in (9, 100, 20):
        save(run, step)
    assert checkpoint.step_of(checkpoint.newest_valid(run)[0]) == 100


def test_prune_keeps_the_newest_and_never_fewer_than_two(run):
    for step in (1, 2, 3, 4):
        save(run, step)
    DAMAGE["half"](run.checkpoints / "checkpoint-2")
    gone = checkpoint.prune(run, 1)
    assert sorted(path.name for path in gone) == ["checkpoint-1", "checkpoint-2"]
    assert sorted(path.name for path in run.checkpoints.iterdir() if not path.name.startswith(".")) == [
        "checkpoint-3",
        "checkpoint-4",
    ]
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".trash")]


def test_prune_keeps_the_best_however_old(run):
    for step in (1, 2, 3, 4, 5):
        save(run, step)
    assert [path.name for path in checkpoint.prune(run, 2, best=2)] == ["checkpoint-3", "checkpoint-1"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_collect_removes_halves_and_names_what_was_complete(run):
    half = checkpoint.begin(run, 7)
    (half / "x").write_text("x")
    whole = save(run, 8)
    whole.rename(whole.with_name("checkpoint-8.tmp"))
    (run.checkpoints / ".trash-checkpoint-1-aa").mkdir()
    checkpoint.collect(run)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-8"]
    assert checkpoint.is_valid(whole, hashes=True)


def test_a_second_save_of_a_step_replaces_the_first(run):
    save(run, 3)
    DAMAGE["half"](run.checkpoints / "checkpoint-3")
    again = save(run, 3)
    assert checkpoint.is_valid(again, hashes=True)


def test_links_are_refused_and_the_pickle_with_the_token_is_dropped(run, tmp_path):
    tmp = checkpoint.begin(run, 1)
    (tmp / "training_args.bin").write_bytes(b"pickle with hub_token")
    (tmp / "a").write_text("a")
    path = checkpoint.commit(tmp, {})
    assert sorted(found.name for found in path.iterdir()) == ["COMMIT.json", "a"]
    tmp = checkpoint.begin(run, 2)
    (tmp / "b").symlink_to(tmp_path)
    with pytest.raises(WorkbenchError, match="not a plain file"):
        checkpoint.commit(tmp, {})


def test_no_room_is_said_before_anything_is_written(run, monkeypatch):
    save(run, 1)
    real = os.statvfs(run.path)

    class Full:
        f_bavail, f_frsize = 0, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(WorkbenchError, match=r"the disk is full: .* needed, 0 B free"):
        checkpoint.begin(run, 2)
    assert not (run.checkpoints / "checkpoint-2.tmp").exists()


QUOTA = RuntimeError("I/O error: Disk quota exceeded (os error 122)")
FULL = "the disk is full: checkpoint-3 found no room; more than 4 B needed, "


@pytest.mark.parametrize(
    ("problem", "free", "words", "cause"),
    [
        (OSError(28, "No space left on device"), 1 << 40, FULL, "disk full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1 << 40, FULL, "disk full"),
        (RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 142080 vs 141968"), 4096, FULL, "disk full"),
        (
            RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 142080 vs 141968"),
            1 << 30,
            "writing failed: [enforce fail at inline_container.cc] . unexpected pos 142080 vs 141968; checkpoint-3",
            "write failed",
        ),
        (OSError(122, "Disk quota exceeded"), 1 << 30, "the disk quota is used up: checkpoint-3 found no", "disk quota"),
        (QUOTA, 70 << 30, "more than 4 B needed; the disk itself has 70.0 GiB free", "disk quota"),
        (OSError(27, "File too large"), 1 << 30, "takes no file that long: checkpoint-3", "file size limit"),
        (RuntimeError("I/O error: (os error 5)"), 1 << 30, "the disk reports an input/output error", "disk error"),
        (OSError(30, "Read-only file system"), 1 << 30, "the file system is read-only now", "disk read-only"),
    ],
)  # fmt: skip
def test_a_file_that_could_not_be_written_is_told_so_and_its_half_removed(
    run, monkeypatch, problem, free, words, cause
):
    tmp = checkpoint.begin(run, 3)
    (tmp / "model.safetensors").write_bytes(b"half")

    class Space:
        f_bavail, f_frsize = free, 1

    monkeypatch.setattr(os, "statvfs", lambda _: Space)
    told = checkpoint.without_room(tmp, problem)
    assert told is not None
    assert words in str(told)
    assert str(tmp / "model.safetensors") in str(told)
    assert told.cause == cause
    assert "resume" in told.hint
    assert list(run.checkpoints.iterdir()) == []


def test_a_failure_of_another_kind_is_not_the_disks(run):
    tmp = checkpoint.begin(run, 3)
    assert checkpoint.without_room(tmp, OSError(13, "Permission denied")) is None
    assert checkpoint.without_room(tmp, RuntimeError("size mismatch for lm_head")) is None
    assert tmp.exists()


def test_deleting_follows_no_link(run, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (run.checkpoints / "checkpoint-9.tmp").symlink_to(precious)
    checkpoint.collect(run)
    assert (precious / "file").exists()
    (run.checkpoints / "checkpoint-9.tmp").symlink_to(precious)
    checkpoint.begin(run, 9)
    assert (precious / "file").exists()


@pytest.mark.parametrize(
    ("state", "way"),
    [
        ("running", "`workbench checkpoint {id}` asks it for one."),
        ("failed", "`workbench resume {id}` goes on with it."),
        ("finished", "It is finished: `workbench train {config}` trains it again, as a new run."),
    ],
)
def test_a_run_without_a_checkpoint_is_told_the_way_to_one_that_works_for_its_state(run, state, way):
    run.update_json(state=state)
    assert checkpoint.way_to_one(run) == way.format(id=run.id, config=redact(str(run.config)))
