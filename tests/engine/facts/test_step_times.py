"""Batches that were measured on a card tell how long others take: sizes, lengths and batches that were not measured."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.facts import DataFacts, Facts, StepTime
from engine.data.gather_facts import gather_facts
from engine.facts import step_speeds, step_times
from engine.facts.model_shape import model_facts
from engine.hardware import Gpu, Machine, parse_machine
from engine.planning.estimate import estimate
from engine.planning.speed import published, speeds_by
from engine.rules import read

CARD = "NVIDIA H100 80GB HBM3"
QWEN = model_facts("Qwen/Qwen3-8B")
assert QWEN is not None
SIZES = ((28, 596_000_000, 2048), (28, 1_720_000_000, 2048), (36, 8_190_000_000, 4096), (64, 32_800_000_000, 8192))


PUBLISHED = step_speeds.published(9.0e14, 3.35e12)
TRUE = PUBLISHED._replace(
    products=1.6e-15,
    attention=2.1e-15,
    compiled=9e-12,
    plain=3e-11,
    unpacked=7e-12,
    layer=2.2e-3,
    adapters=1.5e-3,
    eager=2e-3,
)
"""A card of another speed than is published, beside a quick host."""


def made(layers: int, parameters: int, width: int, tokens: int, length: int, noise: float = 0.0, **more) -> StepTime:
    """What such a card would take."""
    row = StepTime(CARD, "lora", "bfloat16", True, "False", layers, parameters, width, tokens, length, 1.0)
    row = replace(row, **more)
    took = step_speeds.seconds(TRUE, step_speeds.terms(row))
    return replace(row, seconds=took * random.Random(tokens * length + layers).uniform(1 - noise, 1 + noise))


def told(asked: StepTime, rows: list[StepTime]) -> float:
    speeds = step_speeds.fitted(tuple(rows), PUBLISHED)
    return step_speeds.seconds(speeds, step_speeds.terms(replace(asked, seconds=1.0)))


MEASURED = [
    *(made(*SIZES[2], tokens, tokens) for tokens in (512, 4096, 8192, 32_768)),
    *(made(*size, rows * 2048, 2048) for size in SIZES for rows in (1, 4)),
]
ASKED = (
    made(40, 14_800_000_000, 5120, 8192, 2048),
    made(*SIZES[2], 131_072, 131_072),
    made(*SIZES[0], 1024, 256),
)


def test_a_size_a_length_and_a_batch_that_were_not_measured_are_told() -> None:
    for asked in ASKED:
        assert told(asked, MEASURED) == pytest.approx(asked.seconds, rel=0.01)
    by_published = step_speeds.seconds(PUBLISHED, step_speeds.terms(ASKED[1]))
    assert abs(by_published / ASKED[1].seconds - 1) > 0.1, "else the rows said nothing"


def test_a_way_with_few_rows_takes_what_it_shares_with_the_others() -> None:
    """Two rows of one length say nothing of longer ones by themselves, and none of what plain layers take."""
    few = [made(*SIZES[2], rows * 2048, 2048, held="nf4") for rows in (1, 8)]
    asked = made(*SIZES[2], 65_536, 65_536, held="nf4")
    assert told(asked, [*MEASURED, *few]) == pytest.approx(asked.seconds, rel=0.02)
    assert abs(told(asked, few) / asked.seconds - 1) > 0.05
    plain = made(*SIZES[2], 8192, 2048, compiled=False)
    assert told(plain, MEASURED) < plain.seconds, "what is published, scaled by nothing"


def test_times_that_scatter_by_a_twentieth_and_one_that_waited_for_a_busy_host_are_told_within_a_tenth() -> None:
    scattered = [
        *(made(*SIZES[2], tokens, tokens, 0.05) for tokens in (512, 1024, 2048, 8192, 32_768)),
        *(made(*size, rows * 2048, 2048, 0.05) for size in SIZES for rows in (1, 4)),
    ]
    scattered[1] = replace(scattered[1], seconds=1.6 * scattered[1].seconds)
    for asked in (made(40, 14_800_000_000, 5120, 8192, 2048), made(*SIZES[2], 16_384, 16_384)):
        assert told(asked, scattered) == pytest.approx(asked.seconds, rel=0.1)


def test_no_part_of_a_time_leaves_the_bounds_of_what_a_card_can_do() -> None:
    falling = [replace(row, seconds=1.0 / row.tokens) for row in MEASURED]
    found = step_speeds.fitted(tuple(falling), PUBLISHED)
    assert all(0.099 < each / expected < 10.01 for each, expected in zip(found, PUBLISHED, strict=True))
    assert step_speeds.fitted((), PUBLISHED) == PUBLISHED


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"again": "medium"}), ({"again": "medium"}, {"again": "True"}), ({"again": "True of 10"}, {"again": "True of 20"}),
        ({}, {"reference": 2.0}), ({}, {"weights": "full"}), ({}, {"held": "nf4"}), ({"held": "tf32"}, {"held": "float32"}),
        ({}, {"compiled": False}), ({"held": "fp8"}, {}),
    ],
)  # fmt: skip
def test_what_is_more_work_takes_longer(less: dict, more: dict) -> None:
    row = made(*SIZES[2], 8192, 2048)
    short, long = (step_speeds.seconds(PUBLISHED, step_speeds.terms(replace(row, **change))) for change in (less, more))
    assert short < long < 9 * short


def test_a_card_that_nobody_measured_is_told_by_another_and_the_published_speeds_of_both() -> None:
    a100 = published("NVIDIA A100-SXM4-80GB", (8, 0))
    h100 = published(CARD, (9, 0))
    assert a100 is not None
    assert h100 is not None
    assert published("NVIDIA H200", (9, 0)) != h100, "its memory is quicker"
    assert published("NVIDIA H200") is not None, "a row has no compute capability"
    there, here = (speeds_by((), tuple(MEASURED), each) for each in (h100, a100))
    assert here.products / there.products == pytest.approx(h100[0] / a100[0])
    assert here.compiled / there.compiled == pytest.approx(h100[1] / a100[1])
    assert here.layer == there.layer
    few = tuple(replace(row, card="NVIDIA A100-SXM4-80GB", seconds=4 * row.seconds) for row in MEASURED[-4:])
    own = speeds_by(few, tuple(MEASURED), a100)
    assert step_speeds.seconds(own, step_speeds.terms(few[-1])) == pytest.approx(few[-1].seconds, rel=0.1)


def test_every_shipped_row_is_of_a_card_whose_published_speeds_are_known() -> None:
    rows = step_times.read(step_times.SHIPPED)
    assert all(published(row.card) and row.numbers and row.vocabulary for row in rows)
    for card in {row.card for row in rows}:
        off = [abs(told_by_itself(row, rows) / row.seconds - 1) for row in rows if row.card == card]
        assert sum(each <= 0.1 for each in off) >= 0.8 * len(off)


def told_by_itself(row: StepTime, rows: list[StepTime]) -> float:
    same = tuple(each for each in rows if each.card == row.card)
    shipped = step_times.shipped(Gpu(row.card, 0, (9, 0)))
    speeds = speeds_by(same, shipped, published(row.card) or (0, 0))
    return step_speeds.seconds(speeds, step_speeds.terms(row))


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
    shipped = gather_facts(config, tmp_path, parse_machine("1xA100-80GB")).shipped_times
    assert shipped
    assert len({row.card for row in shipped}) == 1
    step_times.own().unlink()
    step_times.write(step_times.own(), MEASURED[:1])
    found = gather_facts(config, tmp_path, here)
    assert len(found.step_times) >= step_times.FEWEST, "one row of one's own says less than those that are shipped"
    assert found.shipped_times == shipped + found.step_times


def test_a_card_with_few_rows_is_told_by_them_and_in_all_else_by_another_card() -> None:
    h100 = published(CARD)
    assert h100 is not None
    small = [made(*SIZES[at], tokens, tokens, compiled=False) for at in (0, 1) for tokens in (512, 2048)]
    others = [replace(row, card="NVIDIA H200") for row in (*MEASURED, *small)]
    quicker = TRUE._replace(products=0.8 * TRUE.products)
    large = [made(*SIZES[at], tokens, 2048) for at in (2, 3) for tokens in (8192, 32_768)]
    few = tuple(replace(row, seconds=step_speeds.seconds(quicker, step_speeds.terms(row))) for row in large)
    found, by_itself = speeds_by(few, (*others, *few), h100), step_speeds.fitted(few, PUBLISHED)
    waits = step_speeds.terms(small[0])
    assert step_speeds.seconds(found, waits) == pytest.approx(small[0].seconds, rel=0.03), "its host, as the other's"
    assert abs(step_speeds.seconds(by_itself, waits) / small[0].seconds - 1) > 0.2
    assert step_speeds.seconds(found, step_speeds.terms(few[0])) == pytest.approx(few[0].seconds, rel=0.03)
    assert few[0].seconds < 0.9 * large[0].seconds
    assert speeds_by((), (*others, *few), h100) == found, "a machine without rows of its own"
    own = speeds_by(tuple(MEASURED), (*others, *few), h100)
    assert step_speeds.seconds(own, step_speeds.terms(large[0])) == pytest.approx(large[0].seconds, rel=0.03)


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
    measured = replace(facts, step_times=tuple(MEASURED))
    told = estimate(config, measured).seconds_left
    sizes = {"numbers": 68_608, "vocabulary": 151_936}
    one = made(QWEN.layers, base, QWEN.heads * QWEN.head_dim, 8192, 2048, **sizes).seconds
    assert told == pytest.approx(200 * one, rel=0.03)
    assert guess is not None
    assert abs(guess / told - 1) > 0.05
    assert estimate(config, replace(facts, step_times=tuple(MEASURED[:2]))).seconds_left == guess
    both = replace(measured, machine=parse_machine("2xH100-80GB"))
    assert estimate(config, measured).seconds_by == f"by steps measured on {CARD}"
    in_nf4 = read({**mapping, "model": {"name": "Qwen/Qwen3-8B", "quantization": "nf4"}}).config
    assert estimate(in_nf4, measured).seconds_by == f"by steps of other kinds measured on {CARD}"
    elsewhere = replace(facts, shipped_times=tuple(replace(row, card="NVIDIA H200") for row in MEASURED))
    assert estimate(config, elsewhere).seconds_by.startswith(
        "by steps measured on NVIDIA H200 and the published speeds"
    )
    assert plain.seconds_by.endswith("no steps like these were measured on it")
    for known, whose in (
        (elsewhere, "of it and A100, which MYCARD is taken for"),
        (facts, "of A100, which MYCARD is taken for;"),
    ):
        unknown = replace(known, machine=parse_machine("1xMyCard-80GB"))
        assert whose in estimate(config, unknown).seconds_by, "nobody knows its speed"
    mixture = replace(QWEN, experts=128)
    assert "no steps like these" in estimate(config, replace(measured, model=mixture)).seconds_by
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
