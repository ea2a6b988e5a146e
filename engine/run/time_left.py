"""How long a run will take from where it stands: its steps, and what comes between them as often as it still will.

Evaluations, checkpoints and answers are no part of a step. What one of them takes is known from the first one on, and is
counted from then for each that is to come; until then nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SAVE, EVAL, PROMPTS = "save", "eval", "prompts"
AT_THE_END = SAVE, PROMPTS
"""What comes after the last step too, whichever it is."""


def learned(costs: Mapping[str, float], seen: Sequence[str], seconds: float) -> dict[str, float]:
    """Seconds of each kind, now that these, one or more, took so many seconds together."""
    new = [kind for kind in dict.fromkeys(seen) if kind not in costs]
    rest = seconds - sum(costs[kind] for kind in seen if kind in costs)
    if new:
        share = max(0.0, rest) / sum(kind in new for kind in seen)
        return {**costs, **dict.fromkeys(new, share)}
    # Half of what they were wrong by: the next one may be shorter again.
    return {**costs, **{kind: max(0.0, costs[kind] + rest / 2 / len(seen)) for kind in set(seen)}}


def to_come(every: Mapping[str, int], done: Mapping[str, int], step: int, last: int) -> dict[str, int]:
    """How many of each kind there are from `step`, which is made, to the `last` one; `done` is where each was seen last."""
    counts = {}
    for kind, steps in every.items():
        after = max(step - 1, done.get(kind, -1))
        counts[kind] = max(0, last // steps - after // steps)
        if kind in AT_THE_END and last % steps and after < last:
            counts[kind] += 1
    return counts


def due(every: Mapping[str, int], done: Mapping[str, int], step: int) -> dict[str, int]:
    """Those that come at `step`, which is made, and have not come yet."""
    return {kind: int(step % steps == 0 and done.get(kind, -1) < step) for kind, steps in every.items()}


def seconds(pace: float, steps: int, costs: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Seconds of so many steps at this pace, and of what comes between them."""
    return pace * max(0, steps) + sum(costs.get(kind, 0.0) * count for kind, count in counts.items())
