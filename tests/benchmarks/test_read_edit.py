"""An edit in the largest form costs what it did: by this processor's own measure, since machines are busy."""

from __future__ import annotations

import importlib
import statistics
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CALLS = 50_000


def yardstick() -> float:
    """Milliseconds of this processor for so many plain calls: about what an edit takes."""

    def nothing(number: int) -> int:
        return number

    begun = time.process_time()
    for number in range(CALLS):
        nothing(number)
    return (time.process_time() - begun) * 1000


def test_an_edit_costs_no_more_than_some_thousand_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    read_edit = importlib.import_module("read_edit")
    read_edit.measure(1)  # what is kept of sentences is made by the first round
    unit = min(yardstick() for _ in range(10))
    edit = min(statistics.median(read_edit.measure(4, time.process_time)[0]) for _ in range(2))
    assert edit < 2 * unit, f"{edit:.2f} ms, {edit / unit:.1f} times {CALLS:,} calls: rules or sentences have grown"
