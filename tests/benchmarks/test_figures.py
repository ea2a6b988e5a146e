"""Figures stand beside their peers and the floor, and are told only while the accuracy cases hold."""

from __future__ import annotations

import ast
import csv
import importlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """A module of the folder of benchmarks, as its scripts import it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    loaded: list[str] = []

    def load(name):
        loaded.append(name)
        return importlib.import_module(name)

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


def test_ours_peers_floor_and_ratios_are_side_by_side(benchmark, tmp_path, capsys):
    figures = benchmark("_figures")
    results = figures.Results(Namespace(results=tmp_path / "results.csv", commit="abc"), "a card")
    times = {"peer": [4.0, 4.4, 4.0], "ours, small": [3.0, 3.0, 3.0], "ours, large": [2.0, 2.2, 2.0]}
    figures.side_by_side(results, "work", "shape", times, dict.fromkeys(times, 7.0), 1.0)
    peer, small, large = capsys.readouterr().out.splitlines()
    assert "4.000 ms   4.00 x floor of 1.000 ms        7 MiB n=3  ours, large / this 0.500 [0.500, 0.500]" in peer
    assert "ours, large / this 0.667" in small
    assert "/ this" not in large
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["impl"], float(row["ms"]), float(row["floor_ms"])) for row in rows] == [
        ("peer", 4.0, 1.0), ("ours, small", 3.0, 1.0), ("ours, large", 2.0, 1.0)
    ]  # fmt: skip


def test_a_script_ends_before_its_figures_while_a_case_fails(benchmark, tmp_path, monkeypatch, capsys):
    accuracy = benchmark("_accuracy")
    cases = tmp_path / "cases.py"
    cases.write_text(
        "import sys\nbad = sys.argv[1] == 'red'\nprint('FAIL red: off' if bad else 'ok   green')\nsys.exit(bad)\n"
    )
    monkeypatch.setattr(accuracy, "CASES", cases)
    accuracy.refuse_while_red("green")
    assert capsys.readouterr().out == "1 accuracy cases hold\n"
    with pytest.raises(SystemExit, match="no figures are reported"):
        accuracy.refuse_while_red("green", "red")
    assert capsys.readouterr().out == "FAIL red: off\n"


def test_the_cases_that_scripts_ask_for_are_there():
    from tests.engine.kernels.kernel_cases import CHECKS

    asked = [
        part.split(")")[0]
        for script in FOLDER.glob("*.py")
        for part in script.read_text("utf-8").split("refuse_while_red(")[1:]
        if not script.name.startswith(("_", "dense_kernels"))
    ]
    names = {name.strip(' "').partition(":")[0] for each in asked for name in each.split(",")}
    by_work = (FOLDER / "dense_kernels.py").read_text("utf-8").split("CASES = ")[1].split("}")[0] + "}"
    names |= {name.partition(":")[0] for each in ast.literal_eval(by_work).values() for name in each}
    assert names <= set(CHECKS)
    assert {"gated_cases", "fp8_rows_cases", "linear_cross_entropy_cases"} <= names
