"""What the supervisor writes of a run, and when: of several ranks of which one is gone before the others above all."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from engine.errors import RunBusy
from engine.run import checkpoint, inside, launch, nodes, queue
from engine.run.control import Request
from engine.run.devices import Choice
from engine.run.events import EventWriter
from engine.run.lock import RunLock
from engine.run.nodes import FirstNode, Rendezvous
from engine.run.process import host, identity
from engine.run.process_group import ProcessTree
from engine.run.supervise import Supervisor, claim
from engine.run.tail import Tail
from engine.run.worker_process import WorkerProcess


def gone(rank):
    """Two ranks of which this one was gone before the other, of which torchrun's report says nothing."""
    me = identity(os.getpid())
    family = ProcessTree("token", me, 2)
    family.lost_rank, family._alone = (rank, me), True
    return family


@pytest.mark.parametrize(
    ("last_word", "rank", "state"),
    [
        ({"kind": "stopped", "step": 0, "by": "me"}, 0, "stopped"),
        ({"kind": "finished", "step": 4}, 0, "finished"),
        ({"kind": "finished", "step": 4}, 1, "failed"),
        ({"kind": "failed", "cause": "exception", "message": "the other end is gone"}, 1, "failed"),
        (None, 0, "failed"),
    ],
)
def test_the_first_rank_may_leave_first_once_it_has_said_how_the_run_ended(run, last_word, rank, state):
    watch = Supervisor(run)
    watch.worker = WorkerProcess(run, identity(os.getpid()), gone(rank))
    run.log.touch()
    with EventWriter(run, segment=0) as writer:
        if last_word is not None:
            writer.write(**last_word)
    watch._conclude(1)
    assert run.state == state
    if state == "failed":
        assert f"Rank {rank} (process {os.getpid()} on {host()})" in run.read_json()["message"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("diverged", "The training diverged at step 7: the loss was not finite."),
        ("error", "data.train: rows.jsonl has no rows."),
        ("cuda_oom", "The GPU ran out of memory."),
    ],
)
def test_what_the_first_rank_says_of_itself_stands_whoever_is_gone_first(run, rank, cause, message):
    """All ranks end together there, and which of them is seen to go first is chance."""
    watch = Supervisor(run)
    watch.worker = WorkerProcess(run, identity(os.getpid()), gone(rank))
    run.log.touch()
    with EventWriter(run, segment=0) as writer:
        writer.write("failed", cause=cause, message=message, step=7)
    watch._conclude(1)
    values = run.read_json()
    assert (values["state"], values["cause"], values["message"]) == ("failed", cause, message)
    assert [event["kind"] for event in Tail(run.events).read()] == ["failed"]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "PermissionError: [Errno 13] Permission denied: 'COMMIT.json'",
            "PermissionError: [Errno 13] Permission denied",
        ),
        ("RuntimeError: Connection closed by peer", "Rank 0 (process "),
    ],
)
def test_the_first_rank_that_fell_by_itself_is_told_in_its_own_words(run, message, told):
    """The log ends with what the others say of its death: with that the run would be started again, to fail the same way."""
    run.config.write_text("version: 1\nrun: {max_restarts: 3}\n")
    run.log.write_text("Traceback (most recent call last):\nRuntimeError: [pair.cc:553] Connection closed by peer\n")
    watch = Supervisor(run)
    watch.worker = WorkerProcess(run, identity(os.getpid()), gone(0))
    with EventWriter(run, segment=0) as writer:
        writer.write("failed", cause="exception", message=message, lines=[])
    again = watch._conclude(1)
    assert run.read_json()["message"].startswith(told)
    assert again is told.startswith("Rank")


def test_a_second_start_at_once_is_told_what_the_first_does(run):
    handle = claim(run, patience=0.0)
    try:
        with pytest.raises(
            RunBusy, match=f"being started or looked after already; `workbench watch {re.escape(str(run.path))}`"
        ):
            claim(run, patience=0.0)
    finally:
        os.close(handle)


def test_run_json_knows_the_worker_before_anything_else_is_done(run):
    """A supervisor that is killed in between would leave a worker that nobody can adopt."""
    supervisor, known = Supervisor(run), []
    supervisor.peers.begin = lambda worker: known.append(run.worker() == worker.who)
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        supervisor._begun(child, "5e" * 16, Choice(("cpu",), 1), 0)
    finally:
        child.communicate()
    assert known == [True]


def test_a_run_that_is_being_ended_is_not_running_again_once_it_has_loaded(run):
    supervisor = Supervisor(run)
    run.update_json(state="stopping")
    supervisor.requests.overdue = Request("x", "stop", "me", 0.0)
    with EventWriter(run, segment=0) as writer:
        writer.write("started", max_steps=4)
    supervisor._read_events()
    assert run.state == "stopping"


def test_the_first_node_speaks_while_it_waits_to_start_again(run, monkeypatch):
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.05)
    supervisor = Supervisor(run)
    supervisor.peers.node = FirstNode(run, Rendezvous(2))
    supervisor.peers.close_round()
    before = nodes.read_node(run, 0)["beat"]
    monkeypatch.setattr(supervisor.restarts, "pause", lambda: 0.25)
    monkeypatch.setattr(supervisor, "start", lambda: None)
    assert supervisor._start_again()
    assert nodes.read_node(run, 0)["beat"] > before


def test_a_node_whose_folder_is_no_folder_any_more_goes_on(run, tmp_path):
    supervisor = Supervisor(run)
    supervisor.peers.node = FirstNode(run, Rendezvous(2))
    (run.path / nodes.FOLDER).rmdir()
    (run.path / nodes.FOLDER).symlink_to(tmp_path)
    supervisor.peers.beat()
    supervisor.peers.close_round()
    assert list(tmp_path.glob("*.json")) == []


def test_the_first_node_speaks_while_checkpoints_are_read_for_a_start_anew(run, monkeypatch):
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.0)
    run.config.write_text("run: {max_restarts: 1}\n")
    tmp = checkpoint.begin(run, 5)
    (tmp / "weights").write_bytes(bytes(5 << 20))
    checkpoint.commit(tmp, {})
    supervisor = Supervisor(run)
    supervisor.peers.node = FirstNode(run, Rendezvous(2))
    supervisor.peers.close_round()
    before = nodes.read_node(run, 0)["beat"]
    words = supervisor.restarts.restart_summary({"kind": "failed", "cause": "signal SIGKILL"})
    assert words == "It is started again from checkpoint-5."
    assert nodes.read_node(run, 0)["beat"] >= before + 5


def test_a_supervisor_in_another_container_of_this_machine_is_known_by_its_lock(run):
    me = identity()
    run.update_json(
        state="starting", host=me.host, boot_id=f"{me.boot.split()[0]} pid:[1]", supervisor_pid=1, supervisor_start=1,
        devices=["0"], folder=inside.identity(run),
    )  # fmt: skip
    handle = claim(run, patience=0.0)
    try:
        assert not launch.unattended(run)
        assert not queue.over(run)
        assert launch.devices_of_live(run.path.parent) == {run.id: ["0"]}
        assert queue.Turn(run)._in_use([(run, run.read_json())]) == ({"0"}, 0)
    finally:
        os.close(handle)
    with RunLock(run):  # its worker is left, which nobody here could adopt
        assert not launch.unattended(run)
    assert launch.unattended(run)
    assert queue.over(run)
    assert launch.devices_of_live(run.path.parent) == {}
