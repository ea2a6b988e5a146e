"""Models that see under FSDP2, the parts that see frozen: two processes take the steps of one, rows without images among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.caches import own_cache
from tests.engine.trainers.test_fsdp2 import ALONE, LORA, Pair, Place, alike, curve, strategy
from tests.engine.trainers.two_ranks import TwoRanks

FROZEN = {"model.name": "builtin/tiny-vl", "model.train_vision": "none", "data.shuffle": False}
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("images")
    for name, colour in COLOURS.items():
        Image.new("RGB", (32, 32), colour).save(root / f"{name}.png")
    with TwoRanks(own_cache(root / "cache")) as two:
        yield Place(root, two)


def asked(question: str, answer: str, *images: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [*images]}


SEEN = [asked("<image>Which colour?", name, f"{name}.png") for name in COLOURS]
READ = [asked(f"What comes after {number}?", str(number + 1)) for number in range(2)]
ROWS = (SEEN + READ) * 8
"""In order, so that the second process never has an image."""


@pytest.fixture(scope="module")
def full(place: Place) -> Pair:
    return place.both(ROWS, FROZEN)


def test_the_language_model_learns_what_one_process_would(full: Pair) -> None:
    entry = strategy(full.shared)
    assert (entry["effective"], entry["count"]) == ("fsdp2", 29)
    assert entry["detail"] == (
        "of 67 weights are shares (DTensor); the first process holds 193,376 of 266,048 numbers; the 38 of the parts that "
        "see stay whole"
    )
    alike(*full)


def test_its_checkpoints_go_on(place: Place, full: Pair) -> None:
    same = place.two.train(place.again(full.shared))
    assert curve(same, segment=1) == {step: loss for step, loss in curve(full.shared).items() if step > 2}
    one = {**ALONE, "run.devices": 1, "distributed.strategy": "auto"}
    alike(place.two.train_alone(place.again(full.shared, **one)), full.alone)


@pytest.mark.slow
def test_adapters_learn_what_one_process_would(place: Place) -> None:
    pair = place.both(ROWS, {**FROZEN, **LORA, "memory.gradient_checkpointing": True})
    assert strategy(pair.shared)["count"] == 71
    alike(*pair)
