"""Hybrid sharding: two replicas of two shares each take the steps of one process, and their checkpoints go on anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors import safe_open

from engine.model_files import SHARES
from engine.run import checkpoint
from engine.run.store import RunFolder
from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines
from tests.engine.trainers.test_fsdp2 import ALONE, LORA, Place, alike, curve, strategy, weights
from tests.engine.trainers.test_fsdp2_mixtures import ON_EXPERTS, mixture, receipt
from tests.engine.trainers.two_ranks import FourRanks, TwoRanks, run_folder

pytestmark = pytest.mark.slow  # five processes begin
FOUR = {"run.devices": 4, "distributed.strategy": "fsdp2", "optim.per_device_train_batch_size": 1}
TWO_BY_TWO = {**FOUR, "distributed.dp_replicate_size": 2, "distributed.dp_shard_size": 2}
SHORT = {"optim.max_steps": 4, "run.save_steps": 2, "optim.gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("hsdp")
    with FourRanks(own_cache(root / "cache"), "tests.engine.trainers.test_fsdp2_mixtures:kernels_anywhere") as four:
        yield Place(root, four)


@pytest.fixture(scope="module")
def alone(place: Place) -> RunFolder:
    given = SHORT | ALONE | {"data.train": place.rows(CONVERSATIONS)}
    return place.two.train_alone(run_folder(place.root / "runs", given))


@pytest.fixture(scope="module")
def hybrid(place: Place) -> RunFolder:
    given = SHORT | TWO_BY_TWO | {"data.train": place.rows(CONVERSATIONS)}
    return place.two.train(run_folder(place.root / "runs", given))


def test_two_replicas_of_two_shares_learn_what_one_process_would(hybrid: RunFolder, alone: RunFolder) -> None:
    entry = strategy(hybrid)
    assert (entry["requested"], entry["effective"], entry["count"]) == ("fsdp2", "fsdp2", 46)
    assert entry["detail"] == (
        "of 46 weights are shares (DTensor); the first process holds 98,656 of 197,312 numbers; 2 replicas, each on 2 processes"
    )
    alike(hybrid, alone)


def test_each_number_is_written_once(hybrid: RunFolder) -> None:
    at = hybrid.checkpoints / "checkpoint-4"
    assert checkpoint.problem_with(at, hashes=True) == ""
    written = 0
    for file in (at / SHARES).iterdir():
        with safe_open(file, "pt") as shares:
            written += sum(shares.get_tensor(name).numel() for name in shares.keys())  # noqa: SIM118
    assert written == 197_312


def test_checkpoints_go_on_in_other_shapes(place: Place, hybrid: RunFolder, alone: RunFolder) -> None:
    same = place.two.train(place.again(hybrid))
    assert curve(same, segment=1) == {step: loss for step, loss in curve(hybrid).items() if step > 2}
    ours, before = weights(same), weights(hybrid)
    assert all(torch.equal(ours[name], before[name]) for name in before), "on as many processes to the bit"
    four = {"distributed.dp_replicate_size": 1, "distributed.dp_shard_size": 4}
    one = {**ALONE, "run.devices": 1, "distributed.strategy": "auto", "distributed.dp_replicate_size": 1}
    moved = [
        place.two.train(place.again(hybrid, **four)),
        place.two.train_alone(place.again(hybrid, **one, **{"distributed.dp_shard_size": None})),
        place.two.train(place.again(alone, **TWO_BY_TWO)),
    ]
    assert "holds 49,328 of 197,312 numbers" in strategy(moved[0])["detail"]
    assert "2 replicas, each on 2 processes" in strategy(moved[2])["detail"]
    for run in moved:
        assert sorted(curve(run, segment=1)) == [3, 4]
        alike(run, alone)


def test_two_processes_go_on_as_four_and_four_as_two(place: Place, alone: RunFolder) -> None:
    """Full weights and their optimizer, without replicas; two to one and one to two: `test_fsdp2.py`."""
    given = SHORT | {"data.train": place.rows(CONVERSATIONS)}
    pairs = {"run.devices": 2, "optim.per_device_train_batch_size": 2}
    four = place.two.train(run_folder(place.root / "runs", given | FOUR))
    assert "holds 49,328 of 197,312 numbers" in strategy(four)["detail"]
    alike(four, alone)
    with TwoRanks(own_cache(place.root / "cache")) as two:
        fewer = two.train(place.again(four, **pairs))
        half = two.train(run_folder(place.root / "runs", given | FOUR | pairs))
    assert "holds 98,656 of 197,312 numbers" in strategy(fewer)["detail"]
    more = place.two.train(place.again(half, **{"run.devices": 4, "optim.per_device_train_batch_size": 1}))
    assert "holds 49,328 of 197,312 numbers" in strategy(more)["detail"]
    for run in (fewer, more):
        assert sorted(curve(run, segment=1)) == [3, 4]
        alike(run, alone)


@pytest.mark.parametrize("name", ["lora", "dpo", "dpo lora"])
def test_adapters_and_pairs_learn_what_one_process_would(place: Place, name: str) -> None:
    settings = {"method.kind": "dpo"} if name.startswith("dpo") else {}
    settings |= LORA if name.endswith("lora") else {}
    rows = PAIRS if settings.get("method.kind") else CONVERSATIONS
    given = {**SHORT, **settings, "data.train": place.rows(rows)}
    shared = place.two.train(run_folder(place.root / "runs", given | TWO_BY_TWO))
    one = place.two.train_alone(run_folder(place.root / "runs", given | ALONE))
    assert "2 replicas, each on 2 processes" in strategy(shared)["detail"]
    alike(shared, one, tolerance=1e-3)


@pytest.mark.parametrize("name", ["all weights", "lora on experts", "fused experts"])
def test_mixtures_learn_what_one_process_would(place: Place, name: str) -> None:
    own = {} if name == "all weights" else ON_EXPERTS
    given = {**SHORT, **own, "data.train": place.rows(CONVERSATIONS), "model.name": mixture(place, "qwen3_moe")}
    fused = {"kernels.fused_experts": name == "fused experts"}
    shared = place.two.train(run_folder(place.root / "runs", given | TWO_BY_TWO | fused))
    one = place.two.train_alone(run_folder(place.root / "runs", given | ALONE))
    assert "2 replicas, each on 2 processes" in strategy(shared)["detail"]
    assert bool([entry for entry in receipt(shared) if entry["feature"] == "fused experts"]) is (
        name == "fused experts"
    )
    alike(shared, one, tolerance=1e-3)
    (*_, told) = lines(shared, "ranks")
    assert all(0 < seconds < told["step_seconds"] for seconds in told["communication_seconds"]), (
        "the sum over replicas is in it"
    )
