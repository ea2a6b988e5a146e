"""Steps that were measured on cards: the table of `benchmarks/scale_curves.py`, and what it says about a step of another shape.

Own measurements in the user's cache come before those that are shipped. What is not readable counts as not there. What a
card's rows say of others is fitted by `engine.facts.step_speeds`.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.caches import user_cache
from engine.config.facts import Facts, ModelFacts, StepTime
from engine.config.tree import RunConfig
from engine.hardware import Gpu

SHIPPED = Path(__file__).with_name("step_times.csv")
FEWEST = 4
"""Rows of a card from which something is said."""
MOST = 10_000
"""Rows of a table that are read."""
KEPT_HIDDEN, KEPT_QUERY, KEPT_KEYS, KEPT_WIDE = 4, 3, 3, 3
"""Numbers a token that a compiled layer keeps, of its width, the query's, the keys' and its MLP's (`engine.planning.memory_model`)."""
SENT_TO_EXPERTS = 2
"""Numbers of the hidden width that each expert of a token takes beside its own: the row that is sent to it, and what it gives back."""


def own() -> Path:
    """The file of measurements on this machine."""
    return user_cache() / "step_times.csv"


def of_card(gpu: Gpu) -> tuple[StepTime, ...]:
    """The rows of this card, own ones where there are enough of them or no others. A card that is only described is known by a
    part of its name."""
    mine, packaged = (tuple(row for row in read(file) if _is(gpu, row)) for file in (own(), SHIPPED))
    return mine if len(mine) >= FEWEST or not packaged else packaged


def shipped(gpu: Gpu) -> tuple[StepTime, ...]:
    """The rows that are shipped: of the card with the most, then of this one where it is another."""
    rows = read(SHIPPED)
    cards = [row.card for row in rows]
    most = max(cards, key=cards.count, default="")
    here = [row for row in rows if _is(gpu, row) and row.card != most]
    return (*(row for row in rows if row.card == most), *here)


def _is(gpu: Gpu, row: StepTime) -> bool:
    return gpu.name == row.card or f" {gpu.name} " in f" {row.card} "


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
    names = [name for name in StepTime.__dataclass_fields__ if name not in _COUNTED]
    kept = {point(row): row for row in (*read(file), *rows)}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(names)
        lines.writerows([getattr(row, name) for name in names] for row in kept.values())
    beside.replace(file)


_COUNTED = ("held_numbers", "of_experts", "put_together", "scores", "seeing", "seen")
"""What no point of the curves has, so that tables have no column for it."""
_FOUND = ("seconds", "peak_mib", "numbers", "vocabulary", *_COUNTED)


def point(row: StepTime) -> tuple[object, ...]:
    """What a row is a measurement of."""
    return tuple(getattr(row, name) for name in StepTime.__dataclass_fields__ if name not in _FOUND)


def step_of(config: RunConfig, facts: Facts, tokens: float, length: float, parameters: int) -> StepTime | None:
    """A batch of this run, of so many tokens in rows of that length, as a row of the table; None for a model whose shape is
    not known. `parameters` are those of the base; of a mixture's, those count that a token meets."""
    model = facts.model
    if model is None or not model.layers or not model.heads or not model.head_dim:
        return None
    experts = _numbers_of_experts(model)
    if model.experts and (not experts or not model.experts_per_token):
        return None
    met = experts * (model.experts_per_token or 0)
    return StepTime(
        card="",
        weights="lora" if config.adapter.kind == "lora" else "full",
        held=_held(config, model),
        compiled=config.kernels.torch_compile is True,
        again=_again(config),
        layers=model.layers,
        parameters=max(1, _multiplied(model, parameters - experts * (model.experts or 0)) + met),
        width=model.heads * model.head_dim,
        tokens=max(1, round(tokens)),
        length=max(1, round(length)),
        seconds=1.0,
        numbers=_kept(model),
        vocabulary=model.vocab_size or 0,
        held_numbers=_multiplied(model, parameters - experts * (model.experts or 0)) + experts * (model.experts or 0),
        of_experts=_kept_by_experts(model, experts),
        put_together=experts * (model.experts or 0) * _adds_to_experts(config),
    )


def _held(config: RunConfig, model: ModelFacts) -> str:
    """The format of the layers' weights, as far as it says what computing with them takes."""
    held, dtype = config.model.quantization, config.model.dtype
    if held != "none":
        return held
    if model.stored and config.adapter.kind == "lora":
        return f"stored {model.stored}"
    return "tf32" if dtype == "float32" and config.optim.tf32 else dtype


def _numbers_of_experts(model: ModelFacts) -> int:
    """Weights of one expert of each layer together."""
    return sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.expert_weights)


def _adds_to_experts(config: RunConfig) -> bool:
    """Whether PEFT multiplies the matrices of adapters on experts with each other and adds them to the weights."""
    on_experts = config.adapter.kind == "lora" and bool(config.adapter.target_parameters)
    return on_experts and config.kernels.fused_experts is not True


def _kept(model: ModelFacts) -> int:
    """Numbers that a compiled layer keeps for each token, its experts' left out."""
    hidden, head, layers = model.hidden_size or 0, model.head_dim or 0, model.layers or 1
    narrow = KEPT_HIDDEN * hidden + head * (KEPT_QUERY * (model.heads or 0) + KEPT_KEYS * (model.kv_heads or 0))
    wide = KEPT_WIDE * (model.intermediate_size or 4 * hidden)
    return narrow + wide * (layers - _with_experts(model)) // layers


def _kept_by_experts(model: ModelFacts, experts: int) -> int:
    """The same of the experts that a token meets, in the mean of all layers: three numbers of an expert's width, as wide as
    its weights say, and what is sent to it."""
    hidden, each = model.hidden_size or 1, model.experts_per_token or 0
    return each * (experts // hidden + SENT_TO_EXPERTS * hidden * _with_experts(model)) // (model.layers or 1)


def _with_experts(model: ModelFacts) -> int:
    """How many layers have experts."""
    if not model.experts:
        return 0
    return model.layers or 0 if model.with_experts is None else len(model.with_experts)


def _multiplied(model: ModelFacts, parameters: int) -> int:
    """How many of a base's parameters each token is multiplied with: not the embeddings, where the head has its own."""
    embeddings = (model.vocab_size or 0) * (model.hidden_size or 0)
    inside = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.linears)
    return parameters - embeddings if parameters - inside > 1.5 * embeddings else parameters


def _again(config: RunConfig) -> str:
    """The tier, and how many layers it is for where these are not all."""
    tier, layers = config.memory.gradient_checkpointing, config.memory.recompute_num_layers
    return str(tier) if layers is None or not tier else f"{tier} of {layers}"


def row_of(each: Mapping[str, str]) -> StepTime | None:
    """A line of a table, which may have more columns; None for what nobody can have measured."""
    try:
        row = StepTime(
            card=each["card"], weights=each["weights"], held=each["held"], compiled=each["compiled"] == "True",
            again=each["again"], layers=int(each["layers"]), parameters=int(each["parameters"]), width=int(each["width"]),
            tokens=int(each["tokens"]), length=int(each["length"]), seconds=float(each["seconds"]),
            peak_mib=float(each["peak_mib"]), reference=float(each["reference"]),
            numbers=int(each.get("numbers") or 0), vocabulary=int(each.get("vocabulary") or 0),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
    numbers = (row.layers, row.parameters, row.width, row.tokens, row.length, row.seconds)
    # Bounds that no measurement reaches, and that no sum of them goes over; NaN is inside of none.
    fine = all(0 < number < 1e15 for number in numbers) and row.seconds > 1e-9
    fine = fine and max(row.numbers, row.vocabulary) < 1e15 and min(row.numbers, row.vocabulary) >= 0
    return row if fine and 0 <= row.peak_mib < 1e15 and 0 <= row.reference < 100 else None
