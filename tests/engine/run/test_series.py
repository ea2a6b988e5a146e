"""Curves: what is drawn is what was logged, at a cost that does not grow."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.run import series as module
from engine.run.series import Series


def filled(count: int, start: int = 1) -> Series:
    series = Series()
    for step in range(start, start + count):
        series.add(step, float((step * 7919) % 1000))
    return series


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-1e6, 1e6)), max_size=400), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_extremes_and_ends_survive_any_width(steps_and_values, width):
    series, step, truth = Series(), 0, []
    for gap, value in steps_and_values:
        step += gap
        assert series.add(step, value)
        truth.append((step, value))
    steps, low, high = series.points(width=width)
    assert len(steps) <= width
    if truth:
        assert min(low) == min(value for _, value in truth)
        assert max(high) == max(value for _, value in truth)
        assert steps[-1] == truth[-1][0]
        assert series.last == truth[-1]
    assert list(steps) == sorted(steps)


def test_the_newest_ten_thousand_points_are_exact_and_old_spikes_stay():
    series = Series()
    for step in range(1, 60_001):
        series.add(step, 1e6 if step == 777 else float(step % 13))
    steps, low, high = series.points(start=50_001)
    assert list(steps) == list(range(50_001, 60_001))
    assert list(low) == list(high) == [float(step % 13) for step in range(50_001, 60_001)]
    _, _, high = series.points(width=100)
    assert max(high) == 1e6
    assert len(series) == 60_000


def test_memory_and_drawing_do_not_grow_with_the_run():
    def entries(series: Series) -> int:
        return sum(len(columns[0]) for _, columns in series.as_columns())

    long = filled(300_000)
    assert entries(long) < 2 * module.KEEP_POINTS + module.LEVELS * 2 * module.KEEP_GROUPS
    begun = time.process_time()
    for _ in range(20):
        steps, _, _ = long.points(width=200)
    assert (time.process_time() - begun) / 20 < 0.01
    assert 150 <= len(steps) <= 200


def test_a_step_back_is_refused():
    series = filled(10)
    assert not series.add(3, 1.0)
    assert len(series) == 10


@given(st.integers(0, 900), st.integers(1, 500))
@settings(max_examples=40, deadline=None)
def test_cutting_equals_never_having_logged_it(cut, more):
    series, truth = filled(800), Series()
    series.cut_after(cut)
    for step in range(1, min(cut, 800) + 1):
        truth.add(step, float((step * 7919) % 1000))
    for step in range(min(cut, 800) + 1, min(cut, 800) + 1 + more):
        series.add(step, -1.0)
        truth.add(step, -1.0)
    assert series == truth


def test_cutting_far_back_keeps_whole_groups_and_goes_on():
    series = filled(100_000)
    series.cut_after(5_000)
    assert 5_000 - 64 <= len(series) <= 5_000
    rest = random.Random(1)
    for step in range(5_001, 9_000):
        assert series.add(step, rest.random())
    steps, low, high = series.points(width=100)
    assert steps[-1] == 8_999
    assert steps[0] < 200
    assert min(low) >= 0
    assert max(high) == 999.0


def test_columns_round_trip():
    series = filled(50_000)
    again = Series.from_columns(series.as_columns())
    assert again == series
    assert again.points(width=77) == series.points(width=77)
    twin = series.copy()
    twin.add(50_001, 1.0)
    assert len(series) == 50_000
