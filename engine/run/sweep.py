"""A sweep: several values for some settings, a queued run for each combination, and what became of them.

Each run of a sweep names it in its `run.json`, as `sweep`: `id` and `values` by setting, as they were written. There is no
other record, so the runs are ordinary ones: watched, stopped and resumed alone.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UsageError, WorkbenchError, visible
from engine.run import data_record
from engine.run.index import open_view
from engine.run.launch import value_at
from engine.run.store import RunFolder, runs_in, slug
from engine.run.view import RunView

PICTURED = 32
"""Points of a curve in the picture of a sweep."""
SANE = 16
"""Runs that a sweep starts without being asked twice."""
MOST = 1000
SEED = "run.seed"
SHARED = ("eval_rewards/accuracies", "eval_mean_token_accuracy")
"""What held-out rows tell besides the loss, and of which more is better whatever the method's settings are."""
NOISE = ("adapter.lora_dropout", "optim.neftune_noise_alpha")
"""Settings that make the loss of a training step another number, and are off where held-out rows are measured."""
_CLOSES = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Axes:
    """The settings that vary, each with its values as they were written, and the overrides that hold for all."""

    varied: dict[str, list[str]]
    fixed: list[str]

    @property
    def count(self) -> int:
        """How many runs there are."""
        return math.prod(len(values) for values in self.varied.values())

    def cells(self) -> list[dict[str, str]]:
        """Every combination, the last setting changing first."""
        return [dict(zip(self.varied, values, strict=True)) for values in itertools.product(*self.varied.values())]


def axes(pairs: Iterable[str]) -> Axes:
    """What `KEY=VALUE` and `KEY=VALUE,VALUE` ask for; a comma in brackets or quotes is part of its value.

    Raises UsageError for one that is no such pair, that names a setting or a value twice, and where nothing varies.
    """
    varied: dict[str, list[str]] = {}
    fixed: list[str] = []
    seen: set[str] = set()
    for pair in pairs:
        path, sign, text = pair.partition("=")
        path = path.strip()
        if not sign or not path:
            raise UsageError(
                f"{visible(pair)}: must be KEY=VALUE or KEY=VALUE,VALUE.", "For example optim.learning_rate=1e-4,2e-4."
            )
        if path in seen:
            raise UsageError(f"{visible(path)}: is given twice.", "Write all its values behind one =, with commas.")
        seen.add(path)
        values = [value.strip() for value in split(text)]
        if len(values) == 1:
            fixed.append(pair)
            continue
        if "" in values:
            raise UsageError(f"{visible(path)}: has an empty value between its commas.", "Remove the comma.")
        if twice := next((value for place, value in enumerate(values) if value in values[:place]), None):
            raise UsageError(f"{visible(path)}: has the value {visible(twice)} twice.", "Name each value once.")
        varied[path] = values
    if not varied:
        raise UsageError(
            "a sweep needs a setting with several values.", "For example run.seed=1,2,3; one run is `workbench train`."
        )
    combined = Axes(varied, fixed)
    if combined.count > MOST:
        raise UsageError(
            f"the sweep would be {combined.count:,} runs; at most {MOST:,} are taken.", "Name fewer values."
        )
    return combined


def split(text: str) -> list[str]:
    """The parts of a text between its commas, but for those in brackets or quotes."""
    parts, closing, quote = [""], [], ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _CLOSES:
            closing.append(_CLOSES[sign])
        elif closing and sign == closing[-1]:
            closing.pop()
        elif sign == "," and not closing:
            parts.append("")
            continue
        parts[-1] += sign
    return parts


def new_id(name: str) -> str:
    """What to call a sweep."""
    return f"{slug(name)}-{secrets.token_hex(3)}"


def runs_of(root: Path, sweep: str) -> list[RunFolder]:
    """The runs of a sweep, as they were launched. Raises UsageError where there is none."""
    placed: list[tuple[float, RunFolder]] = []
    known: dict[str, None] = {}
    for run in runs_in(root):
        values = run.read_json()
        membership = values.get("sweep")
        if isinstance(membership, dict) and isinstance(membership.get("values"), dict):
            known[str(membership.get("id"))] = None
            if membership.get("id") == sweep:
                placed.append((float(values.get("created") or 0), run))
    if not placed:
        names = ", ".join(visible(name) for name in list(known)[-5:])
        raise UsageError(
            f"no sweep is called {visible(sweep)[:80]} in {visible(str(root))}.",
            f"Sweeps here: {names}." if names else "There is none yet.",
        )
    return [run for _, run in sorted(placed, key=lambda entry: (entry[0], entry[1].id))]


# -- what became of them -----------------------------------------------------------------------------------------------
def results(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """All of it as plain data: `metric`, whether more of it is better, `runs` with `value`, `groups` over seeds, `best`.

    The metric is that of the held-out rows by which each run tells its best checkpoint; where no rows were held out, the
    newest loss. Runs that go by different metrics have no best one, nor have those of which a setting that varies changes
    what the metric measures: these are `differs_by`, those of them by which its rows differ `other_rows`, and `instead` is a
    metric that all of them have, or null.
    """
    rows: list[dict[str, Any]] = []
    rules: set[tuple[str, bool]] = set()
    shared = set(SHARED)
    measured: list[str | None] = []
    for run in runs:
        values = run.read_json()
        with open_view(run) as watch:
            watch.read_completely()
            view = watch.view.copy()
        sweep = values.get("sweep") or {}
        metric, greater = str(sweep.get("metric") or "loss"), bool(sweep.get("greater_is_better"))
        rules.add((metric, greater))
        measured.append(_measured_on(run, "eval" if metric.startswith("eval_") else "train"))
        value, step = _value(view, metric)
        shared &= view.latest.keys()
        rows.append(
            {
                "id": run.id,
                "values": {str(key): str(chosen) for key, chosen in sweep.get("values", {}).items()},
                "state": view.state,
                "cause_kind": view.cause_kind or None,
                "step": view.step,
                "value": value,
                "at_step": step,
                "curve": _curve(view, metric),
            }
        )
    answer: dict[str, Any] = {"metric": None, "greater_is_better": None, "runs": rows, "groups": [], "best": None}
    answer |= {"differs_by": [], "other_rows": [], "instead": None}
    if len(rules) != 1:
        return answer
    metric, greater = next(iter(rules))
    otherwise = {key for row in rows for key in row["values"] if _measures_otherwise(metric, key)}
    other_rows = [key for key in _other_rows(rows, measured) if key not in otherwise]
    differs = sorted({*otherwise, *other_rows})
    answer |= {"differs_by": differs, "other_rows": other_rows}
    answer["instead"] = next((name for name in SHARED if differs and not other_rows and name in shared), None)
    sign = -1 if greater else 1
    ended = [row for row in rows if row["state"] in ("finished", "stopped") and row["value"] is not None]
    groups = _groups(ended) if any(SEED in row["values"] for row in rows) else []
    if groups:
        leading = min(groups, key=lambda group: sign * float(group["mean"]))
        ended = [row for row in ended if row["id"] in leading["runs"]]
    best = min(ended, key=lambda row: sign * float(row["value"]))["id"] if ended and not differs else None
    return {**answer, "metric": metric, "greater_is_better": greater, "groups": groups, "best": best}


def _measures_otherwise(metric: str, setting: str) -> bool:
    """Whether `metric` is another number under another value of `setting`, even for one and the same model."""
    if metric.endswith("loss"):
        of_method = setting.startswith("method.") and setting != "method.reference"
        return of_method or (metric == "loss" and setting in NOISE)
    return setting == "method.reward_funcs" and metric.endswith("reward")


def _measured_on(run: RunFolder, split: str) -> str | None:
    """A hash of the rows of a split, whatever their order, and of whether they see others of their pack; None where unknown."""
    from engine.config.files import parse  # only a table of results needs it

    try:
        record = data_record.read(run)
        data = parse(run.read_config(), path=run.config).mapping
    except WorkbenchError:
        return None
    if record is None or split not in record:
        return None
    hashes = record[split].hashes
    packed, apart = (value_at(data, ("data", key)) for key in ("packing", "packing_cross_doc_attn_mask"))
    known = f"{sorted(hashes.hashes)} {hashes.rest} {bool(packed and not apart)}"
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def _other_rows(rows: Sequence[Mapping[str, Any]], measured: Sequence[str | None]) -> list[str]:
    """The settings, but for the seed, of which another value alone is a metric over other rows, tokens or labels."""
    found = []
    for key in {key: None for row in rows for key in row["values"] if key != SEED}:
        seen: dict[tuple[tuple[str, str], ...], set[str]] = {}
        for row, on in zip(rows, measured, strict=True):
            if on is not None:
                rest = tuple((name, value) for name, value in row["values"].items() if name != key)
                seen.setdefault(rest, set()).add(on)
        if any(len(each) > 1 for each in seen.values()):
            found.append(key)
    return sorted(found)


def _value(view: RunView, metric: str) -> tuple[float | None, int | None]:
    """What the run reached, and at which step."""
    if view.best is not None and view.best["metric"] == metric:
        return float(view.best["value"]), int(view.best["step"])
    value = view.latest.get(metric)
    return (None, None) if value is None or not math.isfinite(value) else (value, view.step)


def _curve(view: RunView, metric: str) -> list[tuple[int, float]]:
    """(step, value) of at most `PICTURED` points of the metric's curve."""
    if metric not in view.series:
        return []
    steps, low, high = view.series[metric].points(width=PICTURED)
    points = ((step, (a + b) / 2) for step, a, b in zip(steps, low, high, strict=True))
    return [(int(step), value) for step, value in points if math.isfinite(value)]


def _groups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs that differ in their seed alone, with the mean of their values and the spread (standard deviation)."""
    groups: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        rest = tuple((key, value) for key, value in row["values"].items() if key != SEED)
        groups.setdefault(rest, []).append(row)
    return [
        {
            "values": dict(rest),
            "runs": [row["id"] for row in members],
            "mean": statistics.fmean(row["value"] for row in members),
            "spread": statistics.stdev(row["value"] for row in members) if len(members) > 1 else None,
        }
        for rest, members in groups.items()
    ]
