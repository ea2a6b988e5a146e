"""What every benchmark does with its figures: peers, ours, floor and ratios side by side, and a row of results.csv for each."""

from __future__ import annotations

import argparse
import csv
import datetime
import random
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COLUMNS = "date,commit,device,torch,triton,work,shape,impl,ms,ms_p10,ms_p90,peak_mib,floor_ms"

SETTINGS = "; settings: "
"""What stands in a shape before the arm that a row of `ours` is of, where the fastest of several is `ours`."""


def result_options(parser: argparse.ArgumentParser) -> None:
    """Where a benchmark's figures are kept, and which commit they are of."""
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="", metavar="HASH")


class Results:
    """Rows for the file that `result_options` names; nothing where it names none. A new file begins with its columns."""

    def __init__(self, given: argparse.Namespace, device: str, *packages: str) -> None:
        """`packages` (torch, triton) are those that the figures depend on: their versions stand in each row."""
        self.file: Path | None = given.results
        versions = [_version(name) if name in packages else "" for name in ("torch", "triton")]
        self._first = [datetime.date.today().isoformat(), given.commit, device, *versions]

    def under(self, work: str, shape: str, impl: str, ms: Sequence[float], peak_mib: float | None) -> tuple[str, str]:
        """The work and the shape that a row stands under; scripts that say or keep its figures as they come do so here."""
        return work, shape

    def add(
        self,
        work: str,
        shape: str,
        impl: str = "ours",
        *,
        ms: Sequence[float] = (),
        peak_mib: float | None = None,
        floor_ms: float | None = None,
    ) -> None:
        """One row: the median of `ms` and its 10th and 90th percentile, each left out where there is nothing to tell."""
        work, shape = self.under(work, shape, impl, ms, peak_mib)
        if self.file is None:
            return
        new = not self.file.exists()
        peak = "" if peak_mib is None else f"{peak_mib:.0f}"
        floor = "" if floor_ms is None else f"{floor_ms:.4f}"
        with self.file.open("a", newline="") as out:
            rows = csv.writer(out, lineterminator="\n")
            if new:
                out.write(COLUMNS + "\n")
            rows.writerow([*self._first, work, shape, impl, *_shares(ms), peak, floor])


def side_by_side(
    results: Results,
    work: str,
    shape: str,
    times: Mapping[str, Sequence[float]],
    peaks: Mapping[str, float],
    floor_ms: float,
) -> None:
    """Says and keeps the figures of all who took turns at one work, in milliseconds of each round and MiB where measured.

    Beside each stand how many floors it takes, and the ratio of our fastest (a name that begins with `ours`) to it.
    """
    medians = {name: statistics.median(each) for name, each in times.items()}
    best = min((name for name in times if name.startswith("ours")), key=lambda name: medians[name], default=None)
    for name, each in times.items():
        words = ""
        if best is not None and name != best:
            middle, low, high = ratio(list(zip(times[best], each, strict=True)))
            words = f"  {best} / this {middle:.3f} [{low:.3f}, {high:.3f}]"
        peak = peaks.get(name)
        taken = "" if peak is None else f"{peak:8.0f} MiB"
        print(
            f"{work:18} {shape:40} {name:36} {medians[name]:9.3f} ms {medians[name] / floor_ms:6.2f} x floor of "
            f"{floor_ms:.3f} ms {taken} n={len(each)}{words}",
            flush=True,
        )
        results.add(work, shape, name, ms=each, peak_mib=peak, floor_ms=floor_ms)


def ratio(pairs: Sequence[tuple[float, float]], draws: int = 4000) -> tuple[float, float, float]:
    """Median of the pairs' ratios first / second, and its 95 % interval by drawing pairs again (bootstrap).

    A machine that slows down slows both of a pair, so their ratio tells more than that of two medians.
    """
    draw = random.Random(0)
    ratios = [first / second for first, second in pairs]
    found = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), found[int(0.025 * draws)], found[int(0.975 * draws) - 1]


def _shares(ms: Sequence[float]) -> list[str]:
    if not ms:
        return ["", "", ""]
    ordered = sorted(ms)
    if len(ordered) == 1:
        return [f"{ordered[0]:.4g}", "", ""]
    tenth = len(ordered) // 10
    return [f"{value:.4g}" for value in (statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
