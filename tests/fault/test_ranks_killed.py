"""Ranks of FSDP2 killed at random moments: all are gone soon, no half checkpoint is taken, and the run goes on by itself."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config.facts import Facts
from engine.rules import read
from engine.run import checkpoint, control, devices, launch, store
from engine.run.from_config import launch_config
from engine.run.process import Identity, host, send
from engine.run.process_group import Family
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from tests.fault import test_out_of_memory

group = test_out_of_memory.group

SETTINGS: dict[str, Any] = {
    "version": 1,
    "model": {"name": "builtin/tiny", "dtype": "float32"},
    "data": {"train": [{"path": "builtin/dates"}], "max_length": 64},
    "optim": {"per_device_train_batch_size": 1, "max_steps": 100_000},
    "distributed": {"strategy": "fsdp2"},
}
MOMENTS = "training", "training", "saving", "saving", "beginning"
"""What the ranks are at when one is killed: twice a step, twice a checkpoint, once what comes before the first step."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Four ranks are no fewer where they share two cores.
    monkeypatch.setattr(devices, "cores", lambda: 4)
    yield tmp_path / "runs"
    for run in store.runs_in(tmp_path / "runs"):
        for who in (run.supervisor(), run.worker()):
            if who is not None:
                send(who, signal.SIGKILL)


class Watched:
    """A run of several ranks, and what its events have told so far."""

    def __init__(self, runs: Path, ranks: int, **more: Any) -> None:
        config = {**SETTINGS, **more}
        config["run"] = {"devices": ranks, "save_steps": 3, "save_total_limit": 3, "max_restarts": 99, "prompts": []}
        reading = read(config, Facts())
        assert reading.ok, reading.findings
        self.run, self.number = launch_config(reading.config, Facts(), runs_dir=runs), ranks
        self.events: list[dict[str, Any]] = []
        self._tail = Tail(self.run.events)

    def until(self, condition: Callable[[], Any], seconds: float = 150) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            while fresh := self._tail.read():
                self.events += fresh
            assert self.run.state not in ENDED, self.events[-3:]
            assert time.monotonic() < end, self.events[-3:]
            time.sleep(0.02)
        return found

    def of(self, kind: str, segment: int) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind and event["segment"] == segment]

    def ranks(self) -> dict[int, Identity]:
        """The processes of this start, once all are there."""
        worker = self.run.worker()
        if worker is None or not worker.alive:
            return {}
        family = Family(self.run.read_json()["token"], worker, self.number)
        family.look(lambda: False)
        return family.ranks if len(family.ranks) == self.number else {}

    def kill_one(self, segment: int, moment: str, chance: random.Random, limit: float) -> None:
        """Kills a rank of this start at such a moment, and sees all of them go within the limit."""
        ranks = self.until(self.ranks)
        if moment == "training":
            self.until(lambda: len(self.of("metrics", segment)) > chance.randrange(1, 6))
        elif moment == "saving":
            saves = chance.randrange(1, 3)
            self.until(lambda: [e["state"] for e in self.of("checkpoint", segment)].count("saving") >= saves)
        time.sleep(chance.random() * {"training": 0.3, "saving": 0.2, "beginning": 8}[moment])
        os.kill(chance.choice(list(ranks.values())).pid, signal.SIGKILL)
        begun = time.monotonic()
        while any(who.alive for who in ranks.values()):
            assert time.monotonic() - begun < limit, "ranks are still there"
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("ranks", "kills", "part"),
    [
        pytest.param(2, 1, 0, marks=pytest.mark.timeout(900)),  # in a save, where a half checkpoint may be left
        # Fifty of each number, in parts that one can repeat: a start takes half a minute on a busy machine.
        *(
            pytest.param(ranks, 10, part, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])
            for ranks in (2, 4)
            for part in range(5)
        ),
    ],
)
def test_ranks_killed_at_random_moments(runs: Path, promptly: Any, ranks: int, kills: int, part: int) -> None:
    chance = random.Random(f"{ranks} {kills} {part}")
    watched = Watched(runs, ranks)
    run = watched.run
    for segment in range(kills):
        moment = MOMENTS[(segment + (2 if kills == 1 else 1)) % len(MOMENTS)]
        watched.kill_one(segment, moment, chance, promptly(10))
        chosen, _ = checkpoint.newest_valid(run)
        watched.until(lambda segment=segment: watched.of("started", segment + 1))
        (began,) = watched.of("started", segment + 1)
        # One that was whole but for its name has it now.
        step = began["resumed_from_step"] or 0
        assert step >= (checkpoint.step_of(chosen) or 0 if chosen else 0)
        assert not step or not checkpoint.problem_with(run.checkpoints / f"checkpoint-{step}", hashes=True)
    watched.until(lambda: len(watched.of("checkpoint", kills)) > 1)
    control.request(run, "stop")
    end = time.monotonic() + 60
    while run.state not in ENDED:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert run.state == "stopped"
    newest, skipped = checkpoint.newest_valid(run, hashes=True)
    assert newest is not None
    assert not skipped, "nothing that a name says to be whole is not"
    losses: dict[int, set[float]] = {}
    for event in (json.loads(line) for line in run.events.read_text("utf-8").splitlines()):
        if event["kind"] == "metrics" and "loss" in event:
            losses.setdefault(event["step"], set()).add(event["loss"])
    assert sorted(losses) == list(range(1, max(losses) + 1)), "no step is left out"
    assert all(len(found) == 1 for found in losses.values()), "a step taken again is the same to the bit"


def ended(watched: Watched, ranks: dict[int, Identity], limit: float) -> dict[str, Any]:
    """The last word of a run whose ranks are all gone within the limit after one of them is."""
    end = time.monotonic() + 150
    while all(who.alive for who in ranks.values()):
        assert time.monotonic() < end, "no rank ends"
        time.sleep(0.02)
    begun = time.monotonic()
    while any(who.alive for who in ranks.values()):
        assert time.monotonic() - begun < limit, "ranks are still there"
        time.sleep(0.02)
    while watched.run.state not in ENDED:
        assert time.monotonic() < end, "the run does not end"
        time.sleep(0.05)
    (last,) = [json.loads(line) for line in watched.run.events.read_text("utf-8").splitlines()][-1:]
    return dict(last)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_disk_that_takes_no_more_of_one_rank_is_told_as_that(runs: Path, promptly: Any) -> None:
    watched = Watched(runs, 2)
    run = watched.run
    watched.until(lambda: [e["state"] for e in watched.of("checkpoint", 0)].count("committed") >= 1)
    ranks = watched.until(watched.ranks)
    kept, _ = checkpoint.newest_valid(run)
    # Its shares of weights take 395 kB.
    psutil.Process(ranks[1].pid).rlimit(psutil.RLIMIT_FSIZE, (100_000, 100_000))
    last = ended(watched, ranks, promptly(10))
    assert (last["kind"], last["cause"]) == ("failed", "file size limit"), last
    assert last["message"].startswith(f"rank 1 on {host()}: "), last
    newest, skipped = checkpoint.newest_valid(run)
    assert kept is not None
    assert newest is not None
    assert newest.name >= kept.name
    assert not skipped
    assert not list(run.checkpoints.glob("*.tmp")), "its half is gone"
    chosen, _ = launch.resume(run)
    assert chosen == newest
    goes_on(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_the_kernel_ends_for_memory_is_named(runs: Path, promptly: Any, group: Path) -> None:
    watched = Watched(runs, 2)
    run = watched.run
    watched.until(lambda: [e["state"] for e in watched.of("checkpoint", 0)].count("committed") >= 1)
    ranks = watched.until(watched.ranks)
    for limit in ("memory.max", "memory.limit_in_bytes"):  # what it holds already counts where it was
        if (group / limit).exists():
            (group / limit).write_text(str(1 << 20))
    (group / "cgroup.procs").write_text(str(ranks[1].pid))
    last = ended(watched, ranks, promptly(10))
    assert last["kind"] == "failed"
    assert last["message"].startswith(f"Rank 1 (process {ranks[1].pid} on {host()}) was ended by the kernel"), last
    newest, _ = checkpoint.to_go_on_from(run)
    assert newest is not None
    chosen, _ = launch.resume(run)
    assert chosen == newest
    goes_on(run)


def goes_on(run: RunFolder) -> None:
    """Waits for steps of a resumed run, and stops it."""
    tail, end = Tail(run.events), time.monotonic() + 150
    begun = False
    while not begun:
        assert time.monotonic() < end, "it does not go on"
        begun = any(event["kind"] == "metrics" and event["segment"] == 1 for event in tail.read())
        time.sleep(0.05)
    control.request(run, "stop", now=True)
    while run.state not in ENDED:
        assert time.monotonic() < end, "it does not stop"
        time.sleep(0.05)
    assert run.state == "stopped"
