"""What a card takes for the parts of a batch, and how that is fitted to batches that were measured on it. Pure and quick.

A batch takes `(card ** 5 + host ** 5) ** (1 / 5)` seconds, since the host launches what the card computes and the longer of the
two is waited for, and what the optimizer takes. The card's part is a sum of products with weights and of attention
(floating-point operations), what stands between products (numbers that layers keep for their backward pass, arXiv:2205.05198
counts them so) and weights that are unpacked; the host's is launches, told by the layer. All numbers of a card are fitted
together to all of its rows, by least squares of relative errors that weigh an outlier less (soft L1), and are held lightly to what
the card's published speeds let expect, which stands in where no row says anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from engine.config.facts import StepTime


class Speeds(NamedTuple):
    """Seconds for one of each on a card and its host."""

    products: float
    """A floating-point operation of a product with weights of 16 bits."""
    attention: float
    """A floating-point operation of attention."""
    compiled: float
    """A number that compiled layers keep between products."""
    plain: float
    """The same of layers as they are."""
    adapted: float
    """The same with adapters, whose products read and add to what is there: as much more."""
    fp8: float
    """A floating-point operation of a product with weights in FP8."""
    unpacked: float
    """A packed weight, once a batch."""
    packed: float
    """A number between products, where weights are packed: as much more."""
    optimizer: float
    """A trained weight, once a batch. It was measured alone (`adamw_torch_fused`, H200: 5.8 ps) and is not fitted."""
    layer: float
    """The host's launches of a compiled layer, forward and backward."""
    adapters: float
    """As much more with adapters."""
    eager: float
    """As much more where the layer is not compiled."""
    held: float
    """As much more where weights are packed or in FP8."""


_OF_CARD, _OPTIMIZER = 8, 8
_TOGETHER = 5
"""How sharply the longer of host and card is what a batch takes."""
_OUTLIER = 0.05
"""Relative error from which a row weighs less."""
_HELD_TO = 0.05
"""Relative error of one row that weighs as much as a number twice what its card's published speeds let expect."""
_LEAST, _MOST = 0.1, 10.0
_ROUNDS = 60
BACKWARD = 2.5
"""Attention's backward pass in forward passes: five products for two (arXiv:2307.08691)."""
AGAIN = {"False": 0.0, "selective": 0.0, "medium": 1.0}
"""Operations a parameter and token that are computed again; of what is not named nearly a forward pass."""
FORWARD = {True: 1.4, False: 1.85}
"""That: compiled layers leave out their last product, which nothing of theirs needs, and the head has none again."""
ATTENTION_STAYS = ("False", "selective", "medium")
"""Tiers that do not compute attention again."""
SLOWER = {"float32": (8.0, 2.0), "tf32": (2.0, 2.0)}
"""How many times as long operations take, and what stands between products, as in 16 bits."""
HEAD = {False: 0.6, True: 0.27}
"""What a score of the head takes beside its products, in numbers between products: trained and frozen (H200, 8,192 tokens, heads of
1,024 and 4,096 columns: 4.3 and 1.9 ps a score where a number takes 7)."""
PUT_TOGETHER = 5.0
"""What adding adapters to a weight takes and their gradients from it, in optimizer's steps (H100, 8 layers of 30B-A3B: 41 ps)."""
SCORES = 1.6
"""What a score that attention holds takes, in numbers between plain layers' products (H100, gpt-oss-20b, its softmax in float32)."""
PLAIN_NUMBERS = 5.3
"""Numbers that a layer keeps for each token, in sides of a square of its weights, where a row does not say."""


def published(compute: float, bandwidth: float) -> Speeds:
    """What a card of so many operations (16 bits, dense) and bytes a second lets expect: three quarters of the first for
    products, three fifths for attention, bytes for all else. The host's are those of a server with an H200."""
    return Speeds(
        1 / (0.75 * compute), 1 / (0.6 * compute), 26 / bandwidth, 80 / bandwidth, 6 / bandwidth, 1 / (1.4 * compute),
        15 / bandwidth, 6 / bandwidth, 28 / bandwidth, 2.8e-3, 2.0e-3, 2.5e-3, 1.5e-3,
    )  # fmt: skip


def scaled(speeds: Speeds, compute: float, bandwidth: float) -> Speeds:
    """Those of a card that computes and moves bytes so many times as fast, beside the same host."""
    computing = {name: getattr(speeds, name) / compute for name in ("products", "attention", "fp8")}
    moving = ("compiled", "plain", "adapted", "unpacked", "packed", "optimizer")
    return speeds._replace(**computing, **{name: getattr(speeds, name) / bandwidth for name in moving})


def terms(row: StepTime) -> Speeds:
    """How many of each there are in a batch."""
    slow, wide = SLOWER.get(row.held, (1.0, 1.0))
    lora, in_fp8 = row.weights == "lora", row.held == "fp8"
    once = 4.0 if lora else 6.0
    tier, share = tier_of(row), share_of(row)
    each = once + share * AGAIN.get(tier, FORWARD[row.compiled]) + row.reference
    products = each * row.parameters * row.tokens * slow
    passes = 1 + BACKWARD + (0.0 if tier in ATTENTION_STAYS else share) + row.reference / 2
    kept = row.numbers or PLAIN_NUMBERS * math.sqrt(row.parameters / row.layers)
    moved = row.layers * row.tokens * each / once * wide
    between, of_experts = kept * moved, row.of_experts * moved  # experts have kernels of their own, compiled or not
    packed = not in_fp8 and row.held not in ("bfloat16", "float16", *SLOWER)
    # Plain layers that are computed again are launched again, a third of what both passes launch.
    relaunched = 0.0 if row.compiled else share * AGAIN.get(tier, 2.0) / 2 / 3
    launched = row.layers * (1 + relaunched + row.reference / once)
    return Speeds(
        products=0.0 if in_fp8 else products,
        attention=2.0 * row.layers * row.width * row.length * row.tokens * passes * slow,
        compiled=(between if row.compiled else 0.0) + of_experts + HEAD[lora] * row.vocabulary * row.tokens * wide,
        plain=(0.0 if row.compiled else between) + SCORES * row.scores * row.length * moved,
        adapted=between * lora,
        fp8=products if in_fp8 else 0.0,
        unpacked=float(row.held_numbers or row.parameters) * packed,
        packed=between * packed,
        optimizer=(0.0 if lora else float(row.held_numbers or row.parameters)) + PUT_TOGETHER * row.put_together,
        layer=launched,
        adapters=launched * lora,
        eager=launched * (not row.compiled),
        held=launched * (packed or in_fp8),
    )


def tier_of(row: StepTime) -> str:
    """The tier of checkpointing."""
    return row.again.partition(" of ")[0]


def share_of(row: StepTime) -> float:
    """Of the layers, those that are computed again."""
    first = row.again.partition(" of ")[2]
    return min(1.0, int(first) / row.layers) if first.isdigit() else 1.0


def seconds(speeds: Sequence[float], of: Sequence[float]) -> float:
    """How long a batch with so many of each takes."""
    parts = list(map(_times, speeds, of))
    return _longer(sum(parts[:_OF_CARD]), sum(parts[_OPTIMIZER + 1 :])) + parts[_OPTIMIZER]


def _longer(card: float, host: float) -> float:
    most = max(card, host)
    return most * sum((each / most) ** _TOGETHER for each in (card, host)) ** (1 / _TOGETHER) if most else 0.0


@lru_cache(maxsize=64)
def fitted(rows: tuple[StepTime, ...], expected: Speeds) -> Speeds:
    """The numbers of the card that these rows were measured on. None is under a tenth or over ten times what is expected."""
    lines = [[value * each / row.seconds for value, each in zip(terms(row), expected, strict=True)] for row in rows]
    at = [1.0] * len(expected)
    least = _missed(lines, at)
    for _ in range(_ROUNDS):
        matrix, slope = _around(lines, at)
        towards = _bounded(matrix, slope, at)
        step = 1.0
        while step > 1e-4:
            tried = [old + step * (new - old) for old, new in zip(at, towards, strict=True)]
            if (missed := _missed(lines, tried)) < least:
                break
            step /= 2
        else:
            break
        at, gained, least = tried, least - missed, missed
        if gained < 1e-9 * least:
            break
    return Speeds(*map(_times, at, expected))


def _missed(lines: Sequence[Sequence[float]], at: Sequence[float]) -> float:
    soft = sum(2 * (math.sqrt(1 + ((seconds(at, line) - 1) / _OUTLIER) ** 2) - 1) for line in lines)
    return _OUTLIER**2 * soft + _HELD_TO**2 * sum((each - 1) ** 2 for each in at)


def _around(lines: Sequence[Sequence[float]], at: Sequence[float]) -> tuple[list[list[float]], list[float]]:
    """Curvature and slope of what is missed (Gauss-Newton), rows weighed by their error."""
    count = len(at)
    matrix = [[_HELD_TO**2 * (row == column) for column in range(count)] for row in range(count)]
    slope = [_HELD_TO**2 * (each - 1) for each in at]
    for line in lines:
        parts = list(map(_times, line, at))
        card, host = sum(parts[:_OF_CARD]), sum(parts[_OPTIMIZER + 1 :])
        both = _longer(card, host) or 1.0
        on_card, on_host = ((each / both) ** (_TOGETHER - 1) for each in (card, host))
        shares = [*[on_card] * _OF_CARD, 1.0, *[on_host] * (count - _OF_CARD - 1)]
        moved = list(map(_times, line, shares))
        off = both + parts[_OPTIMIZER] - 1
        weight = 1 / math.sqrt(1 + (off / _OUTLIER) ** 2)
        for row in range(count):
            if moved[row]:
                slope[row] += weight * off * moved[row]
                for column in range(count):
                    matrix[row][column] += weight * moved[row] * moved[column]
    return matrix, slope


def _bounded(matrix: Sequence[Sequence[float]], slope: Sequence[float], at: Sequence[float]) -> list[float]:
    """Where the parabola around `at` is least inside the bounds, number by number in turn."""
    there = list(at)
    moved = [0.0] * len(at)
    for _ in range(200):
        most = 0.0
        for row, line in enumerate(matrix):
            wanted = there[row] - (slope[row] + sum(map(_times, line, moved))) / line[row]
            wanted = min(_MOST, max(_LEAST, wanted)) if row != _OPTIMIZER else there[row]
            most = max(most, abs(wanted - there[row]))
            there[row], moved[row] = wanted, wanted - at[row]
        if most < 1e-7:
            break
    return there


def _times(left: float, right: float) -> float:
    return left * right
