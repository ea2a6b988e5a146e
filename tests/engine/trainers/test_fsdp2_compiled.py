"""Compiled layers whose weights FSDP2 shares out between two processes: one graph, and the curve of one plain process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines
from tests.engine.trainers.test_fsdp2 import ALONE, HALF, LORA, SHORT, Place, curve
from tests.engine.trainers.two_ranks import TwoRanks, run_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++"),
]
COMPILED = {"kernels.torch_compile": True, "data.max_length": 64}


class Compiling(TwoRanks):
    """Both ranks and the run alone compile C++ on what processors there are."""

    PATIENCE = 900


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("fsdp2-compiled")
    with Compiling(own_cache(root / "cache")) as two:
        yield Place(root, two)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (CONVERSATIONS, {"memory.gradient_checkpointing": True}),
        (CONVERSATIONS, LORA | {"memory.gradient_checkpointing": False}),
        (PAIRS, LORA | {"method.kind": "dpo", "memory.gradient_checkpointing": True}),
    ],
    ids=["all weights", "lora", "dpo with lora"],
)
def test_compiled_shares_learn_what_one_plain_process_does(place: Place, rows: Any, settings: Any) -> None:
    given = {**SHORT, "data.train": place.rows(rows), **settings}
    shared = place.two.train(run_folder(place.root / "runs", given | HALF | COMPILED))
    alone = place.two.train_alone(run_folder(place.root / "runs", given | ALONE | {"data.max_length": 64}))
    (entry,) = [
        entry
        for event in lines(shared, "receipt")
        for entry in event["entries"]
        if entry["feature"] == "torch.compile" and "first batch" in entry.get("detail", "")
    ]
    assert "0 breaks in them" in entry["detail"]
    assert curve(shared) == pytest.approx(curve(alone), rel=1e-4)
