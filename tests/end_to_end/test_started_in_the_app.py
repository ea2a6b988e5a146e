"""The whole way on real rows: started in the terminal app, the terminal gone, the worker killed, taken up again, exact."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.run.store import RunFolder
from tests.caches import own_cache
from tests.end_to_end.conftest import Desk, Run
from tests.workbench.conftest import Terminal

STEPS = 40


@pytest.fixture
def terminal(desk: Desk, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """The app in a terminal of 80x24, on a config of gsm8k rows that lies beside a link to them."""
    for name in ("STATE", "CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(desk.root / name))
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(desk.root / "cache"))
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    (desk.root / "rows.jsonl").symlink_to(shared_data / "gsm8k/train_1000.jsonl")
    (desk.root / "quick.yaml").write_text(
        "version: 1\n"
        f"model: {{name: builtin/tiny, tokenizer: {shared_data / 'weights/tinystories-llama-260k'},\n"
        "  chat_template: chatml, dtype: float32}\n"
        "data: {train: [{path: rows.jsonl, rows: 200}], max_length: 192, excess_length: truncate}\n"
        f"optim: {{max_steps: {STEPS}, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}}\n"
        "run: {name: quick, save_steps: 4}\n"
    )
    monkeypatch.chdir(desk.root)
    found = Terminal([sys.executable, "-m", "workbench", "quick.yaml"], 80, 24, {"WORKBENCH_THEME": "dark"})
    yield found
    found.close()


def test_a_run_started_in_the_app_outlives_it_is_killed_and_ends_as_if_nothing_had_happened(
    terminal: Terminal, desk: Desk, until: Callable[..., None]
) -> None:
    terminal.wait_for(b"Launch", b"Review")
    terminal.type(b"7")
    terminal.wait_for(b"Start the run")
    terminal.type(b"\r")
    terminal.wait_for(b"quick-0001", timeout=60)
    os.close(terminal.fd)
    until(lambda: os.waitpid(terminal.pid, os.WNOHANG)[0] != 0, "the app ends with its terminal")
    terminal.status = 0
    killed = Run(RunFolder(desk.root / "runs" / "quick-0001"))
    until(lambda: any(event["state"] == "committed" for event in killed.of("checkpoint")), "a checkpoint is whole")
    worker = killed.folder.worker()
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: killed.folder.state == "failed", "the supervisor says that the run failed")
    assert "was ended by SIGKILL" in killed.folder.read_json()["message"]
    assert len(killed.curve("loss")) < STEPS
    resumed = desk.workbench("resume", "quick-0001")
    assert resumed.returncode == 0, resumed.stderr
    whole = desk.work(killed.folder.config.read_text("utf-8"))
    after = killed.curve("loss", 1)
    assert min(after) == killed.of("started")[1]["resumed_from_step"] + 1 > 1
    assert max(after) == STEPS
    for name in ("loss", "grad_norm", "learning_rate"):
        assert killed.curve(name, 1).items() <= whole.curve(name).items(), name
    assert killed.curve("loss") == whole.curve("loss")
    same_weights(whole.newest, killed.newest)


def same_weights(first: Path, second: Path) -> None:
    assert first.name == second.name == f"checkpoint-{STEPS}"
    ours, theirs = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)
