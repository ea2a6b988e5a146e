"""Training goes on from an adapter: as it was, held to what it was, and without its folder once a checkpoint is there."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.chat.models import load_sides
from engine.config.facts import Facts
from engine.config.files import as_mapping, as_yaml, parse
from engine.data.gather_facts import gather_facts
from engine.errors import ModelError
from engine.planning.auto import resolved
from engine.rules import read
from engine.run.store import RunFolder, create
from tests.engine.trainers.conftest import BASE, CONVERSATIONS, PAIRS, RATED, lines, resumed_from
from tests.engine.trainers.test_evaluate import logged, measured

STILL = 1e-9
"""A rate at which nothing moves that a float32 holds."""
REWARDED: dict[str, Any] = {
    "method.reward_funcs": ["regex:[aeiou]"], "method.num_generations": 4, "method.max_completion_length": 8,
    "method.beta": 0.1,
}  # fmt: skip


@pytest.fixture
def learned(train, source):
    """A run with an adapter of rank 4 that has learned something."""
    rows = [{"messages": [*row["prompt"], *row["chosen"]]} for row in PAIRS]
    settings = {"adapter.kind": "lora", "adapter.r": 4, "adapter.lora_alpha": 12, "optim.max_steps": 3}
    return train({**settings, "optim.learning_rate": 1e-2, "data.train": [{"path": source(rows)}]})


def launched(settings: dict[str, Any], place) -> RunFolder:
    """A run as a launch stores it: by all that is known of its files."""
    mapping: dict[str, Any] = {"version": 1}
    for path, value in (BASE | {"adapter.kind": "lora", "optim.gradient_accumulation_steps": 1} | settings).items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    facts = gather_facts(read(mapping).config, place)
    reading = read(mapping, facts)
    assert reading.ok, reading.errors
    return create(place / "runs", as_yaml(as_mapping(resolved(reading.config, facts))), {"method": "test"})


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def receipt(run: RunFolder, feature: str) -> str:
    return next(each for each in lines(run, "receipt")[0]["entries"] if each["feature"] == feature)["detail"]


def first(run: RunFolder) -> dict[str, Any]:
    return next(event for event in lines(run, "metrics") if "loss" in event)


def test_a_run_goes_on_from_the_newest_checkpoint_of_another_with_its_rank_and_alpha(train, learned, source, tmp_path):
    data = {"data.train": [{"path": source(PAIRS[:8])}], "method.kind": "simpo"}
    run = launched(
        {**data, "adapter.path": str(learned.path), "optim.learning_rate": STILL, "optim.max_steps": 1}, tmp_path
    )
    begun = learned.checkpoints / "checkpoint-3"
    stored = read(parse(run.read_config()).mapping).config.adapter
    assert (stored.path, stored.r, stored.lora_alpha) == (str(begun), 4, 12)
    train(folder=run)
    before, after = weights(begun), weights(run.checkpoints / "checkpoint-1")
    assert before.keys() == after.keys()
    assert max((before[name] - after[name]).abs().max().item() for name in before) < 1e-6
    largest = max(value.abs().max().item() for name, value in before.items() if "lora_B" in name)
    assert f"goes on from {len(before)} weights of" in receipt(run, "adapter")
    assert f"its second matrices up to {largest:.3g}" in receipt(run, "adapter")
    assert largest > 1e-3


@pytest.mark.parametrize(
    ("kind", "rows", "more"),
    [
        ("dpo", PAIRS, {"model.dtype": "bfloat16"}),
        ("grpo", [{"prompt": row["prompt"]} for row in PAIRS], REWARDED),
        pytest.param("dpo", PAIRS, {"method.reference": "precompute"}, marks=pytest.mark.slow),
        pytest.param("kto", RATED, {"kernels.fused_lora": True}, marks=pytest.mark.slow),
        pytest.param(
            "dpo",
            PAIRS,
            {"kernels.torch_compile": True, "memory.gradient_checkpointing": False},
            marks=pytest.mark.slow,
        ),
        pytest.param("ipo", PAIRS, {}, marks=pytest.mark.slow),
    ],
)
def test_it_is_held_to_the_adapter_as_it_began_and_resumes_to_the_bit_without_its_folder(
    train, learned, source, tmp_path, kind, rows, more
):
    base = {
        "method.kind": kind,
        **more,
        "data.train": [{"path": source(rows)}],
        "optim.max_steps": 3,
        "run.save_steps": 1,
    }
    run = launched({**base, "adapter.path": str(learned.path), "optim.per_device_train_batch_size": 4}, tmp_path)
    train(folder=run)
    if kind == "dpo":
        assert first(run)["loss"] == pytest.approx(math.log(2), abs=1e-6)
    if kind == "grpo":
        assert first(run)["kl"] == pytest.approx(0, abs=1e-7)
    else:
        assert first(run)["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert "reference: " + ("precomputed" if more.get("method.reference") else "the adapter as it began") in receipt(
        run, "loss"
    )
    begun = weights(learned.checkpoints / "checkpoint-3")
    kept = weights(run.checkpoints / "checkpoint-3" / "ref")
    assert all(kept[name].equal(begun[name].to(kept[name].dtype)) for name in begun)
    assert {value.dtype for value in kept.values()} == {torch.bfloat16 if "model.dtype" in more else torch.float32}
    assert ("rounded to bfloat16" in receipt(run, "adapter")) is ("model.dtype" in more)
    shutil.rmtree(learned.path)
    again = train(folder=resumed_from(run, 1, tmp_path / "again"))
    assert lines(again, "started", 1)[0]["resumed_from_step"] == 1
    told = lines(again, "receipt", 1)[0]["entries"]
    assert any("goes on from a checkpoint of this run" in str(each["detail"]) for each in told)
    ends = [weights(each.checkpoints / "checkpoint-3") for each in (run, again)]
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])
    losses = [[event["loss"] for event in lines(each, "metrics") if "loss" in event] for each in (run, again)]
    assert losses[0] == losses[1]


def test_with_the_adapter_off_as_reference_rewards_begin_away_from_nought(train, learned, source, tmp_path):
    base = {"method.kind": "dpo", "data.train": [{"path": source(PAIRS)}], "optim.max_steps": 1}
    run = launched({**base, "adapter.path": str(learned.path), "method.reference": "adapter_off"}, tmp_path)
    train(folder=run)
    assert abs(first(run)["rewards/chosen"]) > 1e-3
    assert "reference: adapter off" in receipt(run, "loss")
    assert not (run.checkpoints / "checkpoint-1" / "ref").exists()
    # The same of a run that was held to a copy before, which its checkpoint has.
    run = launched({**base, "adapter.path": str(learned.path), "optim.learning_rate": STILL}, tmp_path)
    train(folder=run)
    again = resumed_from(run, 1, tmp_path / "again")
    text = again.read_config().replace("max_steps: 1\n", "max_steps: 2\n")
    again.config.write_text(text.replace("reference: adapter_copy", "reference: adapter_off"))
    train(folder=again)
    told = [event["rewards/chosen"] for event in lines(again, "metrics") if "rewards/chosen" in event]
    assert (told[0], abs(told[1]) > 1e-3) == (0, True)
    assert not (again.checkpoints / "checkpoint-2" / "ref").exists()


def test_what_is_known_only_later_is_asked_again_at_launch(learned, tmp_path):
    """A config read before its files were looked at still becomes what the adapter's folder says."""
    mapping = {"model": {"name": "builtin/tiny"}, "adapter": {"kind": "lora", "path": str(learned.path)}}
    config = read(mapping, Facts()).config
    assert config.adapter.r == 16
    assert resolved(config, gather_facts(config, tmp_path)).adapter.r == 4


def test_it_is_measured_beside_the_adapter_that_it_began_as_and_by_the_reference_it_is_held_to(
    learned, train, source, tmp_path
) -> None:
    newest = str(learned.checkpoints / "checkpoint-3")
    settings = {
        "method.kind": "dpo", "adapter.path": newest, "data.train": [{"path": source(PAIRS)}], "data.val_set_size": 2,
        "run.eval_steps": 2, "run.save_steps": 2, "optim.max_steps": 2, "optim.learning_rate": 1e-2,
    }  # fmt: skip
    train(folder=(run := launched(settings, tmp_path)))
    found = measured(run, 2, base=True)
    assert found["metrics"] == logged(run, 2)
    assert found["base"]["eval_rewards/margins"] == pytest.approx(0, abs=1e-5), "it begins as what it is held to"
    assert found["begins_from"] == newest
    plain = {**settings, "method.kind": "sft", "data.train": [{"path": source(CONVERSATIONS)}]}
    train(folder=(still := launched({**plain, "optim.learning_rate": STILL}, tmp_path)))
    assert measured(still, 2, base=True)["base"] == pytest.approx(logged(still, 2), rel=1e-4)
    # What tasks are scored by: the base alone, as training began, and its end.
    asked = [{"checkpoint": None}, {"checkpoint": None, "as_begun": True}, {"checkpoint": 2}]
    sides = load_sides([{"title": "", "run": str(still.path), **each} for each in asked], lambda what: None)
    ids, scores = torch.arange(5, 15)[None], []
    for side in sides:
        with side.active() as model:
            scores.append(model(input_ids=ids).logits)
    torch.testing.assert_close(scores[1], scores[2], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores[0], scores[1], atol=1e-2)
    shutil.rmtree(newest)
    assert measured(still, 2)["metrics"] == logged(still, 2)
    with pytest.raises(ModelError, match=r"the adapter that training went on from is no longer in .*checkpoint-3"):
        measured(still, 2, base=True)
