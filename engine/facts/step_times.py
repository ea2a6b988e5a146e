"""Steps that were measured on cards, and what they say about a step of another shape: the table of `benchmarks/scale_curves.py`.

A batch takes `max(a * layers, b * F + c * A + e * E + d * P)`: the host launches layers while the card computes, which takes time
for products with weights (F floating-point operations), attention (A), what stands between the products (E numbers of a
layer's width, the side of a square of its weights, for each token) and what goes over all weights once a batch (P of them: the
optimizer, weights that are unpacked). For each card, and each way of holding and computing weights, these are fitted to its
rows by least squares of the relative error, none of them negative. What attention takes, and compiled layers between products, is
the same for each way: where rows are few it is taken from the way with the most. Own measurements in the user's cache come before those
that are shipped. What is not readable counts as not there.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from engine.caches import user_cache
from engine.config.facts import Facts, ModelFacts, StepTime
from engine.config.tree import RunConfig
from engine.hardware import Gpu

SHIPPED = Path(__file__).with_name("step_times.csv")
FEWEST = 4
"""Rows of one kind from which something is said."""
MOST = 10_000
"""Rows of a table that are read."""
AGAIN = {"False": 0.0, "selective": 0.0, "medium": 1.0}
"""Operations a parameter and token that are computed again; all of a forward pass, 2, for what is not named."""
ATTENTION_STAYS = ("False", "selective", "medium")
"""Tiers that do not compute attention again."""
BACKWARD = 2.5
"""Attention's backward pass in forward passes: five products for two (arXiv:2307.08691)."""
Numbers = tuple[float, ...]
_OF_CARD = 4


def own() -> Path:
    """The file of measurements on this machine."""
    return user_cache() / "step_times.csv"


def of_card(gpu: Gpu) -> tuple[StepTime, ...]:
    """The rows of this card, own ones where there are any. A card that is only described is known by a part of its name."""
    for file in (own(), SHIPPED):
        if found := tuple(row for row in read(file) if gpu.name == row.card or f" {gpu.name} " in f" {row.card} "):
            return found
    return ()


def read(file: Path) -> list[StepTime]:
    """The rows of a table; none where it is not there, and none of those that are no rows."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            first = itertools.islice(csv.DictReader(lines), MOST)
            return [row for each in first if (row := row_of(each)) is not None]
    except (OSError, UnicodeError, csv.Error):
        return []


def write(file: Path, rows: Iterable[StepTime]) -> None:
    """Writes the table; rows of the same point take the place of those that are there."""
    names = list(StepTime.__dataclass_fields__)
    kept = {point(row): row for row in (*read(file), *rows)}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(names)
        lines.writerows([getattr(row, name) for name in names] for row in kept.values())
    beside.replace(file)


def point(row: StepTime) -> tuple[object, ...]:
    """What a row is a measurement of."""
    return tuple(getattr(row, name) for name in StepTime.__dataclass_fields__ if name not in ("seconds", "peak_mib"))


def kind(row: StepTime) -> tuple[str, str, bool]:
    """How weights are trained, held and computed: rows of one kind are told from each other by their size alone."""
    return row.weights, row.held, row.compiled


def terms(row: StepTime) -> Numbers:
    """Layers, operations with weights and of attention, numbers between products, and weights in one batch."""
    products = (4.0 if row.weights == "lora" else 6.0) + _share(row) * AGAIN.get(_tier(row), 2.0) + row.reference
    between = row.tokens * math.sqrt(row.parameters * row.layers) * products
    passes = 1 + BACKWARD + (0.0 if _tier(row) in ATTENTION_STAYS else _share(row)) + row.reference / 2
    attention = 2.0 * row.layers * row.width * row.length * row.tokens * passes
    return float(row.layers), products * row.parameters * row.tokens, attention, between, float(row.parameters)


@lru_cache(maxsize=64)
def fitted(rows: tuple[StepTime, ...], leading: tuple[StepTime, ...] = ()) -> Numbers | None:
    """The numbers for rows of one kind; None where they are too few. `leading` are those of the kind with the most rows.

    Rows that wait for the host are those with the least work a layer: each share of the rows is tried.
    """
    if len(rows) < FEWEST:
        return None
    held = _held(rows, leading)
    known = sorted(((terms(row), row.seconds) for row in rows), key=lambda each: each[0][1] / each[0][0])
    best: Numbers | None = None
    least = math.inf
    for waiting in range(len(known) - 1):
        host = _least_squares([[each[0] / took] for each, took in known[:waiting]]) if waiting else [0.0]
        card = _on_card(known[waiting:], held) or _on_card(known[waiting:], {})
        if host is None or card is None:
            continue
        numbers = (host[0], *card)
        missed = sum((_total_seconds(numbers, each) / took - 1) ** 2 for each, took in known)
        if missed < least:
            best, least = numbers, missed
    return best


MANY = 8
"""Rows of one kind that tell all of its numbers."""
_ATTENTION, _BETWEEN = 1, 2


def _held(rows: Sequence[StepTime], leading: tuple[StepTime, ...]) -> dict[int, float]:
    """The numbers that rows too few to tell them take from those of another kind, by their place among the card's."""
    if len(rows) >= MANY or len(leading) < MANY or (numbers := fitted(leading)) is None:
        return {}
    both = (_ATTENTION, _BETWEEN) if rows[0].compiled == leading[0].compiled else (_ATTENTION,)
    return {at: numbers[1 + at] for at in both}


def _on_card(known: Sequence[tuple[Numbers, float]], held: Mapping[int, float]) -> Numbers | None:
    """What each of these batches' terms takes of their seconds but for the layers; fewer where that is all they tell."""
    lines = [[value / took for value in each[1:]] for each, took in known]
    left = [1 - sum(number * line[at] for at, number in held.items()) for line in lines]
    free = [at for at in range(_OF_CARD) if at not in held]
    best: Numbers | None = None
    least = math.inf
    for size in range(1, min(len(free), len(lines) - 1) + 1):
        for taken in itertools.combinations(free, size):
            found = _least_squares([[line[at] for at in taken] for line in lines], left)
            if found is None or min(found) < 0:
                continue
            numbers = [held.get(at, 0.0) for at in range(_OF_CARD)]
            for at, value in zip(taken, found, strict=True):
                numbers[at] = value
            missed = sum((sum(map(_times, numbers, line)) - 1) ** 2 for line in lines)
            if missed < least:
                best, least = tuple(numbers), missed
    return best


def _total_seconds(numbers: Numbers, each: Numbers) -> float:
    return max(numbers[0] * each[0], sum(map(_times, numbers[1:], each[1:])))


def seconds(asked: StepTime, rows: Sequence[StepTime]) -> float | None:
    """How long such a batch would take by the rows of its kind; what `asked` says of seconds is not read."""
    kinds: dict[tuple[str, str, bool], list[StepTime]] = {}
    for row in rows:
        kinds.setdefault(kind(row), []).append(row)
    leading = max(kinds.values(), key=len, default=[])
    numbers = fitted(tuple(kinds.get(kind(asked), ())), tuple(leading))
    return None if numbers is None else _total_seconds(numbers, terms(asked))


def step_of(config: RunConfig, facts: Facts, tokens: float, length: float, parameters: int) -> StepTime | None:
    """A batch of this run, of so many tokens in rows of that length, as a row of the table; None for a model whose shape is
    not known, or a mixture, whose tokens meet some of its weights. `parameters` are those of the base."""
    model = facts.model
    if model is None or model.experts or not model.layers or not model.heads or not model.head_dim:
        return None
    held = config.model.quantization
    return StepTime(
        card="",
        weights="lora" if config.adapter.kind == "lora" else "full",
        held=config.model.dtype if held == "none" else held,
        compiled=config.kernels.torch_compile is True,
        again=_again(config),
        layers=model.layers,
        parameters=_multiplied(model, parameters),
        width=model.heads * model.head_dim,
        tokens=max(1, round(tokens)),
        length=max(1, round(length)),
        seconds=1.0,
    )


def _multiplied(model: ModelFacts, parameters: int) -> int:
    """How many of a base's parameters each token is multiplied with: not the embeddings, where the head has its own."""
    embeddings = (model.vocab_size or 0) * (model.hidden_size or 0)
    inside = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.linears)
    return parameters - embeddings if parameters - inside > 1.5 * embeddings else parameters


def _again(config: RunConfig) -> str:
    """The tier, and how many layers it is for where these are not all."""
    tier, layers = config.memory.gradient_checkpointing, config.memory.recompute_num_layers
    return str(tier) if layers is None or not tier else f"{tier} of {layers}"


def _tier(row: StepTime) -> str:
    return row.again.partition(" of ")[0]


def _share(row: StepTime) -> float:
    """Of the layers, those that are computed again."""
    first = row.again.partition(" of ")[2]
    return min(1.0, int(first) / row.layers) if first.isdigit() else 1.0


def _times(left: float, right: float) -> float:
    return left * right


def _least_squares(lines: list[list[float]], wanted: Sequence[float] = ()) -> list[float] | None:
    """What comes nearest to giving what is wanted of each line, or 1; None where the lines do not tell. Columns are brought to
    one size."""
    wanted = wanted or [1.0] * len(lines)
    count = len(lines[0])
    scales = [max(abs(line[at]) for line in lines) for at in range(count)]
    if not all(scales):
        return None
    even = [[value / scale for value, scale in zip(line, scales, strict=True)] for line in lines]
    matrix = [
        [sum(line[row] * line[column] for line in even) for column in range(count)]
        + [sum(line[row] * each for line, each in zip(even, wanted, strict=True))]
        for row in range(count)
    ]
    for at in range(count):
        pivot = max(range(at, count), key=lambda row: abs(matrix[row][at]))
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        if abs(matrix[at][at]) < 1e-12:
            return None
        for row in range(count):
            if row != at:
                share = matrix[row][at] / matrix[at][at]
                matrix[row] = [mine - share * theirs for mine, theirs in zip(matrix[row], matrix[at], strict=True)]
    return [matrix[at][count] / matrix[at][at] / scales[at] for at in range(count)]


def row_of(each: Mapping[str, str]) -> StepTime | None:
    """A line of a table, which may have more columns; None for what nobody can have measured."""
    try:
        row = StepTime(
            card=each["card"], weights=each["weights"], held=each["held"], compiled=each["compiled"] == "True",
            again=each["again"], layers=int(each["layers"]), parameters=int(each["parameters"]), width=int(each["width"]),
            tokens=int(each["tokens"]), length=int(each["length"]), seconds=float(each["seconds"]),
            peak_mib=float(each["peak_mib"]), reference=float(each["reference"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
    numbers = (row.layers, row.parameters, row.width, row.tokens, row.length, row.seconds)
    # Bounds that no measurement reaches, and that no sum of them goes over; NaN is inside of none.
    fine = all(0 < number < 1e15 for number in numbers) and row.seconds > 1e-9
    return row if fine and 0 <= row.peak_mib < 1e15 and 0 <= row.reference < 100 else None
