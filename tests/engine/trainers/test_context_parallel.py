"""Rows that processes divide are learned from as one process learns from them whole; what has no ring is refused.

gloo has no ring attention, so here attention is computed the slow way (`ring_on_gloo`); all else is a run's own. The ring
itself is tried on cards by `benchmarks/context_parallel.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from engine.trainers.context_parallel import lacking, part_of
from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_fsdp2 import LORA, PROMPTED, READ, Place, alike, curve
from tests.engine.trainers.two_ranks import FourRanks, TwoRanks, run_folder

SHORT = {"optim.max_steps": 4, "run.save_steps": 2, "optim.per_device_train_batch_size": 2}
SPLIT = {"run.devices": 2, "distributed.context_parallel_size": 2, "distributed.strategy": "ddp"}


def batch_of(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, rows * tokens + 1).view(rows, tokens)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(("size", "tokens"), [(2, 8), (2, 5), (4, 17)])
def test_the_parts_of_a_batch_are_the_batch(size: int, tokens: int) -> None:
    batch = batch_of(3, tokens)
    batch["labels"][:, 0] = -100
    parts = [part_of(batch, size, place) for place in range(size)]
    width = -(-tokens // (2 * size)) * 2 * size
    assert {part["input_ids"].shape for part in parts} == {(3, width // size)}
    joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    order = joined["position_ids"].argsort(dim=1)
    whole = {name: each.gather(1, order) for name, each in joined.items()}
    assert whole["position_ids"].tolist() == [list(range(width))] * 3
    assert torch.equal(whole["input_ids"][:, :tokens], batch["input_ids"])
    assert whole["attention_mask"].sum() == 3 * tokens
    assert torch.equal(whole["labels"][:, :tokens], batch["labels"])
    # The token behind each, wherever the cut is; nothing behind the last one or in the padding.
    assert torch.equal(whole["shift_labels"][:, : tokens - 1], batch["labels"][:, 1:])
    assert (whole["shift_labels"][:, tokens - 1 :] == -100).all()
    # As much to attend to on each: a token sees those at its place and before.
    seen = [int((part["position_ids"][0] + 1).sum()) for part in parts]
    assert len(set(seen)) == 1


def test_a_model_without_a_causal_form_is_refused() -> None:
    small: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32,
    }  # fmt: skip
    plain, window = Qwen3Config(**small), MistralConfig(**small, sliding_window=8)
    assert lacking(AutoModelForCausalLM.from_config(plain)) is None
    assert "sliding_attention" in (lacking(AutoModelForCausalLM.from_config(window)) or "")
    dropping = Qwen3Config(**small, attention_dropout=0.1)
    assert "dropout" in (lacking(AutoModelForCausalLM.from_config(dropping)) or "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("rings")
    with TwoRanks(own_cache(root / "cache"), "tests.engine.trainers.ring_on_gloo:install") as two:
        yield Place(root, two)


def both(place: Place, rows: list[Any], more: dict[str, Any], split: dict[str, Any]) -> tuple[Any, Any]:
    """A run whose rows are divided, and one of a single process with as many rows a step."""
    given = {**SHORT, "data.train": place.rows(rows), **more}
    divided = place.two.train(run_folder(place.root / "runs", given | split))
    return divided, place.two.train_alone(run_folder(place.root / "runs", given | (more.get("alone") or {})))


def test_two_processes_divide_rows_and_learn_what_one_would(place: Place) -> None:
    more = {"data.val_set_size": 5, "run.eval_steps": 2, "optim.gradient_accumulation_steps": 2}
    more |= {"memory.gradient_checkpointing": True, **PROMPTED}
    divided, alone = both(place, CONVERSATIONS, more, SPLIT)
    alike(divided, alone)
    for name in ("eval_loss", "grad_norm"):
        assert curve(divided, name) == pytest.approx(curve(alone, name), rel=1e-4)
    assert curve(divided, "tokens") == curve(alone, "tokens"), "each token is counted once"
    told = [[event["completion"] for event in lines(run, "sample")] for run in (divided, alone)]
    assert told[0] == told[1], "samples are not divided"
    entries = {entry["feature"]: entry for entry in lines(divided, "receipt")[-1]["entries"]}
    ring = entries["context parallelism"]
    assert (ring["requested"], ring["effective"], ring["count"]) == (2, 2, 2)
    assert ring["detail"].startswith("all 2 processes with a batch between them: 4 pieces of each row")
    assert "a step averages the gradients of 4 rows" in entries["processes"]["detail"]
    assert entries["attention"]["effective"] == "sdpa"


@pytest.mark.parametrize("name", ["pretrain", "lora", "fsdp2", "kernels", "kernels on shares", "stream"])
@pytest.mark.slow
def test_what_computes_single_tokens_serves_divided_rows(place: Place, name: str) -> None:
    kernels = {**LORA, "kernels.use_cut_ce": True, "kernels.fused_lora": True, "memory.tiled_mlp": True}
    more: dict[str, Any] = {
        "pretrain": {"method.kind": "pretrain", "data.max_length": 32},
        "lora": LORA,
        "fsdp2": {"distributed.strategy": "fsdp2"},
        "stream": {"data.streaming": True, "optim.gradient_accumulation_steps": 2},
        "kernels": {**kernels, "memory.gradient_checkpointing": "selective"},
        "kernels on shares": {**kernels, "memory.gradient_checkpointing": True, "distributed.strategy": "fsdp2"},
    }[name]
    rows = READ if name == "pretrain" else CONVERSATIONS
    given = {**SHORT, "data.train": place.rows(rows), **more}
    alone = {name: value for name, value in given.items() if not name.startswith("distributed")}
    divided = place.two.train(run_folder(place.root / "runs", SPLIT | given))
    alike(divided, place.two.train_alone(run_folder(place.root / "runs", alone)), tolerance=1e-3)
    entries = {entry["feature"]: entry for entry in lines(divided, "receipt")[-1]["entries"]}
    assert entries["context parallelism"]["count"] == 2
    if "distributed.strategy" in more:
        assert re.match(r"of \d+ weights are shares \(DTensor\)", entries["strategy"]["detail"])


@pytest.mark.slow
def test_a_divided_run_goes_on_divided_or_whole(place: Place) -> None:
    given = {**SHORT, "data.train": place.rows(CONVERSATIONS)}
    run = place.two.train(run_folder(place.root / "runs", given | SPLIT))
    again = place.two.train(place.again(run))
    assert curve(again, segment=1) == {step: loss for step, loss in curve(run).items() if step > 2}
    one = {"run.devices": 1, "distributed.context_parallel_size": 1, "distributed.strategy": "auto"}
    whole = place.two.train_alone(place.again(run, **one))
    assert sorted(curve(whole, segment=1)) == [3, 4]
    alike(whole, run)


@pytest.mark.slow
def test_rings_take_batches_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    root: Path = tmp_path_factory.mktemp("rings-of-four")
    with FourRanks(own_cache(root / "cache"), "tests.engine.trainers.ring_on_gloo:install") as four:
        place = Place(root, four)
        given = {**SHORT, "data.train": place.rows(CONVERSATIONS), "data.val_set_size": 7, "run.eval_steps": 2}
        divided = four.train(run_folder(root / "runs", given | SPLIT | {"run.devices": 4}))
        alone = four.train_alone(run_folder(root / "runs", given | {"optim.per_device_train_batch_size": 4}))
    alike(divided, alone)
    assert curve(divided, "tokens") == curve(alone, "tokens")
    detail = {entry["feature"]: entry["detail"] for entry in lines(divided, "receipt")[-1]["entries"]}
    assert detail["context parallelism"].startswith("2 rings of 2, each with a batch between them")


def test_a_run_on_a_cpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    from engine.errors import ModelError
    from engine.trainers.context_parallel import DividesRows

    asked: Any = SimpleNamespace(model=torch.nn.Linear(1, 1))
    with pytest.raises(ModelError, match="context_parallel_size: must be 1 without a GPU; got 2") as refused:
        DividesRows.divide_rows(asked, 2)
    assert "gloo" in refused.value.hint
