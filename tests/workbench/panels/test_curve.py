"""A line of a chart in its window: where it may be moved, how it is smoothed, what becomes of points on one dot column."""

from __future__ import annotations

import math

import pytest

from engine.run.series import Series
from workbench.panels.curve import Curves, Fetched, Line, axis_of, by_column, newest_by_column, smoothed


def curves(steps: int) -> Curves:
    series = Series()
    for step in range(steps):
        series.add(step, float(step))
    made = Curves()
    made.lines = (Line("loss", series),)
    return made


def test_a_window_stays_within_the_run_and_a_wide_one_is_the_whole_of_it() -> None:
    run = curves(100)
    for start, width, shown in ((-20, 40, (0, 40)), (30, 40, (30, 70)), (90, 40, (59, 99)), (5, 200, None)):
        run.move(start, width)
        assert run.zoomed == shown


def test_a_mean_moves_by_a_tenth_and_a_median_forgets_after_nine() -> None:
    assert smoothed([1.0, 1.0, 11.0, 1.0], "mean") == pytest.approx([1.0, 1.0, 2.0, 1.9])
    rising = [float(value) for value in range(12)]
    assert smoothed(rising, "median")[-1] == 7.0, "of the values from 3 to 11"


def test_points_on_one_dot_column_keep_their_ends_and_smoothed_ones_the_newest() -> None:
    steps, dots = [0, 1, 2, 3, 4, 5], (lambda step: step // 2)
    low, high = [3.0, 1.0, math.nan, 5.0, 7.0, math.nan], [4.0, 2.0, math.nan, 6.0, 8.0, math.nan]
    assert by_column(steps, low, high, dots) == ([0, 1, 2], [1.0, 5.0, 7.0], [4.0, 6.0, 8.0])
    assert newest_by_column(steps[:5], low[:5], dots) == ([0, 1, 2], [1.0, 5.0, 7.0])


def test_an_axis_of_one_value_is_opened_around_it() -> None:
    def ends(value: float, log: bool) -> tuple[float, float]:
        axis = axis_of([Fetched("loss", [0], [value], [value])], log)
        assert axis is not None
        return axis.low, axis.high

    assert ends(4.0, True) == (2.0, 8.0)
    assert ends(4.0, False) == pytest.approx((3.6, 4.4))
    assert ends(0.0, False) == (-1.0, 1.0)


def test_a_point_names_the_steps_that_it_alone_stands_for() -> None:
    run = curves(3000)
    steps = run.steps(40)
    firsts = [run.at(step, 40)[0] for step in steps]
    assert firsts == [0, *(before + 1 for before in steps[:-1])]
