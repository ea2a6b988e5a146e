"""The benchmark of two cards runs without one: arms as processes, turns, goals that are judged, and parts that fail alone."""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.caches import own_cache

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("two_cards")


def bench_of(script, tmp_path, shape=None):
    given = argparse.Namespace(results=None, commit="", shape=shape, rounds=5, window=1, logs=tmp_path)
    return script.Bench(given, tmp_path)


def test_a_ratio_is_of_tokens_and_a_goal_is_judged_by_the_end_that_is_named(script, tmp_path: Path) -> None:
    times = script.Times({"one card": [100.0] * 4, "ddp": [102.0] * 4})
    assert times.ratio("one card", "ddp", script.CARDS)[0] == pytest.approx(2 * 100 / 102)
    assert not times.both("one card", "fsdp2")
    bench = bench_of(script, tmp_path)
    bench.goal("speed", (1.97, 1.95, 1.99), 1.96, least=True)
    bench.goal("step", (1.01, 0.99, 1.04), 1.03, least=False, bound=1.04)
    bench_of(script, tmp_path, "tiny").goal("speed", (1.97, 1.95, 1.99), 1.96, least=True)
    assert [words.rpartition(": ")[2] for words in bench.goals] == ["MET", "MISSED"]


def test_a_part_that_fails_is_said_and_the_next_one_is_not_hindered(script, monkeypatch, tmp_path, capsys) -> None:
    def falls(stage):
        raise RuntimeError("no memory")

    monkeypatch.setitem(script.PARTS, "falls", script.Part(30, "8b", {}, (), falls))
    bench = bench_of(script, tmp_path)
    script.measure(bench, "falls", 30)
    assert "falls: FAILED RuntimeError: no memory" in capsys.readouterr().out
    assert not bench.sound
    script.measure(bench, "falls", 3)
    assert "no time is left for it" in capsys.readouterr().out


def test_settings_that_the_rules_refuse_are_named(script) -> None:
    known = {**script.FSDP2, "model.name": "builtin/tiny", "data.train": [{"path": "builtin/dates"}]}
    refused = script._refused(script._as_mapping({**known, "optim.optim": "adamw_8bit"}))
    assert "optim.optim adamw_8bit" in refused[0]
    assert script._refused(script._as_mapping(known)) == []


def test_a_rank_that_is_gone_or_silent_is_named_in_time(script, monkeypatch, tmp_path) -> None:
    ranks = importlib.import_module("_ranks")
    monkeypatch.setattr(ranks, "HERE", tmp_path)
    (tmp_path / "_ranks.py").write_text(
        "import sys, time\nprint('no device', flush=True)\nif sys.stdin.readline(): sys.exit(3)"
    )
    arm = ranks.Ranks("arm", (), 2, tmp_path)
    try:
        begun = time.monotonic()
        with pytest.raises(ranks.Fell, match="rank 0, 1 did not answer in time"):
            arm.answers(begun + 0.5)
        assert time.monotonic() - begun < 5
        arm.order("begin")
        with pytest.raises(ranks.Fell, match=r"rank \d is gone, exit code 3\n    \| arm-0.log: no device"):
            arm.answers(time.monotonic() + 20)
    finally:
        arm.end()
    assert arm.ranks == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parts", [["lora", "overhead"], ["full", "save", "moe", "ep", "context"]])
def test_every_part_runs_on_two_processes_of_a_cpu(tmp_path: Path, parts: list[str]) -> None:
    results = tmp_path / "results.csv"
    told = ["--shape", "tiny", "--rounds", "3", "--seconds", "800", "--check", "--logs", tmp_path / "logs"]
    done = subprocess.run(
        [sys.executable, FOLDER / "two_cards.py", *(f"{part}:400" for part in parts), *told, "--results", results],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MET" not in done.stdout
    assert "FAILED" not in done.stdout
    rows = [(row["work"].removeprefix("cards_"), row["impl"]) for row in csv.DictReader(results.open())]
    expected = {
        "lora": ["ours, one card", "ours, the other card", "ours, ddp", "ours, ddp", "ours, fsdp2, compiled", "ours, fsdp2, layers let go of",
                 "ours, fsdp2, plain layers", "ours, ddp, plain layers", "ours, fsdp2, plain layers"],
        "overhead": ["ours", "trl, same settings"],
        "full": ["ours, compiled", "trl under accelerate's fsdp2", "fully_shard, compiled", "ours, plain layers"],
        "save": ["ours, fsdp2"],
        "moe": ["ours, one card", "ours, ddp", "ours, fsdp2"],
        "ep": ["ours, all experts, compiled", "ours, divided, compiled", "ours, all experts", "ours, divided",
               "ours, divided, PEFT's pass"],
        "context": [],
    }  # fmt: skip
    assert rows == [(part, impl) for part in parts for impl in expected[part]]
    assert "strategy fsdp2 (of " in done.stdout
