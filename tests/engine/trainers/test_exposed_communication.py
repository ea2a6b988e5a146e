"""How long each of two processes waits for the other, and who is named when one of them is late."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.run.store import RunFolder
from engine.run.view import RunView, fold
from engine.trainers.clock import StepClock
from engine.trainers.ranks import Waits
from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS
from tests.engine.trainers.test_fsdp2 import Place
from tests.engine.trainers.test_fsdp2_mixtures import ON_EXPERTS, mixture
from tests.engine.trainers.two_ranks import TwoRanks, run_folder

LATE = 0.4
SETTINGS = {"run.devices": 2, "optim.per_device_train_batch_size": 2, "optim.max_steps": 12, "run.save_steps": 100}
SETTINGS["optim.gradient_accumulation_steps"] = 1


def late_where_asked() -> None:
    """Has the second process sleep before each backward pass of a run, where a file of the cache says so, and in the attention of
    Qwen3-MoE's layers."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    from engine.trainers.run_trainer import RunTrainer

    asked, step = Path(os.environ["WORKBENCH_CACHE"]) / "late", RunTrainer.training_step

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1" and asked.exists():
            time.sleep(LATE)
        return step(self, *args, **kwargs)

    RunTrainer.training_step = late  # type: ignore[method-assign]
    attend = Qwen3MoeAttention.forward

    def late_attention(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1":
            time.sleep(LATE / 2)
        return attend(self, *args, **kwargs)

    Qwen3MoeAttention.forward = late_attention  # type: ignore[method-assign]


class Pair:
    def __init__(self, root: Path, cache: str, two: TwoRanks) -> None:
        self._root, self._asked, self._two = root, Path(cache) / "late", two
        self.mixture = mixture(Place(root, two), "qwen3_moe")
        self._rows = root / "rows.jsonl"
        self._rows.write_text("".join(json.dumps({"messages": row}) + "\n" for row in CONVERSATIONS))

    def train(self, *, late: bool, **settings: Any) -> RunFolder:
        if late:
            self._asked.touch()
        else:
            self._asked.unlink(missing_ok=True)
        given = SETTINGS | {"data.train": [{"path": str(self._rows)}]} | settings
        return self._two.train(run_folder(self._root / "runs", given))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("communication")
    cache = own_cache(root / "cache")
    with TwoRanks(cache, f"{__name__}:late_where_asked") as two:
        yield Pair(root, cache, two)


def seen(run: RunFolder) -> tuple[RunView, dict[str, Any]]:
    """The view of a run, and its last figures of ranks."""
    events = [json.loads(line) for line in run.events.read_text("utf-8").splitlines()]
    (*_, last) = [event for event in events if event["kind"] == "ranks"]
    return fold(RunView(), events), last


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_late_rank_shows_as_the_others_waiting_and_is_named(pair: Pair, strategy: str) -> None:
    chosen = {"distributed.strategy": strategy}
    calm, (view, late) = seen(pair.train(late=False, **chosen))[1], seen(pair.train(late=True, **chosen))
    first, second = late["communication_seconds"]
    assert 0.8 * LATE < first < 1.5 * LATE + max(calm["communication_seconds"]), (
        "the first waits as long as the second sleeps"
    )
    assert second < first / 2
    assert all(0 < seconds < first for seconds in calm["communication_seconds"]), "without one there is less of it"
    for event in (calm, late):
        assert all(seconds < event["step_seconds"] for seconds in event["communication_seconds"])
    share = first / late["step_seconds"]
    assert [rank["communication_share"] for rank in view.ranks] == [
        pytest.approx(share),
        pytest.approx(second / late["step_seconds"]),
    ]
    assert view.series["communication/rank0"].last == (late["step"], pytest.approx(share))
    assert view.slowest is not None
    assert view.slowest[:2] == (1, "own work")
    assert view.slowest_text.startswith("rank 1 takes ")


def test_waiting_for_tokens_of_divided_experts_is_no_forward_pass(pair: Pair) -> None:
    """The first process waits in the layer behind the second's attention, and would seem to take as long for it."""
    chosen = {"model.name": pair.mixture, "distributed.expert_parallel_size": 2, **ON_EXPERTS}
    view, late = seen(pair.train(late=False, **chosen))
    first, second = late["communication_seconds"]
    assert first > 0.8 * LATE > 1.6 * second
    passes = late["forward_seconds"]
    assert passes[1] > 0.9 * LATE > 1.8 * passes[0]
    assert view.slowest is not None
    assert view.slowest[:2] == (1, "forward pass")


def test_what_is_measured_takes_microseconds() -> None:
    waits, took = Waits(StepClock()), []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(300):  # as many as a step of FSDP2 with 75 layers has
            with waits.span():
                pass
        took.append(time.perf_counter() - began)
        waits.step_over()
    assert statistics.median(took) < 0.003
    assert waits.steps == 20


def test_a_step_is_measured_so_often_and_pauses_are_no_part_of_it() -> None:
    clock = StepClock()
    waits = Waits(clock, every=0.2)
    begun = time.monotonic()
    with waits.span():
        time.sleep(0.01)
    outside = time.monotonic() - begun
    with clock.pause(), waits.span():
        time.sleep(0.05)
    waits.step_over()
    assert waits.steps == 1
    assert 0.01 <= waits.spent()[0] <= outside
    with waits.span():
        time.sleep(0.05)
    waits.step_over()
    assert waits.steps == 1, "this step came too soon"
    time.sleep(0.2)
    waits.step_over()
    with waits.span():
        pass
    waits.step_over()
    assert waits.steps == 2
    assert waits.spent()[0] < outside + 0.04


def test_a_loss_without_gradients_fails_as_it_did() -> None:
    backward = Waits(StepClock()).after_gradients(torch.Tensor.backward)
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.tensor(1.0))
