"""Counts, shares, bytes and times as every window and message writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import figures

MiB, GiB = 1 << 20, 1 << 30
WRITTEN: list[tuple[Callable[..., str], tuple[Any, ...], str]] = [
    (figures.size, (0,), "0 B"),
    (figures.size, (999,), "999 B"),
    (figures.size, (1000,), "1.0 KiB"),
    (figures.size, (512 * MiB,), "512 MiB"),
    (figures.size, (999 * MiB,), "999 MiB"),
    (figures.size, (999.6 * MiB,), "1.0 GiB"),
    (figures.size, (1010 * MiB,), "1.0 GiB"),
    (figures.size, (79 * GiB,), "79.0 GiB"),
    (figures.size, (141 * GiB,), "141 GiB"),
    (figures.size, (3000 * GiB,), "2.9 TiB"),
    (figures.size, (None,), "-"),
    (figures.size_of, (0.7 * GiB, 23.5 * GiB), "0.7 of 23.5 GiB"),
    (figures.size_of, (19.4 * GiB, 79 * GiB, "/", 0), "19.4/79 GiB"),
    (figures.progress, ({"done": 1200, "total": 24_000},), "1,200 of 24,000"),
    (figures.progress, ({"done": 2 * GiB, "total": 4 * GiB, "unit": "bytes"},), "2.0 GiB of 4.0 GiB"),
    (figures.progress, ({},), "0"),
    (figures.count, (1_234_567,), "1,234,567"),
    (figures.large, (9812,), "9,812"),
    (figures.large, (24_000,), "24 k"),
    (figures.large, (10_092_544,), "10.1 M"),
    (figures.percent, (0.123, 1), "12.3 %"),
    (figures.duration, (42.4,), "0:42"),
    (figures.duration, (11_045,), "3:04:05"),
    (figures.duration, (183_600,), "2 d 3 h"),
    (figures.brief, (0.208,), "208 ms"),
    (figures.brief, (75,), "1 min"),
    (figures.brief, (3 * 86_400,), "3 d"),
    (figures.number, (0.00011,), "1.1e-4"),
    (figures.number, (float("nan"),), "NaN"),
]


@pytest.mark.parametrize(("write", "given", "text"), WRITTEN)
def test_a_number_is_written_for_people(write: Callable[..., str], given: tuple[Any, ...], text: str) -> None:
    assert write(*given) == text
