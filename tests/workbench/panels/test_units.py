"""Shares in percent and bytes in GiB, in words and on the axis alike."""

from __future__ import annotations

from engine.run.curves import format_metric
from engine.run.series import Series
from workbench.panels.units import in_unit, unit_of


def test_a_share_is_told_and_drawn_in_percent() -> None:
    series = Series()
    series.add(1, 0.25)
    series.add(2, 1.0)
    assert [format_metric("mean_token_accuracy", value) for value in (0.6128, 1.0, 0.0, None)] == [
        "61.3 %",
        "100 %",
        "0 %",
        "-",
    ]
    assert list(in_unit("mean_token_accuracy", series).points()[2]) == [25.0, 100.0]
    assert list(in_unit("loss", series).points()[2]) == [0.25, 1.0]
    assert list(in_unit("memory_peak", series).points()[2]) == [0.25 / 2**30, 1 / 2**30]
    assert [unit_of(name) for name in ("memory_peak", "mean_token_accuracy", "loss")] == ["GiB", "%", ""]
    assert "nan" in format_metric("mean_token_accuracy", float("nan")).lower()
