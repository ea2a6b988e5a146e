"""The curves of `scale_curves.py` as a table and a picture a card, and how far the estimate is from points kept out of its fit.

    python benchmarks/scale_report.py [TABLE.csv ...] [--into FOLDER] [--ship]

Reads the tables named and that of `--into`, where all points are kept (`scale_curves.csv`), and writes there
`scale_curves.md` and `scale_curves_CARD.svg`. Time of a point that is kept out is told from the others of its card, as the
estimate does (`engine.facts.step_speeds`); memory is the closed-form estimate of today for all points. `--ship` writes
the points that are not kept out into the package's table, which the estimate reads on a card that nobody measured at home.
The exit code is 1 where a point that is kept out is missed by more than 10 %. Needs no card.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _scale_points import PARTS, Measured, add, estimated_again, fitted_to, read

from engine.config.facts import StepTime
from engine.facts import step_speeds, step_times
from engine.planning.speed import published, speeds_by

AIM = 0.10
STAR = " \\*"
COLOURS = {
    "lora": "#2563eb", "full": "#b45309", "nf4": "#047857", "fp8": "#7c3aed", "plain": "#64748b", "full plain": "#be185d",
}  # fmt: skip
WIDTH, HEIGHT, EDGE = 430, 270, 56


@dataclass(frozen=True)
class Judged:
    """A point beside what the estimate says of it: seconds from the fit of its card, MiB of the closed form."""

    measured: Measured
    seconds: float | None
    mib: float
    note: str

    @property
    def time_off(self) -> float | None:
        return None if self.seconds is None else self.seconds / self.measured.step.seconds - 1

    @property
    def memory_off(self) -> float | None:
        return self.mib / self.measured.step.peak_mib - 1 if self.measured.step.peak_mib else None

    @property
    def missed(self) -> bool:
        off = [share for share in (self.time_off, self.memory_off) if share is not None]
        return self.measured.point.kept_out and any(abs(share) > AIM for share in off)


def counted(points: Sequence[Measured]) -> list[tuple[Measured, float, str]]:
    """All points of one card, in the order of the curves: what is counted of them counted anew, MiB by today's formula, and
    what `auto` takes there today where that differs."""
    order = [point.name for part in PARTS.values() for point in part]
    known = []
    for each in sorted(points, key=lambda each: order.index(each.point.name)):
        step, mib, note = estimated_again(each)
        known.append((replace(each, step=step), mib, note))
    return known


def judged(known: Sequence[tuple[Measured, float, str]], others: Sequence[StepTime]) -> list[Judged]:
    """The points of one card, told from those that are fitted; what these do not say, from `others` of another card."""
    speeds = speeds_of(fitted_to(each for each, _, _ in known), others)
    return [Judged(each, _told(speeds, each.step), mib, note) for each, mib, note in known]


def _told(speeds: step_speeds.Speeds | None, step: StepTime) -> float | None:
    return None if speeds is None else step_speeds.seconds(speeds, step_speeds.terms(step))


def speeds_of(rows: Sequence[StepTime], others: Sequence[StepTime]) -> step_speeds.Speeds | None:
    """What these rows say of the card, as the estimate takes them; None where they are too few."""
    card = published(rows[0].card) if rows else None
    if card is None or len(rows) < step_times.FEWEST:
        return None
    return speeds_by(tuple(rows), tuple(others), card)


def table(card: str, found: Sequence[Judged], others: Sequence[StepTime]) -> list[str]:
    """The lines of one card in markdown, and what the estimate missed on points that were kept out."""
    first = found[0].measured
    lines = [f"## {card}", "", f"torch {first.torch}, transformers {first.transformers}, {first.date}.", ""]
    lines += [
        "| point | tokens/s | s a step (fastest to slowest) | GiB | checkpointing | compiled | time by the fit | memory by the estimate |"
    ]
    lines += ["| - | -: | -: | -: | - | - | -: | -: |"]
    for each in found:
        step, point = each.measured.step, each.measured.point
        lines.append(
            f"| {point.name}{STAR * point.kept_out} | {step.tokens / step.seconds:,.0f} | {step.seconds:.4g}{f' ({each.measured.slow})' if each.measured.slow else ''} | "
            f"{step.peak_mib / 1024:.2f} | {step.again} | {'yes' if step.compiled else 'no'} | {_off(each.time_off)} | "
            f"{_off(each.memory_off)}{f' ({each.note})' if each.note else ''} |"
        )
    out = [each for each in found if each.measured.point.kept_out]
    lines += ["", f"\\* kept out of the fit. {_within('time', [each.time_off for each in out])}, "
              f"{_within('memory', [each.memory_off for each in out])}; memory of all points: "
              f"{_within('', [each.memory_off for each in found])}. "
              f"{_within('Every point told from all others but itself, time', _each_alone(found, others))}.", ""]  # fmt: skip
    if others:
        alone = speeds_by((), tuple(others), published(card) or (0, 0))
        shares = [(_told(alone, each.measured.step) or 0.0) / each.measured.step.seconds - 1 for each in found]
        lines += [f"{sum(not each.measured.point.kept_out for each in found)} rows are few for the fit: each of its numbers begins at "
                  f"that of {others[0].card}, scaled by published speeds. By that card's alone, {_within('time', shares)}.", ""]  # fmt: skip
    return lines


def _each_alone(found: Sequence[Judged], others: Sequence[StepTime]) -> list[float | None]:
    """How far the time of each point is off by a fit to all others, those that are kept out among them."""
    steps = [each.measured.step for each in found]
    shares = []
    for at, step in enumerate(steps):
        told = _told(speeds_of([*steps[:at], *steps[at + 1 :]], others), step)
        shares.append(None if told is None else told / step.seconds - 1)
    return shares


def _off(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def _within(what: str, shares: Sequence[float | None]) -> str:
    known = [abs(share) for share in shares if share is not None]
    if not known:
        return f"{what} not told".strip()
    inside = sum(share <= AIM for share in known)
    words = f"{inside} of {len(known)} within {AIM:.0%}, {statistics.median(known):.1%} in the middle, {max(known):.1%} at most"
    return f"{what}: {words}" if what else words


@dataclass(frozen=True)
class Pane:
    """One picture of several: what is drawn over what, on axes of powers of two."""

    title: str
    shown: Callable[[Measured], bool]
    across: Callable[[Measured], float]
    up: Callable[[Measured], float]
    unit: str


def _speed(each: Measured) -> float:
    return each.step.tokens / each.step.seconds


def _gib(each: Measured) -> float:
    return each.step.peak_mib / 1024


OVER: tuple[tuple[str, Callable[[Measured], bool], Callable[[Measured], float]], ...] = (
    ("tokens of one row, 8B", lambda each: each.point.shape in ("8b", "tiny") and each.point.rows == 1, lambda each: each.point.tokens),
    ("rows of 2,048 tokens, 8B", lambda each: each.point.shape == "8b" and each.point.tokens == 2048, lambda each: each.point.rows),
    ("billions of parameters, 4 rows of 2,048 tokens", lambda each: (each.point.rows, each.point.tokens) == (4, 2048), lambda each: each.step.parameters / 1e9),
)  # fmt: skip
PANES = [
    *(Pane(title, shown, across, _speed, "tokens a second") for title, shown, across in OVER),
    *(Pane(title, shown, across, _gib, "GiB of the card") for title, shown, across in OVER),
]


def picture(card: str, points: Sequence[Measured]) -> str:
    """Tokens a second and memory over length, batch and size, a line for each way to hold and compute weights: an SVG of its
    own, hollow where a point is kept out of the fit."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * WIDTH} {2 * HEIGHT + 50}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/><text x="12" y="20" font-size="14">{card}: supervised '
        "fine-tuning of Qwen3 shapes, ours by default</text>"
    ]
    for place, (way, colour) in enumerate(COLOURS.items()):
        out.append(f'<text x="{620 + 110 * place}" y="20" fill="{colour}">{NAMES[way]}</text>')
    for place, pane in enumerate(PANES):
        shown = [each for each in points if pane.shown(each) and pane.up(each) > 0]
        if shown:
            left, top = place % 3 * WIDTH, 36 + place // 3 * HEIGHT
            out += [f'<g transform="translate({left},{top})">', *_drawn(pane, shown), "</g>"]
    return "\n".join([*out, "</svg>"]) + "\n"


NAMES = {
    "lora": "LoRA", "full": "all weights", "nf4": "LoRA on NF4", "fp8": "LoRA on FP8", "plain": "LoRA, plain layers",
    "full plain": "all, plain",
}  # fmt: skip


def _drawn(pane: Pane, shown: Sequence[Measured]) -> list[str]:
    xs, ys = [math.log2(pane.across(each)) for each in shown], [math.log2(pane.up(each)) for each in shown]
    low, high = math.floor(min(ys)), math.ceil(max(ys) + 1e-9)
    left, right = min(xs), max(xs)

    def place(x: float, y: float) -> tuple[float, float]:
        wide = (right - left) or 1.0
        return (
            EDGE + (x - left) / wide * (WIDTH - 2 * EDGE),
            HEIGHT - EDGE - (y - low) / ((high - low) or 1) * (HEIGHT - 2 * EDGE),
        )

    out = [f'<text x="{EDGE}" y="{HEIGHT - 14}">{pane.title}</text>', f'<text x="4" y="{EDGE - 16}">{pane.unit}</text>']
    for power in range(low, high + 1):
        y = place(left, power)[1]
        out.append(f'<line x1="{EDGE}" y1="{y:.0f}" x2="{WIDTH - EDGE}" y2="{y:.0f}" stroke="#e2e8f0"/>')
        out.append(f'<text x="{EDGE - 6}" y="{y + 4:.0f}" text-anchor="end" fill="#475569">{_short(2.0**power)}</text>')
    for across in sorted(set(map(pane.across, shown))):
        x = place(math.log2(across), low)[0]
        out.append(
            f'<text x="{x:.0f}" y="{HEIGHT - EDGE + 14}" text-anchor="middle" fill="#475569">{_short(across)}</text>'
        )
    for way in dict.fromkeys(each.point.way for each in shown):
        line = sorted((*place(x, y), each) for x, y, each in zip(xs, ys, shown, strict=True) if each.point.way == way)
        colour = COLOURS[way]
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y, _ in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        for x, y, each in line:
            fill = "white" if each.point.kept_out else colour
            out.append(
                f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3.5" fill="{fill}" stroke="{colour}"><title>{each.point.name}: '
                f"{pane.up(each):,.4g} {pane.unit}</title></circle>"
            )
    return out


def _short(number: float) -> str:
    """As it stands at an axis: 512, 16K, 14.8."""
    if number >= 1024 and number % 1024 == 0:
        return f"{number / 1024:,.0f}K"
    return f"{number:,.0f}" if number == int(number) else f"{number:.2g}" if number < 1 else f"{number:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE.csv")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent)
    parser.add_argument("--ship", action="store_true", help="write the package's table")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    if lacking := [file for file in given.tables if not file.exists()]:
        parser.error(f"there is no {', '.join(map(str, lacking))}")
    kept = given.into / "scale_curves.csv"
    points = read([kept, *given.tables])
    if not points:
        parser.error(f"{kept}: no point was measured yet; `python benchmarks/scale_curves.py` measures them")
    if given.tables:
        kept.unlink(missing_ok=True)
        for each in points:
            add(kept, each)
    cards = list(dict.fromkeys(each.step.card for each in points))
    known = {card: counted([each for each in points if each.step.card == card]) for card in cards}
    fits = {card: fitted_to(each for each, _, _ in of_card) for card, of_card in known.items()}
    most = max(cards, key=lambda card: len(fits[card]))
    others = {card: fits[most] if card != most and published(most) else [] for card in cards}
    found = {card: judged(known[card], others[card]) for card in cards}
    lines = ["# Scale curves", "", WHAT, ""]
    for card, each in found.items():
        drawing = f"scale_curves_{re.sub(r'[^A-Za-z0-9]+', '_', card)}.svg"
        (given.into / drawing).write_text(picture(card, [one.measured for one in each]), encoding="utf-8")
        lines += [*table(card, each, others[card]), f"![Tokens a second and memory on {card}]({drawing})", ""]
    (given.into / "scale_curves.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
    if given.ship:
        every = [one.measured for each in found.values() for one in each]
        step_times.SHIPPED.unlink(missing_ok=True)
        step_times.write(step_times.SHIPPED, fitted_to(each for each in every if each.gpu is not None))
    return int(any(one.missed for each in found.values() for one in each))


WHAT = (
    "Supervised fine-tuning of Qwen3 shapes with random weights, packed rows, LoRA of rank 16 or all weights, every `auto` left: "
    "measured by `scale_curves.py`, written by `scale_report.py`. GiB are what the process held of the card, its context too. "
    "Which points are kept out was fixed before they were measured, and no number is fitted to them; the forms of both estimates were changed with their "
    "misses in sight, and some were measured again. LAB.md says what was told before a look."
)


if __name__ == "__main__":
    sys.exit(main())
