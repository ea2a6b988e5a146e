"""A run on two nodes, which here are two agents of torchrun on one machine: it trains as one process, and survives them."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import Facts
from engine.rules import read
from engine.run import launch, member, nodes
from engine.run.from_config import launch_config
from engine.run.nodes import Rendezvous
from engine.run.process import host, identity_from, send
from engine.run.store import ENDED, RunFolder
from tests import warm

pytestmark = pytest.mark.slow
STEPS = 120  # a second and more is left when one is killed
PATIENCE = 170.0
SETTINGS: dict[str, Any] = {
    "model.name": "builtin/tiny",
    "model.dtype": "float32",
    "data.train": [{"path": "builtin/dates"}],
    "optim.max_steps": STEPS,
    "optim.per_device_train_batch_size": 2,
    "optim.gradient_accumulation_steps": 1,
    "run.save_steps": 20,
    "run.logging_steps": 1,
}


def free_address() -> str:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{trial.getsockname()[1]}"


def start(root: Path, several: int = 2, seconds: float = 120, **more: Any) -> RunFolder:
    settings = {**SETTINGS, "distributed.nodes": several, **{key.replace("__", "."): v for key, v in more.items()}}
    reading = read(nested(settings))
    assert not [found for found in reading.findings if found.severity == "error"], reading.findings
    meeting = Rendezvous(several, free_address(), "none", seconds)
    return launch_config(reading.config, Facts(), runs_dir=root, name="nodes", rendezvous=meeting)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        mapping.setdefault(section, {})[name] = value
    return mapping


def wait(what: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    return found


def ended(run: RunFolder) -> dict[str, Any]:
    wait(lambda: run.state in ENDED and not launch.at_work(run))
    return run.read_json()


def events(run: RunFolder, *kinds: str) -> list[dict[str, Any]]:
    lines = run.events.read_text().splitlines() if run.events.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


def saved(run: RunFolder) -> bool:
    return any(event["state"] == "committed" for event in events(run, "checkpoint"))


def losses(run: RunFolder) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "metrics") if "loss" in event}


def ranks(run: RunFolder) -> list[int]:
    """The pids of living ranks of the run, on whatever node."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            values = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            living = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if living and str(run.path).encode() in words and any(each.startswith(b"RANK=") for each in values):
            found.append(int(name))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    yield tmp_path_factory.mktemp("runs")
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if before is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = before


@pytest.fixture(scope="module")
def whole(root: Path) -> RunFolder:
    """A run of two nodes from its beginning to its end."""
    run = start(root)
    member.join(run, 1)
    assert ended(run)["state"] == "finished", run.log.read_text()
    return run


def test_two_nodes_train_as_one_process(whole: RunFolder, root: Path) -> None:
    alone = start(root, 1, optim__gradient_accumulation_steps=2)
    ended(alone)
    one, two = losses(alone), losses(whole)
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    assert two == pytest.approx(one, rel=1e-4)
    receipt = json.dumps(events(whole, "receipt"))
    assert "2 nodes" in receipt
    assert host() in receipt
    assert ranks(whole) == []


def test_an_agent_that_dies_ends_all_and_the_run_goes_on(whole: RunFolder, root: Path) -> None:
    run = start(root)
    member.join(run, 1)
    wait(lambda: saved(run))
    said = nodes.read_node(run, 1)
    agent = identity_from(said["worker"])
    assert agent is not None
    assert send(agent, signal.SIGKILL)
    told = ended(run)
    assert told["state"] == "failed"
    assert told["cause"] == "signal SIGKILL"
    assert f"rank 1 (node 1, {host()}" in told["message"], told["message"]
    wait(lambda: not ranks(run))
    launch.resume(run)
    member.join(run, 1)
    assert ended(run)["state"] == "finished"
    assert losses(run) == losses(whole)


def test_a_rank_that_dies_on_the_second_node_is_named(root: Path) -> None:
    run = start(root, run__max_restarts=1)
    member.join(run, 1)
    wait(lambda: saved(run))
    other = next(pid for pid in ranks(run) if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    os.kill(other, signal.SIGKILL)
    assert ended(run)["state"] == "finished"
    (restart,) = events(run, "restart")
    assert f"Rank 1 (node 1, {host()}, process {other}) was ended by SIGKILL." in restart["message"]


def test_a_node_that_vanishes_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(root, optim__max_steps=5000)
    member.join(run, 1)
    wait(lambda: saved(run))
    said = nodes.read_node(run, 1)
    mine = [identity_from(said), identity_from(said["worker"])]
    of_it = [pid for pid in ranks(run) if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    # Stopped, not ended: as where the power is gone, no connection is closed.
    for pid in [*(who.pid for who in mine if who is not None), *of_it]:
        os.kill(pid, signal.SIGSTOP)
    try:
        told = ended(run)
        assert told["cause"] == "node lost"
        assert told["message"].startswith(f"Node 1 ({host()}) with rank 1 has been silent for")
    finally:
        for pid in [*of_it, *(who.pid for who in mine if who is not None)]:
            os.kill(pid, signal.SIGCONT)
    wait(lambda: not ranks(run))


def test_nodes_that_do_not_come_or_fit(root: Path) -> None:
    """One run each, told before any process of training begins."""
    late = start(root, 3, seconds=3)
    member.join(late, 2)
    address = late.read_json()["rendezvous"]["endpoint"]
    said = ended(late)["message"]
    assert said.startswith(
        f"The rendezvous at {address} did not complete within 3 s: 2 of 3 nodes came, missing is --node-rank 1."
    )

    for about, words in (
        ({"versions": {**launch.versions(), "torch": "0.1"}, "processes": 1}, "(other) has torch 0.1, node 0"),
        ({"versions": launch.versions(), "processes": 2}, "(other) has 2 devices for the run, node 0"),
        ({"refused": "run.devices: 4 GPUs were asked for."}, "node 1 (other): run.devices: 4 GPUs were asked for."),
    ):
        run = start(root)
        played = nodes.Node(run, 1, 2)
        round_ = wait(lambda run=run: nodes.read_node(run, 0).get("round"))
        played.report(host="other", round=round_, **about)
        told = ended(run)
        assert told["state"] == "failed"
        assert words in told["message"], told["message"]
        assert not events(run, "phase")


def test_a_node_with_another_config_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    run = start(root)
    address = run.read_json()["rendezvous"]["endpoint"]
    (tmp_path / "other.yaml").write_text(json.dumps(nested({**SETTINGS, "optim.learning_rate": 0.5})))
    place = ("--nodes", "2", "--node-rank", "1", "--rdzv-endpoint", address, "--rdzv-timeout", "60")
    done = warm.command("train", "other.yaml", *place, "--runs", str(root), "--json", cwd=tmp_path)
    assert done.returncode == 1
    words = "its optim.learning_rate is 0.5, that of node 0 is "
    assert words in json.loads(done.stdout)["error"]["message"]
    assert f"node 1 ({host()}): {words}" in ended(run)["message"]
