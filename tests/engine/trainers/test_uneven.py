"""Rows that do not divide over two processes are learned from and measured once each, as by one process."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler
from trl import KTOTrainer

from engine.run.store import RunFolder
from engine.trainers import late_metrics, uneven
from engine.trainers.late_metrics import LateMetrics
from engine.trainers.stream_loader import Dealt
from engine.trainers.uneven import UnevenShare
from tests.caches import own_cache
from tests.engine.trainers.conftest import PAIRS, RATED, STEPS, TEXTS, lines
from tests.engine.trainers.two_ranks import TwoRanks, run_folder

LONGER = [
    [
        {"role": "user", "content": f"Count on from {number}."},
        {"role": "assistant", "content": " ".join(str(number + more) for more in range(1 + number % 7 * 3))},
    ]
    for number in range(13)
]
"""Of very different lengths: a row that counts twice moves each mean."""
EPOCHS = {"optim.max_steps": None, "optim.num_train_epochs": 2, "run.save_steps": 100, "run.eval_steps": 2}
STREAM = {
    "data.streaming": True,
    "data.shuffle": False,
    "optim.num_train_epochs": 1,
    "optim.gradient_accumulation_steps": 1,
}


def read_with_each_batch() -> None:
    """Metrics that wait are read as each batch begins, the uneven one too. Runs in a folder `late` have their numbers later, as
    on a GPU, and may ask no rank for anything once others are in the next step."""
    late_metrics.UNREAD = 4
    LateMetrics.numbers_arrive_later = property(lambda self: self.run.path.parent.name == "late")  # type: ignore[assignment, method-assign]
    log = LateMetrics._log_of_all

    def asking_nobody(self: LateMetrics, over: Any) -> None:
        asks = patch.object(self.accelerator, "gather", side_effect=AssertionError("a rank is asked"))
        with asks, patch.object(torch.distributed, "all_gather", side_effect=AssertionError("a rank is asked")):
            log(self, over)
        with (self.run.path / f"late-{self.args.process_index}").open("a") as file:
            file.write(f"{self.state.global_step}\n")

    LateMetrics._log_of_all = asking_nobody  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with TwoRanks(own_cache(tmp_path_factory.mktemp("uneven") / "cache"), f"{__name__}:read_with_each_batch") as ranks:
        yield ranks


def written(folder: Path, name: str, rows: list[Any]) -> list[dict[str, str]]:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n" for row in rows))
    return [{"path": str(path)}]


def both(folder: Path, two: TwoRanks, rows: list[Any], **settings: Any) -> tuple[RunFolder, RunFolder]:
    """A run of two processes and the same of one, with seven of the rows held out beside."""
    own = {"data.train": written(folder, "rows", rows), "data.eval": written(folder, "held-out", rows[3:10])}
    given = {**EPOCHS, "adapter.kind": "lora", "adapter.r": 4, "optim.max_grad_norm": 0.1, **own, **settings}
    each, all_of_them = (
        {f"optim.per_device_{kind}_batch_size": count for kind in ("train", "eval")} for count in (2, 4)
    )
    shared = two.train(run_folder(folder / "runs", given | each | {"run.devices": 2}))
    return shared, two.train_alone(run_folder(folder / "runs", given | all_of_them))


def told(run: RunFolder, *more: str) -> list[dict[str, float]]:
    """Losses, norms, counts, accuracies and rewards of each line, and `more`."""
    names = ("step", "loss", "grad_norm", "eval_loss", "tokens", "trained_tokens", "accuracy", "eval_accuracy")
    names += ("num_tokens", "mean_token_accuracy", "entropy", "eval_mean_token_accuracy", "eval_entropy")
    names += tuple(f"{before}rewards/{name}" for before in ("", "eval_") for name in ("chosen", "margins"))
    names += more
    return [{name: event[name] for name in names if name in event} for event in lines(run, "metrics")]


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (LONGER, {}),
        pytest.param(PAIRS[:13], {"method.kind": "dpo"}, marks=pytest.mark.slow),
        (PAIRS[:15], {"method.kind": "dpo", **STREAM}),
        pytest.param(LONGER[:1] * 2 + LONGER[3:12], STREAM, marks=pytest.mark.slow),
        pytest.param(PAIRS[:13], {"method.kind": "orpo"}, marks=pytest.mark.slow),
        (PAIRS[:11], {"method.kind": "reward"}),
        pytest.param(STEPS[:13], {"method.kind": "prm"}, marks=pytest.mark.slow),
    ],
    ids=["sft", "dpo", "streamed pairs", "streamed", "orpo", "reward", "prm"],
)
def test_each_row_counts_once(tmp_path: Path, two: TwoRanks, rows: list[Any], settings: dict[str, Any]) -> None:
    """The last batch of an epoch has one row for both processes, or three; the last of the held-out rows has three."""
    shared, alone = both(tmp_path, two, rows, **settings)
    assert len(told(alone)) > 3
    assert "eval_loss" in told(alone)[-1] or "eval_loss" in told(alone)[-2]
    more = ("margin", "eval_margin") if settings.get("method.kind") in ("reward", "prm") else ()
    for ours, theirs in zip(told(shared, *more), told(alone, *more), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("rows", "kind"), [(RATED[:13], "kto"), (TEXTS[:13], "embedding")], ids=["kto", "embedding"])
def test_what_is_compared_within_a_batch_is_counted_once_too(
    tmp_path: Path, two: TwoRanks, rows: list[Any], kind: str
) -> None:
    """Such losses hang on what is in a process's batch, so those of two differ from one's; what is counted does not."""
    shared, alone = both(tmp_path, two, rows, **{"method.kind": kind})
    if kind == "kto":
        counts = [[line["trained_tokens"] for line in told(run) if "tokens" in line] for run in (shared, alone)]
        assert counts[0] == counts[1] != []
    else:
        found = [value for line in lines(shared, "metrics") for name, value in line.items() if "recall" in name]
        assert found
        assert all(7 * share == pytest.approx(round(7 * share), abs=1e-5) for share in found), (
            "of seven rows, not eight"
        )


@pytest.mark.parametrize(
    "more", [{}, {"optim.gradient_accumulation_steps": 2, "run.logging_steps": 2}], ids=["each", "some"]
)
def test_a_step_that_is_logged_within_the_next_has_the_same_line_on_two_processes(
    tmp_path: Path, two: TwoRanks, more: dict[str, Any]
) -> None:
    rows = written(tmp_path, "rows", LONGER)
    given = {**EPOCHS, "data.train": rows, "data.eval": rows, "run.devices": 2, "optim.per_device_train_batch_size": 2}
    given |= {
        "optim.gradient_accumulation_steps": 1,
        "run.logging_steps": 1,
        "run.eval_steps": 5,
        "run.save_steps": 3,
        **more,
    }
    at_once, late = (two.train(run_folder(tmp_path / name, given)) for name in ("at once", "late"))
    clocks = re.compile("^(t|seq)$|second|runtime|memory")
    found = [
        [{name: value for name, value in line.items() if not clocks.search(name)} for line in lines(run, "metrics")]
        for run in (at_once, late)
    ]
    assert found[0] == found[1]
    assert len(found[0]) > 3
    steps = [(late.path / f"late-{rank}").read_text().split() for rank in (0, 1)]
    assert steps[0] == steps[1] != []
    assert not (at_once.path / "late-0").exists()


def test_a_baseline_is_the_mean_over_rows_and_a_sum_behind_it_stays_one() -> None:
    """Of three rows two are here and one is at another process, which sends its own as this one does."""
    here, there = uneven.part_of(2, 3, 2), uneven.part_of(1, 3, 2)

    def ask(own: torch.Tensor) -> torch.Tensor:
        if own.shape == (1, 2) and own.is_floating_point():
            return torch.cat([own, torch.tensor([[0.6 * there.weight, there.weight]])])
        return torch.cat([own, own if own.shape == (1, 2) else torch.tensor([5.0])])

    accelerator: Any = SimpleNamespace(gather=ask, gather_for_metrics=ask)
    with uneven.gathering(accelerator, here, means=1):
        assert accelerator.gather_for_metrics(torch.tensor(0.3)).tolist() == pytest.approx([(2 * 0.3 + 0.6) / 3])
        assert accelerator.gather_for_metrics(torch.tensor(7.0)).tolist() == [7.0, 5.0]
    source = inspect.getsource(KTOTrainer._compute_loss)
    assert source.index("gather_for_metrics(kl)") == source.index("gather_for_metrics("), "TRL asks for it first"


def test_a_mean_over_processes_counts_rows_and_not_who_fills_in() -> None:
    """The experts' auxiliary loss: that of a process without a row was 0, and the mean of two half of the one that was."""

    class Late(late_metrics.LateMetrics):
        def __init__(self, part: uneven.Part) -> None:
            self._asked, self._over, self.batch_part = [], None, part

    found = []
    for parts in (
        (uneven.part_of(2, 3, 2), uneven.part_of(1, 3, 2)),
        (uneven.part_of(1, 1, 2), uneven.part_of(0, 1, 2)),
    ):
        asked, value = [], None
        for part, own in zip(parts, (0.3, 0.6), strict=True):
            late = Late(part)
            value = late._note(torch.tensor(own)).mean().item()
            asked.append(late._asked)
        found.append(value.value([torch.stack(each) for each in zip(*asked, strict=True)]))
    assert found == pytest.approx([(2 * 0.3 + 0.6) / 3, 0.3])


def test_the_rows_of_a_last_round_are_dealt_out_once() -> None:
    def dealt(count: int, ranks: int) -> list[list[list[int]]]:
        sampler = BatchSampler(SequentialSampler(range(count)), 2, drop_last=False)
        shares = [UnevenShare(sampler, ranks, rank) for rank in range(ranks)]
        found = [list(share) for share in shares]
        assert {len(batches) for batches in found} == {len(shares[0])}, "all make as many passes"
        kept = [
            [*batches[:-1], batches[-1] if share.last.weight else []]
            for share, batches in zip(shares, found, strict=True)
        ]
        assert sum(share.last.weight for share in shares) == pytest.approx(ranks)
        return kept

    assert dealt(8, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert dealt(7, 2) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert dealt(5, 2) == [[[0, 1], [4]], [[2, 3], []]]
    assert dealt(1, 3) == [[[0]], [[]], [[]]]


def test_a_part_of_a_stream_weighs_what_it_has() -> None:
    for rows in range(1, 9):
        parts = [
            (dealt.part(rows), dealt.mine([{"row": row} for row in range(rows)]))
            for dealt in (Dealt(2, 4, rank) for rank in range(4))
        ]
        assert sum(part.weight for part, _ in parts) == pytest.approx(4)
        counted = [row["row"] for part, mine in parts if not part.fills_in for row in mine]
        assert sorted(counted) == list(range(rows)), "each once"
        assert all(mine for _, mine in parts), "and each makes a pass"
        assert {part.uneven for part, _ in parts} == {rows < 8}
