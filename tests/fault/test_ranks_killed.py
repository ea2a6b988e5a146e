"""Ranks killed at random moments, and amid the exchange of tokens between divided experts: all are gone soon, no half checkpoint
is taken, and the run goes on by itself."""

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
from transformers import AutoTokenizer

from engine.builtin import tiny
from engine.config.facts import Facts
from engine.rules import read
from engine.run import checkpoint, control, devices, launch, store
from engine.run.from_config import launch_config
from engine.run.process import Identity, host, send
from engine.run.process_group import ProcessTree
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from tests.engine.features.families import made
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
        family = ProcessTree(self.run.read_json()["token"], worker, self.number)
        family.poll(lambda: False)
        return family.ranks if len(family.ranks) == self.number else {}

    def listening(self) -> set[str]:
        """The addresses at which torchrun and the ranks wait for others."""
        worker = self.run.worker()
        assert worker is not None
        pids = [worker.pid, *(who.pid for who in self.until(self.ranks).values())]
        found = (each for pid in pids for each in psutil.Process(pid).net_connections("tcp"))
        return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}

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
    watched.until(lambda: watched.of("metrics", 0))
    (listening,) = watched.listening()
    assert listening == "127.0.0.1", "other machines could reach in"
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
@pytest.mark.parametrize("divided", [False, True], ids=["shares", "experts"])
def test_a_rank_that_the_kernel_ends_for_memory_is_named(
    runs: Path, promptly: Any, group: Path, experts: dict[str, Any], divided: bool
) -> None:
    watched = Watched(runs, 2, **(experts if divided else {}))
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


@pytest.fixture
def experts(tmp_path: Path) -> dict[str, Any]:
    """Settings of a tiny mixture whose experts two ranks divide between them, with adapters on them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    made("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    return {
        "model": {"name": str(tmp_path / "mixture"), "dtype": "float32"},
        "adapter": {"kind": "lora", "r": 4, **targets},
        "distributed": {"expert_parallel_size": 2, "ddp_timeout": 15},
    }


def held_in_all_to_all(watched: Watched, ranks: dict[int, Identity]) -> None:
    """Stops rank 1 where rank 0 waits for its tokens in a layer's all-to-all, and for nothing else."""
    chance = random.Random(7)
    beats = [watched.run.path / "beats" / f"{rank}.json" for rank in ranks]
    watched.until(lambda: all(each.exists() for each in beats))  # a second after they began
    for _ in range(20):
        os.kill(ranks[1].pid, signal.SIGSTOP)
        end = time.monotonic() + 8
        while time.monotonic() < end:
            beat = json.loads((watched.run.path / "beats" / "0.json").read_text())
            if beat.get("still", 0) > 1:
                break
            time.sleep(0.1)
        if "all_to_all" in beat.get("waits", "") or "alltoall" in beat.get("waits", ""):
            return
        os.kill(ranks[1].pid, signal.SIGCONT)
        time.sleep(chance.random())
    raise AssertionError(f"rank 0 never waits for tokens: {beat}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["the late rank killed", "the waiting rank killed", "stopped"])
def test_a_fault_amid_the_exchange_of_tokens_ends_all_and_the_run_goes_on(
    runs: Path, promptly: Any, experts: dict[str, Any], fault: str
) -> None:
    """Rank 0 has sent its tokens to the experts of rank 1, and waits for what those make of them."""
    watched = Watched(runs, 2, **experts)
    run = watched.run
    watched.until(lambda: [e["state"] for e in watched.of("checkpoint", 0)].count("committed") >= 1)
    ranks = watched.until(watched.ranks)
    held_in_all_to_all(watched, ranks)
    chosen, _ = checkpoint.newest_valid(run)
    lost = 0 if fault == "the waiting rank killed" else 1
    if fault != "stopped":
        os.kill(ranks[lost].pid, signal.SIGKILL)
    begun, limit = time.monotonic(), promptly(10) + (15 if fault == "stopped" else 0)
    while any(who.alive for who in ranks.values()):
        assert time.monotonic() - begun < limit, "ranks are still there"
        time.sleep(0.02)
    (began,) = watched.until(lambda: watched.of("started", 1))
    (told,) = watched.of("restart", 0)
    how = "hangs: it is stopped by a signal (SIGSTOP)" if fault == "stopped" else "was ended by SIGKILL"
    assert told["message"].startswith(f"Rank {lost} (process {ranks[lost].pid} on {host()}) {how}"), told
    assert chosen is not None
    assert began["resumed_from_step"] >= (checkpoint.step_of(chosen) or 0) > 0
    watched.until(lambda: len(watched.of("metrics", 1)) > 1)
    control.request(run, "stop", now=True)


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
