"""What `context_parallel.py` starts on cards that are not here is at least what the rules let train there."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.files import put
from engine.data.gather_facts import gather_facts
from engine.hardware import parse_machine
from engine.planning.estimate import estimate
from engine.rules import read
from engine.run import store
from tests.caches import own_cache

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_run_of_it_is_one_that_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    script = importlib.import_module("context_parallel")
    judged: list[str] = []
    told: dict[str, dict[str, int]] = {}

    def model(folder: Path, shape: str, layers: int) -> Path:
        kind = {**script.SHAPES[shape], "num_hidden_layers": layers}
        script.Qwen3Config(
            **kind, num_key_value_heads=8, head_dim=128, vocab_size=151_936, architectures=["Qwen3ForCausalLM"],
            tie_word_embeddings=shape == "0.6b", max_position_embeddings=1 << 20,
        ).save_pretrained(folder)  # fmt: skip
        script.AutoTokenizer.from_pretrained(script.tiny.folder()).save_pretrained(folder)
        return folder

    def start(trial: Any, root: Path) -> Any:
        mapping: dict[str, Any] = {"version": 1}
        for path, value in trial.settings.items():
            put(mapping, path, value)
        facts = gather_facts(read(mapping).config, root, parse_machine(f"{trial.cards.count(',') + 1}xH100-80GB"))
        errors = [finding for finding in read(mapping, facts).findings if finding.severity == "error"]
        assert not [each.message for each in errors if each.path != "model.name"], trial.name  # it has no weights here
        judged.append(trial.name)
        told[trial.name] = estimate(read(mapping, facts).config, facts).memory
        return trial

    numbers = {"losses": [1.0], "norms": [1.0], "held_out": [], "step_seconds": [1.0], "tokens": 1, "peak": 1,
               "receipt": {}, "seconds": 1.0}  # fmt: skip
    monkeypatch.setattr(script, "make_model", model)
    monkeypatch.setattr(script, "find_spec", lambda name: True)
    monkeypatch.setattr(script.Trial, "start", start)
    monkeypatch.setattr(script.Trial, "read", lambda trial, seconds: numbers)
    monkeypatch.setattr(script.Trial, "estimated", lambda trial: told[trial.name])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["context_parallel.py", "--parts", "equal", "sharded", "memory", "long"])
    assert script.main() == 0
    assert len(judged) == 4 + 8 + 3 + 4 + 12 + 2
    judged.clear()
    arms = ["--arms", *script.ARMS, "--cards", "4", "--tiled", "--warm", "4096"]
    monkeypatch.setattr(sys, "argv", ["context_parallel.py", "--parts", "long", *arms])
    assert script.main() == 0
    assert judged == ["long ddp", "long fsdp2", "long offloaded", "long one"]
    weights = [told[name]["weights"] for name in judged]
    assert weights[0] == weights[3] > weights[1] > weights[2], "what its runs hold is what their names say"


@pytest.mark.slow  # a run begins in a process that has imported nothing
def test_a_run_that_takes_too_long_is_ended_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command that started it may go; the run would go on and keep the cards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    script = importlib.import_module("context_parallel")
    settings = {"model.name": "builtin/tiny", "data.train": [{"path": "builtin/dates"}], "optim.max_steps": 100_000}
    trial = script.Trial("endless", settings, "").start(tmp_path)
    until = time.monotonic() + 400
    while not (runs := list(store.runs_in(tmp_path / "endless/runs"))) or runs[0].state != "running":
        assert time.monotonic() < until, (tmp_path / "endless/said").read_text()
        time.sleep(0.1)
    worker = runs[0].worker()
    assert trial.read(1.0) == {"failure": "not done in 1 s"}
    assert runs[0].state == "stopped"
    assert worker is not None
    while worker.alive:
        assert time.monotonic() < until + 30
        time.sleep(0.1)
