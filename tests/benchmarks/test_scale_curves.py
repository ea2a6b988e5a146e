"""From points measured to what the estimate says: the table, the misses on points kept out, the picture, the package's table."""

from __future__ import annotations

import csv
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.facts import DataFacts
from engine.data.gather_facts import gather_facts
from engine.facts import step_speeds, step_times
from engine.hardware import parse_machine
from engine.planning.estimate import estimate
from engine.planning.speed import published
from engine.rules import read
from tests.caches import own_cache

FOLDER = Path(__file__).parents[2] / "benchmarks"
CARD = "NVIDIA H100 80GB HBM3"
POINTS = "tiny lora 1x32", "tiny lora 1x64", "tiny lora 1x128", "tiny lora 1x256", "tiny lora 2x64"


def script(monkeypatch: pytest.MonkeyPatch, name: str, *options: str | Path):
    """The script as it would be started with these options, without what it says to loggers for good."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module(name)
    monkeypatch.setattr(module.logging, "disable", lambda level: None)
    monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
    return module


def test_points_are_measured_written_judged_and_read_by_the_estimate(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    table, results = tmp_path / "scale_curves.csv", tmp_path / "results.csv"
    measuring = script(
        monkeypatch, "scale_curves", "--points", *POINTS, "--rounds", "2", "--table", table, "--results", results
    )
    monkeypatch.setattr(measuring.transformers.utils.logging, "set_verbosity_error", lambda: None)
    assert measuring.main() == 0
    lines = list(csv.DictReader(table.open()))
    assert [line["point"] for line in lines] == list(POINTS)
    assert [line["kept_out"] for line in lines] == ["False", "True", "False", "False", "False"]
    assert all(0 < float(line["seconds"]) < 10 for line in lines)
    assert len(results.read_text().splitlines()) == 1 + len(POINTS)
    again = script(monkeypatch, "scale_curves", "--part", "tiny", "--seconds", "0", "--table", table)
    assert again.main() == 0
    said = capsys.readouterr().out
    assert f"tiny lora 1x32: is in {table}" in said
    assert "tiny full 1x32: not reached" in said

    # As if a card had taken these times, and 800 MiB each.
    rows = [{**line, "card": CARD, "card_bytes": 80 * 2**30, "capability": "9.0", "peak_mib": 800} for line in lines]
    with (tmp_path / "of_a_card.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    shipped = tmp_path / "step_times.csv"
    monkeypatch.setattr(step_times, "SHIPPED", shipped)
    into = tmp_path / "report"
    into.mkdir()
    report = script(monkeypatch, "scale_report", tmp_path / "of_a_card.csv", "--into", into, "--ship")
    report.main()
    text = (into / "scale_curves.md").read_text()
    fit = step_times.read(shipped)
    assert [row.length for row in fit] == [32, 128, 256, 64], "the point that is kept out is not shipped"
    (kept_out,) = report.read([into / "scale_curves.csv"])[1:2]
    speeds = step_speeds.fitted(tuple(fit), step_speeds.published(*(published(CARD) or (0, 0))))
    expected = step_speeds.seconds(speeds, step_speeds.terms(fit_of(kept_out, report)))
    share = expected / kept_out.step.seconds - 1
    assert f"| tiny lora 1x64 \\* | {64 / kept_out.step.seconds:,.0f} |" in text
    assert f"| {share:+.1%} |" in text
    assert "time: " in text
    assert "<circle" in (into / "scale_curves_NVIDIA_H100_80GB_HBM3.svg").read_text()

    folder = tmp_path / "model"
    folder.mkdir()
    report.estimated_again.__globals__["Builder"](kept_out.point.options(), "sft", folder, None)
    mapping = {
        "model": {"name": str(folder), "dtype": "float32"}, "adapter": {"kind": "lora"}, "data": {"max_length": 64},
        "kernels": {"torch_compile": False}, "memory": {"gradient_checkpointing": False},
        "optim": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 10},
    }  # fmt: skip
    config = read(mapping).config
    seen = gather_facts(config, tmp_path, parse_machine("1xH100-80GB"), sources=False)
    facts = replace(seen, data=DataFacts(100, tokens=6400))
    told = estimate(config, facts)
    assert told.seconds_by == f"by steps measured on {CARD}"
    assert told.tokens_per_second == pytest.approx(64 / expected, rel=0.01)


def fit_of(measured, report):
    """The step of a point with what is counted counted anew, as the report takes it."""
    return report.estimated_again(measured)[0]


def test_points_are_fixed_and_each_kind_is_fitted_to_enough_of_them(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    points = list(importlib.import_module("_scale_points").POINTS.values())
    for way in dict.fromkeys(point.way for point in points):
        own = [point for point in points if point.way == way]
        assert sum(not point.kept_out for point in own) >= step_times.FEWEST, way
        assert any(point.kept_out for point in own), way
    assert {point.tokens for point in points if point.name.startswith("8b lora 1x")} == {2**n for n in range(9, 18)}
