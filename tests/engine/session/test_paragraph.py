"""The paragraph that the review, `check` and `train` begin with: every figure is the estimate's, what is unknown is called so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.facts import DataFacts, Facts, ModelFacts
from engine.config.method import METHODS
from engine.config.recipes import recipes
from engine.figures import brief, count, large, size
from engine.hardware import Machine
from engine.planning.estimate import Estimate, estimate
from engine.session.draft import Draft
from engine.session.paragraph import paragraph

CARD_BYTES = 79 << 30
KNOWN = Estimate(
    effective_batch=16, steps=188, trainable_parameters=10_100_000, total_parameters=606_000_000,
    checkpoint_bytes=40 << 20, checkpoints_bytes=120 << 20, memory_total=19 << 30, device_bytes=CARD_BYTES, seconds_left=2520.0,
)  # fmt: skip
TEXT = "version: 1\nmodel: {name: someone/model}\ndata: {train: [{path: mine.jsonl}]}\nadapter: {kind: lora, r: 16}\n"


def test_each_figure_is_the_estimates(tmp_path: Path) -> None:
    config = Draft(TEXT + "optim: {num_train_epochs: 3}\n").config
    facts = Facts(
        machine=Machine((), 16, 128 << 30, 512 << 30, "box"),
        model=ModelFacts("someone/model", parameters=596_000_000),
        data=DataFacts(rows=1000, exact=True, read=1000),
    )
    words = paragraph(config, facts, KNOWN, tmp_path / "runs")
    for said in (
        "someone/model (596 M parameters) is trained with SFT", "1,000 rows of mine.jsonl", "rank 16: 10.1 M parameters, 1.7 % of all",
        "188 steps, 3 times over the rows, 16 rows each: roughly 42 min", "19.0 of 79.0 GiB", "the newest 2 checkpoints (40.0 MiB each)",
        "up to 120 MiB of disk, 512 GiB are free",
    ):  # fmt: skip
        assert said in words, words
    assert str(tmp_path.name) in words
    assert "not known" not in words
    fewer = paragraph(config, facts, replace(KNOWN, memory_total=92 << 30), None)
    assert "92.0 of 79.0 GiB of memory, more than there is" in fewer


def test_a_batch_holds_no_more_rows_than_there_are() -> None:
    few = Facts(data=DataFacts(rows=2, exact=True, read=2))
    assert "all 2 rows each" in paragraph(Draft(TEXT).config, few, KNOWN)
    packed = Draft(TEXT.replace("data: {", "data: {packing: true, ")).config
    assert packed.data.packing
    assert "16 rows each" in paragraph(packed, few, KNOWN)
    one = paragraph(Draft(TEXT).config, Facts(data=DataFacts(rows=1, exact=True, read=1)), KNOWN)
    assert "on 1 row of mine.jsonl" in one
    assert "the only row each" in one


@pytest.mark.parametrize(
    ("part", "known", "said"),
    [("0.05", 0, "5 % of them"), ("20", 0, "20 of them"), ("0.05", 12, "12 others"), ("0", 0, "")],
)
def test_rows_that_are_held_out_of_the_training_rows_are_said(part: str, known: int, said: str) -> None:
    config = Draft(TEXT.replace("data: {", f"data: {{val_set_size: {part}, ")).config
    counted = Facts(data=DataFacts(rows=228, exact=True, read=240, eval_rows=known)) if known else Facts()
    words = paragraph(config, counted, KNOWN)
    assert (f" of mine.jsonl and judged by {said}, held out." in words) == bool(said), words
    assert ("judged by" in words) == bool(said)


def test_what_is_not_known_is_called_so() -> None:
    words = paragraph(Draft(TEXT).config, Facts(), Estimate())
    for said in ("its size is not known yet", "the rows, not counted yet, of mine.jsonl", "(LoRA, rank 16: how many parameters is not known yet)",
                 "How many steps it takes is not known until the rows are counted", "how long is not known yet",
                 "How much memory it needs is not known yet", "how much disk they take is not known yet"):  # fmt: skip
        assert said in words, words
    assert not any(sign in words for sign in ("None", "nan", "MiB", "GiB")), words
    empty = paragraph(Draft().config, Facts(), Estimate())
    assert "still to be named" in empty


def test_a_run_that_saves_only_its_end_is_not_told_to_keep_two_checkpoints() -> None:
    once = paragraph(Draft(TEXT).config, Facts(), replace(KNOWN, checkpoints_bytes=KNOWN.checkpoint_bytes))
    assert "Kept are the checkpoint of its end (40.0 MiB), curves, samples and log: up to 40.0 MiB of disk" in once


def test_an_adapter_that_is_trained_further_is_named() -> None:
    words = paragraph(Draft(TEXT.replace("lora, r: 16", "lora, r: 16, path: runs/mine-0001")).config, Facts(), KNOWN)
    assert "small matrices beside it of runs/mine-0001, which go on from there (LoRA, rank 16: " in words


def test_what_is_sent_to_a_hub_is_told_with_who_can_read_it() -> None:
    def told(settings: str) -> str:
        return paragraph(Draft(f"{TEXT}run: {{hub_model_id: me/mine, {settings}}}\n").config, Facts(), KNOWN)

    private = told("push_to_hub: true")
    assert private.endswith("Its checkpoints are sent while it trains to me/mine on the hub, a private repository.")
    end = told("push_to_hub: true, hub_strategy: end, hub_private_repo: false")
    assert end.endswith(
        "Its last checkpoint is sent to me/mine on the hub, open to everybody unless it is there and private."
    )
    assert "hub" not in told("push_to_hub: false")


def test_counts_of_a_sample_and_of_other_limits_are_not_told_as_all() -> None:
    config = Draft(TEXT).config
    sample = Facts(data=DataFacts(rows=5000, read=512, total=5000, limits=()))
    other = Facts(data=DataFacts(rows=5000, read=5000, exact=True, limits=("other",)))
    assert "5,000 rows" in paragraph(config, sample, Estimate())
    assert "not counted yet" in paragraph(config, other, Estimate())


@pytest.mark.parametrize("name", [recipe.name for recipe in recipes()])
def test_every_recipe_reads_as_sentences_with_its_own_figures(name: str) -> None:
    config = Draft.new(name).config
    machine = Machine((), 4, 64 << 30, 500 << 30, "box")
    facts = Facts(machine=machine)
    known = estimate(config, facts)
    words = paragraph(config, facts, known)
    assert METHODS[config.method.kind].called in words
    assert words.endswith(".")
    assert "  " not in words
    assert len(words) < 900
    for value, write in ((known.effective_batch, count), (known.seconds_left, brief), (known.checkpoints_bytes, size)):
        assert value is None or write(value) in words, (name, words)
    if known.trainable_parameters is not None:
        assert large(known.trainable_parameters) in words


def test_devices_that_divide_experts_are_not_told_to_hold_the_whole_model() -> None:
    for many, how in ((2, "All divide"), (4, "Every 2 divide")):
        more = f"run: {{devices: {many}}}\ndistributed: {{expert_parallel_size: 2}}\n"
        words = paragraph(Draft(TEXT + more).config, Facts(), KNOWN)
        assert f"Of {many} devices each holds its part of the experts and all else of the model (ddp). {how}" in words
        assert "whole model" not in words
