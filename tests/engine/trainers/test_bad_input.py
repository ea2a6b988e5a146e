"""What bad input gets: one sentence with the place and the way out, before the first step, and nothing left behind."""

from __future__ import annotations

import pytest

from engine.config.facts import Facts
from engine.config.files import put
from engine.hardware import GiB, Machine
from engine.rules import read
from tests.engine.trainers.conftest import PAIRS, RATED, STEPS, lines

CPU = Machine(cpu_count=2, memory_bytes=16 * GiB, disk_free_bytes=100 * GiB, name="cpu")
SAME = [{**row, "rejected": row["chosen"]} for row in PAIRS]
GOOD = [{**row, "label": True} for row in RATED]
RIGHT = [{**row, "labels": [True, True]} for row in STEPS]


@pytest.mark.parametrize(
    ("method", "rows", "words"),
    [
        (
            "dpo",
            SAME,
            "data.train: nothing is left to train on: 48 of 48 rows have the same chosen and rejected answer",
        ),
        (
            "simpo",
            SAME,
            "data.train: nothing is left to train on: 48 of 48 rows have the same chosen and rejected answer",
        ),
        ("reward", SAME, "data.train: nothing is left to train on: 48 of 48 rows have the same chosen and rejected"),
        ("kto", GOOD, "data.train: every row is labelled true, and good answers are only told from bad ones"),
        ("prm", RIGHT, "data.train: every step is labelled true, and right steps are only told from wrong ones"),
    ],
)
def test_rows_that_teach_nothing_end_the_run_before_it_begins(train, source, method, rows, words):
    run = train({"method.kind": method, "data.train": [{"path": source(rows)}]}, code=1)
    (failed,) = lines(run, "failed")
    assert failed["cause"] == "error"
    assert failed["message"].startswith(words)
    assert "Bring other rows" in failed["message"] or "Add rows of the other sort" in failed["message"]
    assert not lines(run, "started")
    assert not list(run.checkpoints.glob("checkpoint-*"))


def test_a_pair_with_identical_sides_is_left_out_and_told_before_training(train, source):
    run = train({"method.kind": "dpo", "data.train": [{"path": source([SAME[0], *PAIRS[1:]])}], "optim.max_steps": 1})
    (said,) = [event["message"] for event in lines(run, "finding")]
    assert said.startswith("1 of 48 rows have the same chosen and rejected answer and are left out; the first: ")
    assert said.endswith(":1")
    rows = next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "rows")
    assert (rows["effective"], rows["detail"]) == (47, said)


@pytest.mark.parametrize(("method", "needed"), [("grpo", 4), ("ppo", 16)])
def test_prompts_that_fill_no_sampling_once_long_ones_are_left_out_end_the_run(train, source, method, needed):
    """Which a rule cannot know before the rows are prepared; the run would be called finished, with no step."""
    short, long = "What comes after 7?", "What comes after 7, and what after that? " * 20
    rows = source([{"prompt": text} for text in [short, short, short, *[long] * 20]])
    settings = {"method.kind": method, "method.reward_funcs": ["length:4"], "optim.per_device_train_batch_size": 8}
    settings |= {"method.num_generations": 4} if method == "grpo" else {}
    run = train({**settings, "data.train": [{"path": rows}], "data.excess_length": "drop"}, code=1)
    (failed,) = lines(run, "failed")
    words = (
        f"data.train: there must be at least the {needed} prompts that are sampled together; got 3 after preparation"
    )
    assert failed["message"].startswith(words)
    assert "optim.gradient_accumulation_steps" in failed["message"]
    assert not lines(run, "started")
    assert not list(run.checkpoints.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("settings", "machine", "place", "way_out"),
    [
        ({"method.kind": "grpo", "method.num_generations": 1}, None, "method.num_generations", "8"),
        ({"kernels.quantization_aware": "fp8"}, CPU, "kernels.quantization_aware", "GPU"),
        # A reference is always the model itself, so it cannot have another vocabulary.
        ({"method.kind": "dpo", "method.reference": "some/model"}, None, "method.reference", "adapter_off"),
        ({"method.kind": "ppo", "method.reference": "some/model"}, None, "method.reference", "adapter_off"),
    ],
)
def test_what_a_config_shows_is_refused_before_a_run_is_made(settings, machine, place, way_out):
    mapping = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "rows.jsonl"}]}}
    for name, value in {"method.reward_funcs": ["exact_match"], **settings}.items():
        if name != "method.reward_funcs" or settings.get("method.kind") in ("grpo", "ppo"):
            put(mapping, name, value)
    found = [each for each in read(mapping, Facts(machine=machine)).findings if each.severity == "error"]
    assert [each.path for each in found if each.path == place] == [place]
    (finding,) = (each for each in found if each.path == place)
    assert finding.message.startswith(f"{place}: ")
    assert way_out in finding.message or (finding.fix is not None and way_out in str(finding.fix.set))
