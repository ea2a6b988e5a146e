"""A stream trains on every row as often as its epochs say, and goes on behind the very last one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.config.facts import Facts
from engine.rules import read
from engine.run import launch
from engine.run.batches import rows_of
from engine.run.from_config import launch_config
from engine.run.store import ENDED
from engine.trainers.stream_loader import Dealt
from tests.engine.trainers.conftest import BASE, CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS, lines, resumed_from
from tests.engine.trainers.test_grpo import GRPO

LORA = {"adapter.kind": "lora", "adapter.r": 4}
DROPOUT = {**LORA, "adapter.lora_dropout": 0.1}
STREAM = {"data.streaming": True}


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a few rows, so that a small source has many."""
    monkeypatch.setattr("engine.data.streaming.cuts.BYTES", 900)
    monkeypatch.setattr("engine.data.streaming.cuts.ROWS", 7)


def seen(run: Any) -> list[int]:
    """The rows of each step's batches, in the order of training."""
    steps = [event["step"] for event in lines(run, "metrics")]
    return [row for step in range(1, max(steps) + 1) for row in rows_of(run, step) or []]


def curve(run: Any, segment: int, after: int) -> dict[int, list[Any]]:
    timeless = ("loss", "grad_norm", "learning_rate", "tokens", "trained_tokens", "epoch", "num_tokens")
    return {
        event["step"]: [event.get(name) for name in timeless]
        for event in lines(run, "metrics", segment)
        if event["step"] > after
    }


def same_weights(first: Any, second: Any, step: int) -> bool:
    for name in ("model.safetensors", "adapter_model.safetensors"):
        places = [run.checkpoints / f"checkpoint-{step}" / name for run in (first, second)]
        if places[0].is_file():
            ours, theirs = map(load_file, places)
            return ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)
    raise AssertionError("no weights")


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        pytest.param({}, CONVERSATIONS, id="sft", marks=pytest.mark.slow),
        pytest.param(DROPOUT, CONVERSATIONS, id="sft, LoRA with dropout", marks=pytest.mark.slow),
        pytest.param(
            {**DROPOUT, "data.dataloader_num_workers": 2},
            CONVERSATIONS,
            id="dropout beside processes that make batches",
        ),
    ],
)
def test_a_resumed_stream_equals_one_that_never_stopped(train, source, tmp_path, settings, rows):
    # An epoch has six steps: what comes after step 4 is in two of them.
    whole = train({**STREAM, **settings, "optim.max_steps": 7, "data.train": [{"path": source(rows)}]})
    again = train(folder=resumed_from(whole, 4, tmp_path / "again"))
    assert lines(again, "started", 1)[0]["resumed_from_step"] == 4
    assert sorted(curve(whole, 0, 4)) == [5, 6, 7]
    assert curve(again, 1, 4) == curve(whole, 0, 4)
    assert same_weights(whole, again, 7)


def test_two_epochs_of_a_stream_see_every_row_exactly_twice(train, source):
    settings = {"optim.max_steps": None, "optim.num_train_epochs": 2}
    run = train({**STREAM, **settings, "data.train": [{"path": source(CONVERSATIONS[:45])}]})
    counted = Counter(seen(run))
    assert set(counted.values()) == {2}
    assert len(counted) == 45
    assert lines(run, "finished")[0]["step"] == 12
    assert lines(run, "metrics")[-1]["epoch"] == 2


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        pytest.param({"data.shuffle": False}, CONVERSATIONS, id="in the order of the file", marks=pytest.mark.slow),
        pytest.param(
            {"method.kind": "pretrain", "data.packing": True, "data.packing_cross_doc_attn_mask": True},
            [{"text": f"{number} is followed by {number + 1}, and that by {number + 2}."} for number in range(99)],
            id="packs kept apart",
        ),
        pytest.param({"method.kind": "dpo", **LORA}, PAIRS, id="dpo", marks=pytest.mark.slow),
        pytest.param({"method.kind": "ipo"}, PAIRS, id="ipo", marks=pytest.mark.slow),
        pytest.param({"method.kind": "simpo"}, PAIRS, id="simpo", marks=pytest.mark.slow),
        pytest.param({"method.kind": "orpo"}, PAIRS, id="orpo", marks=pytest.mark.slow),
        pytest.param({"method.kind": "kto", **LORA}, RATED, id="kto", marks=pytest.mark.slow),
        pytest.param({"method.kind": "kto", **LORA}, PAIRS, id="kto of pairs", marks=pytest.mark.slow),
        pytest.param({"method.kind": "reward", **LORA}, PAIRS, id="reward", marks=pytest.mark.slow),
        pytest.param({"method.kind": "prm"}, STEPS, id="prm", marks=pytest.mark.slow),
        pytest.param({"method.kind": "embedding"}, TEXTS, id="embedding", marks=pytest.mark.slow),
        pytest.param({"method.kind": "distill"}, TAUGHT, id="distill", marks=pytest.mark.slow),
        pytest.param(
            {**GRPO, "method.num_iterations": 2, "optim.per_device_train_batch_size": 4},
            CONVERSATIONS,
            id="grpo, in the middle of what was sampled",
        ),
        pytest.param({**GRPO, "method.kind": "ppo", **LORA}, CONVERSATIONS, id="ppo", marks=pytest.mark.slow),
    ],
)
def test_every_method_goes_on_with_its_stream(train, source, tmp_path, settings, rows):
    steps = {"optim.max_steps": 5, "run.save_steps": 3}
    whole = train({**STREAM, **settings, **steps, "data.train": [{"path": source(rows)}]})
    assert len(seen(whole)) >= 5
    again = train(folder=resumed_from(whole, 3, tmp_path / "again"))
    assert sorted(curve(whole, 0, 3)) == [4, 5]
    assert curve(again, 1, 3) == curve(whole, 0, 3)
    assert same_weights(whole, again, 5)


def test_pairs_of_streamed_rankings_are_learned_and_resumed(train, source, tmp_path):
    rows = [
        {"prompt": f"What is {number}?", "output": [f"It is {number}{end}" for end in ("!", ".", "?", "")]}
        for number in range(9)
    ]
    entry = {"path": source(rows), "format": "ranking", "ranking_pairs": "all"}
    steps = {"optim.max_steps": 5, "run.save_steps": 3, "optim.per_device_train_batch_size": 4}
    once = {"optim.gradient_accumulation_steps": 1, "method.kind": "dpo", **LORA}
    whole = train({**STREAM, **once, **steps, "data.train": [entry]})
    assert max(Counter(seen(whole)).values()) > 1  # pairs of one ranking
    again = train(folder=resumed_from(whole, 3, tmp_path / "again"))
    assert curve(again, 1, 3) == curve(whole, 0, 3)
    assert same_weights(whole, again, 5)


def test_an_epoch_of_streamed_pairs_has_two_rows_of_each_for_kto(train, source):
    settings = {"method.kind": "kto", **LORA, "optim.max_steps": None, "optim.num_train_epochs": 1}
    run = train({**STREAM, **settings, "data.train": [{"path": source(PAIRS)}]})
    counted = Counter(seen(run))
    assert set(counted.values()) == {2}
    assert lines(run, "metrics")[-1]["epoch"] == 1


def test_a_resume_may_begin_its_epoch_anew(train, source, tmp_path):
    settings = {**STREAM, "data.ignore_data_skip": True, "optim.max_steps": 5, "run.save_steps": 3}
    whole = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}]})
    again = train(folder=resumed_from(whole, 3, tmp_path / "again"))
    steps = [rows_of(again, step) for step in (4, 5)]
    assert steps == [rows_of(whole, step) for step in (1, 2)]


def test_what_is_left_out_of_a_stream_is_told_with_its_places(train, source):
    path = source(CONVERSATIONS[:45])
    rows = Path(path).read_text().splitlines()
    rows[41] = '{"messages": '
    Path(path).write_text("\n".join(rows))
    settings = {"data.on_bad_row": "skip", "optim.max_steps": None, "optim.num_train_epochs": 1}
    run = train({**STREAM, **settings, "data.train": [{"path": path}]})
    told = [event["message"] for event in lines(run, "finding")]
    assert any("1 of 45 rows cannot be read and are left out: " in each and f"{path}:42:" in each for each in told)
    assert len(seen(run)) == 44
    assert lines(run, "finished")[0]["step"] == 6
    entry = next(each for each in lines(run, "receipt")[0]["entries"] if each["feature"] == "rows")
    assert entry["effective"] == "streamed"


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rows", [12, 7, 3, 2])
def test_processes_take_different_rows_of_a_step(ranks, rows):
    given = [{"row": number} for number in range(min(rows, 4 * ranks))]
    parts = [Dealt(4, ranks, rank).mine(given) for rank in range(ranks)]
    assert all(parts)
    if len(given) >= ranks:
        assert [row for part in parts for row in part] == given


def launched(folder: Path, settings: dict[str, Any]) -> Any:
    """A run in processes of its own, on a folder of shards."""
    shards = folder / "shards"
    if not shards.is_dir():
        shards.mkdir()
        for number in range(8):
            rows = CONVERSATIONS[number * 6 : number * 6 + 6]
            (shards / f"{number}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    mapping: dict[str, Any] = {"version": 1}
    for path, value in {**BASE, **STREAM, "data.train": [{"path": str(shards)}], **settings}.items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    return launch_config(read(mapping).config, Facts(), runs_dir=folder / "runs")


def wait(run: Any, until: Any) -> None:
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < 280, run.log.read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_that_is_killed_anywhere_ends_with_the_same_weights(tmp_path, monkeypatch, ranks):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {"optim.max_steps": 40, "run.save_steps": 1, "run.devices": ranks, **DROPOUT}
    whole = launched(tmp_path, settings)
    wait(whole, lambda: whole.state in ENDED)
    again = launched(tmp_path, settings)
    draw = random.Random(ranks)
    for _ in range(2):
        most = draw.randrange(2, 30)
        wait(
            again,
            lambda most=most: any(event["step"] >= most for event in lines(again, "metrics")) or again.state in ENDED,
        )
        if again.state not in ENDED:
            os.kill(again.read_json()["worker_pid"], signal.SIGKILL)
            wait(again, lambda: again.state in ENDED)
            launch.resume(again)
    wait(again, lambda: again.state in ENDED)
    for run in (whole, again):
        assert run.state == "finished", run.log.read_text()[-3000:] + str(lines(run, "failed"))
    assert same_weights(whole, again, 40)
