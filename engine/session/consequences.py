"""What a config means in numbers, worded for app and notebook, with the change that the last edit made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.figures import brief, count, large, percent, size, size_of
from engine.planning.estimate import Estimate

# (label, label where there is little room, attribute of the estimate, how it is written, whether more of it is worse)
CONSEQUENCES: tuple[tuple[str, str, str, Callable[[Any], str], bool], ...] = (
    ("effective batch", "effective batch", "effective_batch", count, False),
    ("steps", "steps", "steps", count, False),
    ("tokens per epoch", "tokens/epoch", "tokens_per_epoch", large, False),
    ("rows too long", "too long", "truncated_share", lambda share: percent(share, 1), True),
    ("rows with nothing to learn", "nothing to learn", "masked_rows", count, True),
    ("rows left out", "left out", "dropped_rows", count, True),
    ("packs are full to", "packs full to", "packing_efficiency", lambda share: percent(share, 1), False),
    ("images per epoch", "images/epoch", "images", large, False),
    ("tokens of images", "image tokens", "image_tokens", large, False),
    ("trainable parameters", "trainable", "trainable_parameters", large, False),
    ("memory", "memory", "memory_total", size, True),
    ("one checkpoint", "checkpoint", "checkpoint_bytes", size, True),
    ("disk for checkpoints", "checkpoints", "checkpoints_bytes", size, True),
    ("comm wait a step, roughly", "comm wait", "communication_seconds", brief, True),
    ("time, roughly", "time, roughly", "seconds_left", brief, True),
    ("tokens a second", "tokens/s", "tokens_per_second", large, False),
)
WHERE_ANY = ("dropped_rows", "images", "image_tokens")
"""Numbers that say nothing where they are 0 and were so before."""
NO_CHANGE = ("0", "0 B", "0.0 %", "0 ms")


@dataclass(frozen=True, slots=True)
class Consequence:
    """One number of an estimate: in words, where there is little room too, with the change that the last edit made."""

    name: str
    label: str
    short: str
    text: str
    plain: str
    """The number alone, without what it is held against."""
    change: str = ""
    worse: bool = False
    over: bool = False
    """More than there is."""
    part: str = ""
    """The number and what it is held against in the least room, where it is held against something."""


def consequences(now: Estimate, before: Estimate | None) -> list[Consequence]:
    """The numbers of an estimate that are known."""
    changes = now.changes(before) if before is not None else {}
    numbers = []
    for label, short, name, write, costly in CONSEQUENCES:
        value = getattr(now, name)
        if value is None or (not value and name in WHERE_ANY and name not in changes):
            continue
        delta, room = changes.get(name, 0), now.device_bytes if name == "memory_total" else None
        written = write(abs(delta))
        numbers.append(
            Consequence(
                name, label, short, size_of(value, room) if room else write(value), write(value),
                change="" if written in NO_CHANGE else f"{'+' if delta > 0 else '−'}{written}",
                worse=costly and delta > 0 and written not in NO_CHANGE,
                over=bool(room and value > room), part=size_of(value, room, "/") if room else "",
            )
        )  # fmt: skip
    return numbers
