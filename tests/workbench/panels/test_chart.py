"""The chart: no spike is lost, the cursor tells the truth, and nothing is drawn while nothing changes."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from textual.app import App, ComposeResult

from engine.run.series import Series
from workbench.panels import glyphs, picture, raster
from workbench.panels.chart import Chart
from workbench.panels.curve import Fetched, Line, axis_of, smoothed


def recorded(values: list[float], every: int = 1) -> Series:
    """The engine's own series of these values; what is not finite is left out, as when events are read."""
    series = Series()
    for index, value in enumerate(values):
        if math.isfinite(value):
            series.add(index * every, value)
    return series


class ChartApp(App[None]):
    def __init__(self, *lines: Line) -> None:
        super().__init__()
        self.lines = lines

    def compose(self) -> ComposeResult:
        yield Chart("loss", id="chart")

    def on_mount(self) -> None:
        chart = self.query_one(Chart)
        chart.show(self.lines)
        chart.focus()


def text_of(app: App[None]) -> str:
    return "\n".join("".join(segment.text for segment in row) for row in app.screen._compositor.render_strips())


def dots(grid: raster.Grid) -> set[tuple[int, int]]:
    """Every dot that is set, as (x, y) from the top left."""
    found = set()
    for cell, bits in enumerate(grid.bits):
        for dx in range(2):
            for dy in range(4):
                if bits & raster._DOTS[dx][dy]:
                    found.add((cell % grid.columns * 2 + dx, cell // grid.columns * 4 + dy))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=300), st.integers(4, 40), st.integers(2, 12))
def test_the_highest_and_the_lowest_value_are_always_drawn(values: list[float], columns: int, rows: int) -> None:
    low, high = min(values), max(values)
    if high - low < 1e-6:
        return
    grid = raster.Grid(columns, rows)
    place = raster.scale(low, high, grid.down)
    xs = [round(index / (len(values) - 1) * (grid.across - 1)) for index in range(len(values))]
    merged: dict[int, tuple[float, float]] = {}
    for x, value in zip(xs, values, strict=True):
        a, b = merged.get(x, (value, value))
        merged[x] = (min(a, value), max(b, value))
    ordered = sorted(merged)
    raster.draw(grid, ordered, [merged[x][0] for x in ordered], [merged[x][1] for x in ordered], place, 0)
    drawn = dots(grid)
    top = next(x for x in ordered if merged[x][1] == high)
    bottom = next(x for x in ordered if merged[x][0] == low)
    assert (top, 0) in drawn
    assert (bottom, grid.down - 1) in drawn


def test_a_spike_of_one_step_in_many_thousands_is_seen() -> None:
    values = [1.0] * 20_000
    values[13_333] = 9.0
    steps, low, high = recorded(values).points(width=120)
    grid = raster.Grid(60, 10)
    place = raster.scale(1.0, 9.0, grid.down)
    xs = [round(step / 19_999 * (grid.across - 1)) for step in steps]
    raster.draw(grid, xs, low, high, place, 0)
    tops = [x for x, y in dots(grid) if y == 0]
    assert tops == [pytest.approx(13_333 / 19_999 * 119, abs=2)]


def test_a_gap_is_left_empty_and_a_lone_point_is_seen() -> None:
    grid = raster.Grid(10, 4)
    nan = math.nan
    place = raster.scale(0, 1, grid.down)
    raster.draw(grid, [0, 4, 8, 12, 16], [0.5, nan, 0.5, nan, 0.5], [0.5, nan, 0.5, nan, 0.5], place, 0)
    columns = {x for x, _ in dots(grid)}
    assert {0, 1, 8, 9, 16, 17} == columns


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12), st.booleans())
@example(1.0, 0.015625, 2, True)
def test_labels_lie_on_the_axis_and_differ(low: float, span: float, most: int, log: bool) -> None:
    high = low + span
    if not high > low or span < abs(low) * 1e-6:
        return
    values = raster.ticks(low, high, most, log)
    labels = picture.axis_labels(values, log)
    assert all(low - span * 1e-6 <= value <= high + span * 1e-6 for value in values)
    assert len(values) <= 2 * most + 1
    if not (log and low > 0 and high / low >= 8) and max(map(abs, values), default=0) < 1e6 and span > 1e-2:
        assert len(set(labels)) == len(labels)


def test_labels_are_rounded_numbers() -> None:
    assert raster.tick_labels(raster.ticks(0.013, 2.31, 5)) == ["0.5", "1.0", "1.5", "2.0"]
    assert raster.tick_labels(raster.ticks(0, 10_000, 5)) == ["0", "5,000", "10,000"]
    assert [raster.tick_labels([v])[0] for v in raster.ticks(0.01, 100, 6, log=True)] == [
        "0.01",
        "0.1",
        "1",
        "10",
        "100",
    ]


def test_smoothing_keeps_gaps_and_a_median_ignores_a_spike() -> None:
    values = [1.0, 1.0, 1.0, 50.0, 1.0, math.nan, 2.0]
    assert smoothed(values, "median")[3] == 1.0
    mean = smoothed(values, "mean")
    assert 1.0 < mean[3] < 50.0
    assert math.isnan(mean[5])
    assert mean[6] == 2.0


async def test_the_cursor_names_the_step_and_its_value() -> None:
    values = [2.0 - index / 100 for index in range(60)]
    app = ChartApp(Line("loss", recorded(values)))
    async with app.run_test(size=(80, 12)) as pilot:
        chart = app.query_one(Chart)
        await pilot.press("right")
        assert chart.values_at_cursor() == (59, 59, [("loss", values[59], values[59], 0, "")])
        await pilot.press("left", "left", "h")
        assert chart.cursor == 56
        await pilot.pause()
        assert "step 56  loss 1.44" in text_of(app)


async def test_a_point_that_stands_for_many_steps_says_so() -> None:
    values = [float(index % 7) for index in range(10_000)]
    app = ChartApp(Line("loss", recorded(values)))
    async with app.run_test(size=(60, 12)) as pilot:
        await pilot.press("home")
        first, last, found = app.query_one(Chart).values_at_cursor() or (0, 0, [])
        name, low, high, *_ = found[0]
        assert (first, name) == (0, "loss")
        assert last > first
        assert (low, high) == (min(values[first : last + 1]), max(values[first : last + 1]))
        assert f"steps 0-{last}" in text_of(app)


async def test_zoom_goes_down_to_single_steps_and_back() -> None:
    values = [float(index) for index in range(5000)]
    app = ChartApp(Line("loss", recorded(values)))
    async with app.run_test(size=(80, 12)) as pilot:
        chart = app.query_one(Chart)
        assert chart.window == (0, 4999)
        await pilot.press("end", *["plus"] * 8)
        start, stop = chart.window or (0, 0)
        assert stop == 4999
        assert stop - start < 40
        await pilot.press("shift+left")
        assert (chart.window or (0, 0))[1] < 4999
        await pilot.press("end")
        first, last, found = chart.values_at_cursor() or (0, 0, [])
        assert first == last
        assert found[0][1] == float(first)
        await pilot.press("0")
        assert chart.window == (0, 4999)
        await pilot.press("home", "plus")
        start, stop = chart.window or (0, 0)
        assert chart.cursor is not None
        assert (stop - start, start <= chart.cursor < 100) == (2500, True), "around the cursor"


async def test_at_a_step_that_one_of_two_runs_never_reached_the_other_alone_has_a_value() -> None:
    short, long = Line("short", recorded([1.0, 2.0, 3.0]), tone=0), Line("long", recorded([4.0] * 9), tone=1)
    app = ChartApp(short, long)
    async with app.run_test(size=(80, 12)) as pilot:
        chart = app.query_one(Chart)
        await pilot.press("end")
        assert chart.values_at_cursor() == (8, 8, [("long", 4.0, 4.0, 1, "")])
        await pilot.press("home", "right")
        assert chart.values_at_cursor() == (1, 1, [("short", 2.0, 2.0, 0, ""), ("long", 4.0, 4.0, 1, "")])


async def test_a_title_without_room_loses_letters_of_its_name_and_none_of_its_value() -> None:
    chart = Line("pairs judged right", recorded([60.0, 68.8]), 0, "pairs judged right 68.8 %", "68.8 %", "%")
    app = ChartApp(chart)
    async with app.run_test(size=(30, 12)) as pilot:
        app.query_one(Chart).show([chart], title=chart.label)
        await pilot.pause()
        assert text_of(app).splitlines()[0].rstrip() == "pairs judged right 68.8 %"
        await pilot.resize_terminal(21, 12)
        await pilot.pause()
        assert text_of(app).splitlines()[0].rstrip() == "pairs judged… 68.8 %"
        await pilot.resize_terminal(40, 12)
        await pilot.press("left")
        await pilot.pause()
        assert text_of(app).splitlines()[0].rstrip() == "step 1  pairs judged right 68.8 %"


async def test_names_that_do_not_fit_beside_their_values_give_way_to_signs() -> None:
    lines = [Line(f"a-rather-long-name-{at}", recorded([1.0, 2.0]), tone=at) for at in range(4)]
    app = ChartApp(*lines)
    async with app.run_test(size=(60, 12)) as pilot:
        await pilot.press("end")
        await pilot.pause()
        assert text_of(app).splitlines()[0].rstrip() == "step 1  ── 2  ╌╌ 2  ·· 2  ─· 2"


async def test_a_quiet_run_draws_nothing() -> None:
    series = recorded([1.0, 2.0, 3.0])
    app = ChartApp(Line("loss", series, stamp=3))
    async with app.run_test(size=(60, 12)) as pilot:
        chart = app.query_one(Chart)
        await pilot.pause()
        before = chart.draws
        for _ in range(5):
            chart.show([Line("loss", series, stamp=3)])
            await pilot.pause()
        assert chart.draws == before
        series.add(3, 4.0)
        chart.show([Line("loss", series, stamp=4)])
        await pilot.pause()
        assert chart.draws == before + 1


async def test_log_scale_leaves_out_what_is_not_positive_and_says_when_nothing_is_left() -> None:
    app = ChartApp(Line("loss", recorded([-1.0, -2.0])))
    async with app.run_test(size=(60, 12)) as pilot:
        await pilot.press("L")
        await pilot.pause()
        assert "no values above zero" in text_of(app)
        app.query_one(Chart).show([Line("loss", recorded([0.0, 0.01, 1.0, 10.0]), stamp=2)])
        await pilot.pause()
        assert "10" in text_of(app)
        assert "log" in text_of(app)


async def test_the_axis_follows_most_of_the_values_says_so_and_a_key_brings_every_value() -> None:
    spiked = [1.0 + 0.01 * (step % 7) for step in range(200)]
    spiked[3], spiked[90] = 40.0, 900.0
    app = ChartApp(Line("grad_norm", recorded(spiked)))
    async with app.run_test(size=(60, 12)) as pilot:
        await pilot.pause()
        assert "beyond: 900" in text_of(app)
        assert "log" not in text_of(app)
        assert "1.04┤" in text_of(app), "the labels are of the values near one"
        await pilot.press("L")
        assert " log" in text_of(app).splitlines()[0]
        assert "beyond" not in text_of(app)
        await pilot.press("L")
        assert "800" in text_of(app)
        await pilot.press("0")
        assert "beyond: 900" in text_of(app)

        fell = [6.0 * 0.96**step for step in range(200)]  # most of it lies at the foot of a linear axis
        app.query_one(Chart).show([Line("loss", recorded(fell), stamp=2)])
        await pilot.pause()
        assert " log" in text_of(app).splitlines()[0]
        app.query_one(Chart).show([Line("loss", recorded(fell[:12]), stamp=3)])
        await pilot.pause()
        assert "log" not in text_of(app).splitlines()[0], "the first steps are drawn as they are"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80))
def test_an_axis_holds_most_values_and_names_what_it_leaves_out(values: list[float]) -> None:
    axis = axis_of([Fetched("loss", range(len(values)), values, values)], None)
    finite = sorted(value for value in values if math.isfinite(value))
    assert (axis is None) == (not finite)
    if axis is not None:
        out = [value for value in finite if not axis.low <= value <= axis.high]
        assert len(out) <= 2 * max(1, len(finite) // 50)
        assert set(axis.beyond) == {value for value in (finite[0], finite[-1]) if value in out}
        assert axis.low < axis.high


@pytest.mark.parametrize("size", [(80, 24), (20, 5), (12, 3), (6, 2), (1, 1)])
async def test_any_size_and_any_numbers_can_be_drawn(size: tuple[int, int]) -> None:
    odd = [math.nan, 1.0, math.inf, -math.inf, 1e300, -1e300, 0.0, math.nan, 5e-324]
    app = ChartApp(Line("a", recorded(odd)), Line("b", recorded([])), Line("c", recorded([1.0])))
    async with app.run_test(size=size) as pilot:
        await pilot.press("L", "m", "plus", "right", "left", "minus", "L", "m", "0")
        await pilot.pause()


async def test_lines_differ_without_colour_and_names_carry_no_escape_sequence() -> None:
    app = ChartApp(Line("loss", recorded([1.0, 2.0] * 30)), Line("e\x1b[2Jval[/b]", recorded([2.0, 3.0] * 30)))
    async with app.run_test(size=(70, 12)) as pilot:
        await pilot.pause()
        text = text_of(app)
    assert "── loss" in text
    assert "╌╌ e␛[2Jval[/b]" in text
    assert "\x1b" not in text


async def test_a_terminal_without_unicode_gets_plain_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_ASCII", "1")
    glyphs.ascii_only.cache_clear()
    try:
        app = ChartApp(Line("loss", recorded([1.0, 2.0, 3.0, 2.0])), Line("eval", recorded([2.0, 2.0, 2.0, 2.5])))
        async with app.run_test(size=(60, 12)) as pilot:
            await pilot.press("right", "L")
            await pilot.pause()
            text = text_of(app)
        assert text.isascii()
        assert "*" in text
        assert "o" in text
    finally:
        glyphs.ascii_only.cache_clear()


async def test_a_legend_that_does_not_fit_is_cut_with_a_sign_or_left_out() -> None:
    series = recorded([1.0, 2.0, 3.0])
    named = [Line(name, series, 0, name) for name in ("token accuracy 1", "held-out accuracy 2")]
    for width, words in ((60, "╌╌ held-out accuracy 2"), (42, "╌╌ held-out"), (30, "loss  ── token accuracy 1")):
        app = ChartApp(*named)
        async with app.run_test(size=(width, 12)) as pilot:
            await pilot.pause()
            title = text_of(app).splitlines()[0].rstrip()
            assert words in title
            assert title.endswith(("accuracy 2", "…", "accuracy 1"))
