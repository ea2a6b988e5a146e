"""Batches that were measured on a card tell how long others take: sizes, lengths and batches that were not measured."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.facts import DataFacts, Facts, StepTime
from engine.data.gather_facts import gather_facts
from engine.facts import step_times
from engine.facts.model_shape import model_facts
from engine.hardware import Gpu, Machine, parse_machine
from engine.planning.estimate import estimate
from engine.rules import read

CARD = "NVIDIA H100 80GB HBM3"
QWEN = model_facts("Qwen/Qwen3-8B")
assert QWEN is not None
SIZES = ((28, 596_000_000, 2048), (28, 1_720_000_000, 2048), (36, 8_190_000_000, 4096), (64, 32_800_000_000, 8192))


def made(layers: int, parameters: int, width: int, tokens: int, length: int, noise: float = 0.0) -> StepTime:
    """What a card with these numbers, and its host, would take."""
    row = StepTime(CARD, "lora", "bfloat16", True, "False", layers, parameters, width, tokens, length, 1.0)
    layers_, *work = step_times.terms(row)
    seconds = max(3e-3 * layers_, sum(map(float.__mul__, (1.6e-15, 3.1e-15, 5e-12, 2e-12), work)))
    return replace(row, seconds=seconds * random.Random(tokens * length + layers).uniform(1 - noise, 1 + noise))


MEASURED = [
    *(made(*SIZES[2], tokens, tokens) for tokens in (512, 2048, 8192, 32_768)),
    *(made(*size, 8192, 2048) for size in SIZES),
]


def test_a_size_a_length_and_a_batch_that_were_not_measured_are_told() -> None:
    for asked in (
        made(40, 14_800_000_000, 5120, 8192, 2048),
        made(*SIZES[2], 131_072, 131_072),
        made(*SIZES[0], 1024, 256),
    ):
        assert step_times.seconds(replace(asked, seconds=1.0), MEASURED) == pytest.approx(asked.seconds, rel=1e-6)


def test_a_way_with_few_rows_takes_what_attention_takes_from_the_way_with_the_most() -> None:
    """Four rows of one length say nothing of longer ones by themselves."""
    many = [*MEASURED, *(made(*size, 2048, 2048) for size in SIZES)]
    few = [replace(made(*size, rows * 2048, 2048), held="nf4") for size in SIZES[1:3] for rows in (2, 8)]
    asked = replace(made(*SIZES[2], 65_536, 65_536), held="nf4")
    assert step_times.seconds(replace(asked, seconds=1.0), [*many, *few]) == pytest.approx(asked.seconds, rel=0.02)
    alone = step_times.seconds(replace(asked, seconds=1.0), few)
    assert alone is not None
    assert abs(alone / asked.seconds - 1) > 0.1


def test_times_that_scatter_by_a_twentieth_are_told_within_a_tenth() -> None:
    scattered = [
        *(made(*SIZES[2], tokens, tokens, 0.05) for tokens in (512, 1024, 2048, 8192, 32_768)),
        *(made(*size, rows * 2048, 2048, 0.05) for size in SIZES for rows in (1, 4)),
    ]
    for asked in (made(40, 14_800_000_000, 5120, 8192, 2048), made(*SIZES[2], 16_384, 16_384)):
        assert step_times.seconds(replace(asked, seconds=1.0), scattered) == pytest.approx(asked.seconds, rel=0.1)


def test_no_part_of_a_time_is_negative_and_too_few_rows_say_nothing() -> None:
    falling = [replace(row, seconds=1.0 / row.tokens) for row in MEASURED]
    found = step_times.fitted(tuple(falling))
    assert found is not None
    assert min(found) >= 0
    assert step_times.fitted(tuple(MEASURED[: step_times.FEWEST - 1])) is None
    assert step_times.seconds(replace(MEASURED[0], held="nf4"), MEASURED) is None


def test_a_table_is_written_and_read_and_a_point_measured_again_takes_the_old_ones_place(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "times.csv"
    step_times.write(file, MEASURED[:3])
    again = replace(MEASURED[1], seconds=9.0)
    step_times.write(file, [again, MEASURED[3]])
    assert step_times.read(file) == [MEASURED[0], again, MEASURED[2], MEASURED[3]]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\0", "card,weights\nx\n"])
def test_what_is_no_table_says_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times.csv"
    file.write_text(text)
    assert step_times.read(file) == []
    assert step_times.read(tmp_path / "nowhere") == []
    step_times.write(file, MEASURED[:1])
    lines = file.read_text().replace(repr(MEASURED[0].seconds), "nan")
    file.write_text(lines)
    assert step_times.read(file) == []


def test_the_look_finds_the_rows_of_this_card_and_of_one_that_is_only_described(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    other = replace(MEASURED[0], card="NVIDIA A100-SXM4-80GB")
    step_times.write(step_times.own(), [*MEASURED, other])
    config = read({"model": {"name": "Qwen/Qwen3-8B"}}).config
    here = Machine(gpus=(Gpu(CARD, 80 * 2**30, (9, 0)),))
    assert gather_facts(config, tmp_path, here).step_times == tuple(MEASURED)
    assert gather_facts(config, tmp_path, parse_machine("1xH100-80GB")).step_times == tuple(MEASURED)
    assert gather_facts(config, tmp_path, Machine(cpu_count=2)).step_times == ()


def test_the_estimate_tells_the_time_that_was_measured() -> None:
    mapping = {
        "model": {"name": "Qwen/Qwen3-8B"}, "adapter": {"kind": "lora"},
        "data": {"max_length": 2048}, "kernels": {"torch_compile": True},
        "memory": {"gradient_checkpointing": False},
        "optim": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 100},
    }  # fmt: skip
    config = read(mapping).config
    data = DataFacts(rows=8000, tokens=8000 * 2048, exact=True)
    facts = Facts(machine=parse_machine("1xH100-80GB"), model=QWEN, data=data)
    plain = estimate(config, facts)
    # Embeddings are looked up: the head of Qwen3-8B has weights of its own.
    base = (plain.total_parameters or 0) - (plain.trainable_parameters or 0) - 151_936 * 4096
    guess = plain.seconds_left
    told = estimate(config, replace(facts, step_times=tuple(MEASURED))).seconds_left
    one = made(QWEN.layers, base, QWEN.heads * QWEN.head_dim, 8192, 2048).seconds
    assert told == pytest.approx(200 * one, rel=0.01)
    assert guess is not None
    assert abs(guess / told - 1) > 0.05
    assert estimate(config, replace(facts, step_times=tuple(MEASURED[:2]))).seconds_left == guess
    both = replace(facts, machine=parse_machine("2xH100-80GB"), step_times=tuple(MEASURED))
    assert estimate(config, replace(facts, step_times=tuple(MEASURED))).seconds_by == f"by steps measured on {CARD}"
    assert plain.seconds_by.endswith("no steps like these were measured on it")
    mixture = replace(QWEN, experts=128)
    assert (
        "no steps like these" in estimate(config, replace(facts, model=mixture, step_times=tuple(MEASURED))).seconds_by
    )
    of_two = estimate(read({**mapping, "run": {"devices": 2}}).config, both).seconds_left
    assert of_two == pytest.approx(told, rel=0.03), "each has a batch as large as the one card had"
    assert of_two > told, "they wait for each other"


@pytest.mark.parametrize(
    ("name", "value"),
    [("parameters", "9" * 400), ("tokens", "9" * 30), ("seconds", "1e-320"), ("reference", "inf"), ("peak_mib", "nan")],
)
def test_numbers_that_nobody_measured_are_no_rows(tmp_path: Path, name: str, value: str) -> None:
    file = tmp_path / "step_times.csv"
    step_times.write(file, MEASURED)
    lines = file.read_text().splitlines()
    names, cells = lines[0].split(","), lines[1].split(",")
    cells[names.index(name)] = value
    file.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]))
    assert len(step_times.read(file)) == len(MEASURED) - 1
