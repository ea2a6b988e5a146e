"""The main job on real rows, lean: every method learns what unseen rows show, and beats a model that stands still.

The full form, with more steps and every pairing of rows and adapter, is `benchmarks/real_data.py`; the slow test runs it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.run import checkpoint
from tests.caches import own_cache
from tests.end_to_end.conftest import Desk, Run

SEEDS = (1, 2, 3)
LORA = {"adapter.kind": "lora", "adapter.r": 16, "adapter.lora_alpha": 32}
FULL = {"adapter.kind": "none"}
# A learning rate that moves no weight of float32: the control goes the very same way.
FROZEN = {"optim.learning_rate": 1e-30, "optim.max_steps": 2, "run.save_steps": 1, "run.eval_steps": 2}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One desk for all, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", own_cache(tmp_path_factory.mktemp("cache")))
        yield Desk(tmp_path_factory.mktemp("desk"))


def pace(steps: int, rate: float, batch: int = 4) -> dict[str, Any]:
    return {
        "model.dtype": "float32",
        "optim.learning_rate": rate,
        "optim.max_steps": steps,
        "optim.per_device_train_batch_size": batch,
        "optim.gradient_accumulation_steps": 1,
        "optim.warmup_steps": 0.1,
        "run.eval_steps": steps,
        "run.save_steps": steps - 1,
    }


def chat(train: Path, held_out: Path, rows: int = 16) -> dict[str, Any]:
    return {
        "data.train": [{"path": str(train)}],
        "data.eval": [{"path": str(held_out), "rows": rows}],
        "data.max_length": 192,
        "data.excess_length": "truncate",
    }


@pytest.fixture(scope="module")
def gsm8k(shared_data: Path) -> dict[str, Any]:
    return chat(shared_data / "gsm8k/train_1000.jsonl", shared_data / "gsm8k/test_200.jsonl")


@pytest.fixture(scope="module")
def alpaca(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last rows of Alpaca are held out."""
    rows = json.loads((shared_data / "llama-factory/alpaca_en_demo.json").read_text("utf-8"))
    folder = tmp_path_factory.mktemp("alpaca")
    for name, part in (("train", rows[:-32]), ("held_out", rows[-32:])):
        (folder / f"{name}.json").write_text(json.dumps(part), "utf-8")
    return chat(folder / "train.json", folder / "held_out.json")


@pytest.fixture(scope="module")
def pairs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A few pairs, read again and again: a model of this size can learn which is preferred, not why."""
    lines = (shared_data / "gsm8k/preference_pairs.jsonl").read_text("utf-8").splitlines(keepends=True)
    rows = tmp_path_factory.mktemp("pairs") / "rows.jsonl"
    rows.write_text("".join(lines[:16]), "utf-8")
    return chat(rows, rows) | {"method.kind": "dpo"}


@pytest.fixture(scope="module")
def shakespeare(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The first part of the text to learn from, the last to measure on."""
    text = (shared_data / "tinyshakespeare/input_first_900k.txt").read_text("utf-8")
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text(text[:100_000], "utf-8")
    (folder / "held_out.txt").write_text(text[-6_000:], "utf-8")
    return {
        "model.name": str(shared_data / "weights/tinystories-llama-260k"),
        "method.kind": "pretrain",
        "data.train": [{"path": str(folder / "train.txt")}],
        "data.eval": [{"path": str(folder / "held_out.txt")}],
        "data.max_length": 64,
        "data.excess_length": "split",
    }


CHATML = {"model.chat_template": "chatml"}


@pytest.fixture(scope="module")
def alpaca_run(desk: Desk, shared_data: Path, alpaca: dict[str, Any]) -> Run:
    """The tiny model around a real vocabulary, after some Alpaca rows: a pretrained start for LoRA and DPO."""
    vocabulary = str(shared_data / "weights/tinystories-llama-260k")
    settings = {"model.name": "builtin/tiny", "model.tokenizer": vocabulary, **CHATML}
    return desk.train_here({**settings, **alpaca, **FULL, **pace(30, 5e-3)})


def whole(run: Run, steps: int) -> None:
    """Nothing is missing: every step in the curve, a sound checkpoint of the last, the last word."""
    assert list(run.curve("loss")) == list(range(1, steps + 1))
    assert run.of("finished")[-1]["step"] == steps
    assert checkpoint.step_of(run.newest) == steps
    assert checkpoint.problem_with(run.newest, hashes=True) == ""


def beaten_by_more_than_the_spread(learned: list[float], frozen: float) -> None:
    assert max(learned) < 0.9 * frozen, (learned, frozen)
    assert frozen - max(learned) > max(learned) - min(learned), (learned, frozen)


def test_all_weights_learn_to_answer_like_alpaca(alpaca_run: Run) -> None:
    whole(alpaca_run, 30)
    assert "untrained" in str(alpaca_run.receipt("builtin/tiny")["effective"])
    assert alpaca_run.receipt("trainable parameters")["effective"] > 200_000
    # The log of 1,024: a model that guesses.
    assert alpaca_run.held_out < 0.9 * 6.93


def test_lora_teaches_a_story_teller_grade_school_maths(desk: Desk, shared_data: Path, gsm8k: dict[str, Any]) -> None:
    model = {"model.name": str(shared_data / "weights/tinystories-llama-260k"), **CHATML}
    # It knows 64 positions: the end of a row, which holds its answer, is kept.
    short = {"data.max_length": 64, "data.truncation_side": "left"}
    settings = {**model, **gsm8k, **short, **pace(24, 1e-2), **LORA}
    frozen, learned = desk.train_here({**settings, **FROZEN}), desk.train_here(settings)
    whole(learned, 24)
    assert learned.held_out < 0.9 * frozen.held_out
    moved, still = (load_file(run.newest / "adapter_model.safetensors") for run in (learned, frozen))
    assert all("lora_" in name for name in moved)
    assert learned.receipt("adapter")["count"] == len(moved) // 2
    # Adam's step is about the learning rate, so the control's adapter stays nothing at all.
    assert max(value.abs().max() for name, value in still.items() if "lora_B" in name) < 1e-28
    assert max(value.abs().max() for name, value in moved.items() if "lora_B" in name) > 1e-3


@pytest.mark.slow
def test_a_story_teller_goes_on_with_shakespeare_with_each_seed(desk: Desk, shakespeare: dict[str, Any]) -> None:
    settings = {**shakespeare, **pace(20, 1e-2, batch=16), **LORA}
    frozen = desk.train_here({**settings, **FROZEN}).held_out
    learned = [desk.train_here({**settings, "run.seed": seed}) for seed in SEEDS]
    for run in learned:
        whole(run, 20)
    beaten_by_more_than_the_spread([run.held_out for run in learned], frozen)
    everything = desk.train_here({**shakespeare, **pace(20, 3e-3, batch=16), **FULL})
    whole(everything, 20)
    assert everything.held_out < 0.9 * frozen


def test_dpo_prefers_right_solutions_to_wrong_ones(desk: Desk, alpaca_run: Run, pairs: dict[str, Any]) -> None:
    settings = {**pairs, **CHATML, **pace(16, 1e-2), **LORA, "model.name": str(alpaca_run.newest)}
    run = desk.train_here(settings)
    whole(run, 16)
    losses, margins = run.curve("loss"), run.curve("rewards/margins")
    # The model starts as its own reference: the loss is the log of 2 and no answer is preferred.
    assert losses[1] == pytest.approx(0.6931, abs=1e-3)
    assert statistics.mean(list(margins.values())[-4:]) > 0.3
    assert run.held_out < 0.9 * 0.6931


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_vocabulary_works_as_well(desk: Desk, shared_data: Path, alpaca: dict[str, Any]) -> None:
    other = {"model.name": "builtin/tiny", "model.tokenizer": str(shared_data / "tokenizers/phi-3-mini")}
    run = desk.train_here({**other, **alpaca, **FULL, **pace(20, 5e-3)})
    whole(run, 20)
    assert run.held_out < 0.9 * 10.37  # the log of 32,011


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_full_form_in_the_products_own_processes(shared_data: Path) -> None:
    bench = Path(__file__).parents[2] / "benchmarks/real_data.py"
    done = subprocess.run(
        [sys.executable, str(bench), "--check"],
        env={**os.environ, "WORKBENCH_TEST_DATA": str(shared_data)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
