"""Compiled layers whose experts are divided over two processes: pieces around the experts, and the curve of one plain process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines
from tests.engine.trainers.test_expert_parallel import ALONE, SHORT, TWO, Divided
from tests.engine.trainers.test_fsdp2 import curve
from tests.engine.trainers.test_fsdp2_compiled import Compiling
from tests.engine.trainers.test_fsdp2_mixtures import ON_EXPERTS, mixture
from tests.engine.trainers.two_ranks import run_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Divided]:
    root = tmp_path_factory.mktemp("divided-compiled")
    with Compiling(own_cache(root / "cache")) as two:
        yield Divided(root, two)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (CONVERSATIONS, {"memory.gradient_checkpointing": True}),
        (CONVERSATIONS, ON_EXPERTS),
        (PAIRS, {**ON_EXPERTS, "method.kind": "dpo", "memory.gradient_checkpointing": True}),
    ],
    ids=["all weights", "lora", "dpo with lora"],
)
def test_pieces_around_divided_experts_learn_what_one_plain_process_does(
    place: Divided, rows: Any, settings: dict[str, Any]
) -> None:
    given = {**SHORT, "data.train": place.rows(rows), "data.max_length": 64, "model.name": mixture(place, "qwen3_moe")}
    shared = place.two.train(run_folder(place.root / "runs", given | settings | TWO | {"kernels.torch_compile": True}))
    alone = place.two.train_alone(run_folder(place.root / "runs", given | settings | ALONE))
    entries = [entry for event in lines(shared, "receipt") for entry in event["entries"]]
    told = {entry["feature"]: entry for entry in entries}  # the last word of each
    assert told["expert parallelism"]["effective"] == 2
    assert told["torch.compile"]["effective"] == "inductor"
    assert "graphs" in told["torch.compile"]["detail"]
    for name in ("loss", "grad_norm", "experts/entropy"):
        assert curve(shared, name) == pytest.approx(curve(alone, name), rel=1e-4), name
