"""The main job on real rows: every method learns something that unseen rows show, and a killed run loses nothing."""

from __future__ import annotations

import os
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.run.store import RunFolder

SMALL = {
    "model.dtype": "float32",
    "adapter.kind": "none",
    "run.save_steps": 1000,
    "optim.gradient_accumulation_steps": 1,
}
SEEDS = (1, 2, 3)


def gsm8k(data: Path, rows: int = 64) -> dict[str, Any]:
    return {
        "data.train": [{"path": str(data / "gsm8k/train_1000.jsonl")}],
        "data.eval": [{"path": str(data / "gsm8k/test_200.jsonl"), "rows": rows}],
        "data.max_length": 384,
        "data.excess_length": "drop",
    }


def alpaca(data: Path) -> dict[str, Any]:
    return {
        "data.train": [{"path": str(data / "llama-factory/alpaca_en_demo.json")}],
        "data.max_length": 256,
        "data.excess_length": "truncate",
    }


def tiny(data: Path, tokenizer: str = "minimind") -> dict[str, Any]:
    return {**SMALL, "model.name": "builtin/tiny", "model.tokenizer": str(data / "tokenizers" / tokenizer)}


def fast(steps: int, rate: float = 5e-3, batch: int = 8) -> dict[str, Any]:
    return {
        "optim.learning_rate": rate,
        "optim.max_steps": steps,
        "optim.per_device_train_batch_size": batch,
        "optim.warmup_steps": 0.1,
        "run.eval_steps": steps,
    }


def falls(curve: dict[int, float]) -> float:
    """The share by which the mean of the last tenth lies under that of the first."""
    values = list(curve.values())
    part = max(3, len(values) // 10)
    return 1 - statistics.mean(values[-part:]) / statistics.mean(values[:part])


@pytest.fixture(scope="module")
def chat_model(shared_desk, shared_data: Path) -> str:
    """The tiny model with minimind's vocabulary after it has read the Alpaca rows: a pretrained start for LoRA and DPO."""
    run = shared_desk.train({**tiny(shared_data), **alpaca(shared_data), **fast(150)})
    assert falls(run.curve("loss")) > 0.1
    built = run.receipt("builtin/tiny")
    assert "untrained" in str(built["effective"])
    return str(run.newest)


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> dict[str, Any]:
    """The first part of the text to learn from, the last to measure on."""
    text = (shared_data / "tinyshakespeare/input_first_900k.txt").read_text("utf-8")
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text(text[:400_000], "utf-8")
    (folder / "held_out.txt").write_text(text[-20_000:], "utf-8")
    return {
        "model.name": str(shared_data / "weights/tinystories-llama-260k"),
        "model.dtype": "float32",
        "method.kind": "pretrain",
        "data.train": [{"path": str(folder / "train.txt")}],
        "data.eval": [{"path": str(folder / "held_out.txt")}],
        "data.max_length": 64,
        "data.excess_length": "split",
        "optim.gradient_accumulation_steps": 1,
        "run.save_steps": 1000,
    }


def test_a_killed_run_on_real_rows_goes_on_and_ends_as_if_nothing_had_happened(desk, shared_data: Path, until) -> None:
    settings = {**tiny(shared_data), **gsm8k(shared_data, 8), **fast(8, batch=2), "run.save_steps": 4}
    whole = desk.train({**settings, "run.name": "whole"})
    begun = desk.workbench("train", desk.config({**settings, "run.name": "killed"}), "--detach")
    assert begun.returncode == 0, begun.stderr
    folder = RunFolder(desk.root / "runs" / "killed-0001")
    killed = type(whole)(folder)
    until(lambda: any(e["state"] == "committed" for e in killed.of("checkpoint")), "a checkpoint is whole")
    worker = folder.worker()
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: folder.state == "failed", "the supervisor says that the run failed", 20)
    assert killed.curve("loss").keys() != whole.curve("loss").keys()
    resumed = desk.workbench("resume", "killed-0001")
    assert resumed.returncode == 0, resumed.stderr
    after = killed.curve("loss", 1)
    assert after
    assert min(after) == killed.of("started")[1]["resumed_from_step"] + 1
    assert after == {step: loss for step, loss in whole.curve("loss").items() if step in after}
    assert killed.held_out == whole.held_out
    same_weights(whole.newest, killed.newest)


def same_weights(first: Path, second: Path) -> None:
    assert first.name == second.name
    files = [path.name for path in first.glob("*.safetensors")]
    assert files
    for name in files:
        ours, theirs = load_file(first / name), load_file(second / name)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_full_weights_learn_grade_school_maths(desk, shared_data: Path) -> None:
    run = desk.train({**tiny(shared_data), **gsm8k(shared_data), **fast(150), "run.eval_steps": 50})
    held_out = list(run.curve("eval_loss").values())
    assert held_out == sorted(held_out, reverse=True)
    # An untrained model guesses: the log of 6,400 is 8.76.
    assert held_out[-1] < 0.9 * 8.76
    assert run.receipt("trainable parameters")["effective"] > 400_000
    assert run.of("finished")[-1]["step"] == 150


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_lora_on_a_pretrained_model_learns_what_a_frozen_one_does_not(desk, chat_model: str, shared_data: Path) -> None:
    settings = {
        **SMALL,
        **gsm8k(shared_data),
        **fast(150, rate=1e-2),
        "model.name": chat_model,
        "adapter.kind": "lora",
        "adapter.r": 16,
        "adapter.lora_alpha": 32,
    }
    learned = [desk.train({**settings, "run.seed": seed}) for seed in SEEDS]
    frozen = desk.train({**settings, "optim.learning_rate": 1e-30})
    beaten_by_more_than_the_spread([run.held_out for run in learned], frozen.held_out)
    weights = load_file(learned[0].newest / "adapter_model.safetensors")
    assert all("lora_" in name for name in weights)
    assert learned[0].receipt("adapter")["count"] == len(weights) // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lora_turns_a_story_teller_to_shakespeare(desk, shakespeare: dict[str, Any]) -> None:
    settings = {**shakespeare, **fast(200, rate=1e-2, batch=16), "adapter.kind": "lora", "adapter.r": 16}
    learned = [desk.train({**settings, "run.seed": seed}).held_out for seed in SEEDS]
    frozen = desk.train({**settings, "optim.learning_rate": 1e-30}).held_out
    beaten_by_more_than_the_spread(learned, frozen)


def beaten_by_more_than_the_spread(learned: list[float], frozen: float) -> None:
    spread = max(learned) - min(learned)
    assert max(learned) < 0.9 * frozen, (learned, frozen)
    assert frozen - max(learned) > spread, (learned, frozen)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pretraining_goes_on_with_all_weights_on_plain_text(desk, shakespeare: dict[str, Any]) -> None:
    settings = {**shakespeare, **fast(300, rate=2e-3, batch=16), "adapter.kind": "none", "run.eval_steps": 100}
    run = desk.train({**settings, "run.prompts": ["ROMEO:"], "run.prompts_steps": 300, "run.max_new_tokens": 24})
    held_out = list(run.curve("eval_loss").values())
    assert held_out == sorted(held_out, reverse=True)
    assert falls(run.curve("loss")) > 0.1
    first, last = (event["completion"] for event in run.of("sample"))
    assert first != last
    assert "Once upon a time" not in last


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_dpo_prefers_right_solutions_to_wrong_ones(desk, chat_model: str, shared_data: Path, adapter: str) -> None:
    run = desk.train(
        {
            **SMALL,
            **fast(120, rate=2e-3 if adapter == "none" else 1e-2, batch=4),
            "model.name": chat_model,
            "adapter.kind": adapter,
            "method.kind": "dpo",
            "data.train": [{"path": str(shared_data / "gsm8k/preference_pairs.jsonl")}],
            "data.max_length": 384,
            "data.excess_length": "drop",
        }
    )
    losses = list(run.curve("loss").values())
    # The model starts as its own reference: the loss is the log of 2 and no answer is preferred.
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert falls(run.curve("loss")) > 0.1
    accuracies = list(run.curve("rewards/accuracies").values())
    assert statistics.mean(accuracies[-20:]) > 0.65


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_vocabulary_works_as_well(desk, shared_data: Path) -> None:
    run = desk.train({**tiny(shared_data, "phi-3-mini"), **alpaca(shared_data), **fast(30, batch=4)})
    assert falls(run.curve("loss")) > 0.1
