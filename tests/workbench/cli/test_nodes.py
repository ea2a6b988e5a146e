"""The first of several machines says what it waits for, and waits only where the others can find it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.errors import UsageError, WorkbenchError
from engine.run.process import host
from workbench.cli.train import command as train_command

CONFIG = (
    "version: 1\nmodel: {name: builtin/tiny, dtype: float32}\ndata: {train: [{path: builtin/dates}], max_length: 64}\n"
)


def train(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "two.yaml").write_text(CONFIG)
    argv = [sys.executable, "-P", "-m", "workbench", "train", "two.yaml", *words, "--runs", "runs"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(argv, cwd=place, env=outside, text=True, capture_output=True, timeout=200, check=False)


@pytest.mark.parametrize("words", [("--nodes", "2"), ("distributed.nodes=2",), ("--nodes", "2", "--rdzv-timeout", "5")])
def test_several_nodes_without_an_address_are_refused_before_anything_is_started(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = train(tmp_path, *words)
    assert ended.returncode == 2, ended.stderr
    assert (
        "--rdzv-endpoint: needed on 2 nodes, the address of the first machine as the others reach it." in ended.stderr
    )
    assert not list(tmp_path.glob("runs/*/run.json"))


def test_a_node_beyond_the_last_is_refused_before_it_waits(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(CONFIG)
    words = ["--nodes", "2", "--node-rank", "2", "--rdzv-endpoint", "127.0.0.1:1", "--runs", str(tmp_path / "runs")]
    ended = CliRunner().invoke(train_command, [str(tmp_path / "two.yaml"), *words])
    assert isinstance(ended.exception, UsageError)
    assert str(ended.exception) == "--node-rank: must be from 0 to 1 in a run on 2 nodes; got 2."


def test_the_first_node_says_what_is_to_be_typed_on_the_others(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ended = train(tmp_path, "--nodes", "2", "--rdzv-endpoint", address, "--rdzv-timeout", "2")
    assert ended.returncode == 1, ended.stderr
    there = f"--nodes 2 --node-rank 1 --rdzv-endpoint {address} --runs"
    assert f"waits up to 2 s for 1 more: there, give the same config with {there}" in ended.stderr
    assert (
        "1 of 2 nodes came, missing is --node-rank 1. Start it there too, with the same address and folder of runs, "
        "then resume the run." in ended.stderr
    )


@pytest.mark.parametrize(
    ("address", "rank", "interface", "sentence"),
    [
        ("198.51.100.7:29500", "0", "", "the first node cannot listen at 198.51.100.7:29500: Cannot assign"),
        ("127.0.0.1:29500", "0", "eth99", "GLOO_SOCKET_IFNAME: {host} has no network interface 'eth99'; it has lo"),
        ("127.0.0.1:29500", "1", "eth99", "GLOO_SOCKET_IFNAME: {host} has no network interface 'eth99'; it has lo"),
    ],
)
def test_a_machine_that_cannot_take_its_place_is_told_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, rank: str, interface: str, sentence: str
) -> None:
    (tmp_path / "two.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    place = ["--nodes", "2", "--node-rank", rank, "--rdzv-endpoint", address, "--rdzv-timeout", "2"]
    ended = CliRunner().invoke(train_command, ["two.yaml", *place, "--runs", "runs"])
    assert isinstance(ended.exception, WorkbenchError)
    assert sentence.format(host=host()) in ended.exception.message
    assert not list(tmp_path.glob("runs/*"))
